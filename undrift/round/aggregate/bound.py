"""Fixed norm bound: no vector is longer than a given number.

Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning? 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.core.vec import norm
from undrift.round.aggregate import Rule


@dataclass(frozen=True)
class Bound(Rule):
    """v_i min(1, C / |v_i|) with C = `largest`; the method takes their weighted mean."""

    largest: float = 10.0

    keeps_single: ClassVar[bool] = True

    def __call__(self, v: Tensor, weight: Tensor) -> Tensor:
        return shorten(v, torch.full_like(v[..., :1, :1], self.largest))

    def __post_init__(self) -> None:
        if not 0.0 < self.largest < 1e30:
            raise BadSetting(f"bound takes a largest norm above 0 and below 1e30, not {self.largest}")


def lengths(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """v [..., S, P] in units of each client's largest entry, whose squares do not overflow; the unit; and the norm in it."""
    unit = v.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
    u = v / unit
    return u, unit, norm(u)


def shorten(v: Tensor, longest: Tensor) -> Tensor:
    """v [..., S, P], and where a client's is longer than `longest` [..., 1, 1], its direction at that length."""
    u, unit, length = lengths(v)
    return torch.where(length > longest / unit, u * (longest / length.clamp(min=1.0)), v)  # it is at least 1, or 0
