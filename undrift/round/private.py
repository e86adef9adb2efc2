"""A private sum in place of the weighted mean: the server clips every update and adds noise to their sum.

    d = (sum_i clip(d_i, C) + N(0, sigma^2 C^2 I)) / (q N)

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models. ICLR 2018, with a fixed denominator.
"""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort
from undrift.algorithms.wrapper import Wrapper
from undrift.core.trees import State
from undrift.core.vec import norm


class Private(Wrapper):
    """An algorithm whose server sees only the private sum of the updates."""

    def __init__(self, inner: Algorithm, bound: float, noise: float, expected: float) -> None:
        super().__init__(inner)
        object.__setattr__(self, "bound", bound)  # C
        object.__setattr__(self, "noise", noise)  # sigma
        object.__setattr__(self, "expected", expected)  # q N

    def around(self, inner: Algorithm) -> Private:
        return Private(inner, self.bound, self.noise, self.expected)

    def gather(self, companion: State, up: State, cohort: Cohort) -> tuple[Tensor, State]:
        return private_sum(up.d, self.bound, self.noise, cohort.layout.entries) / self.expected, companion


def private_sum(d: Tensor, bound: float, noise: float, entries: int) -> Tensor:
    """The sum of updates [S, P], each no longer than `bound`, with noise on the first entries; the rest is padding."""
    clipped = d * (bound / norm(d).clamp(min=1e-30)).clamp(max=1.0)
    random = torch.Generator().manual_seed(secrets.randbits(63))
    z = torch.zeros(d.shape[-1], dtype=d.dtype)
    z[:entries] = noise * bound * torch.randn(entries, generator=random, dtype=d.dtype)
    return clipped.sum(-2) + z.to(d.device)
