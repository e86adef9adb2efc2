"""b <- mu b + u;  x <- x - eta_l b."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.optimise import LocalOptimizer
from undrift.core.layout import Layout
from undrift.core.vec import descend

DECOUPLED = False
READS = ("momentum",)


class Momentum(NamedTuple):
    """The buffer of momentum SGD."""

    b: Tensor


def init(x: Tensor) -> Momentum:
    return Momentum(torch.zeros_like(x))


def step(rates: LocalOptimizer, x: Tensor, state: Momentum, u: Tensor, layout: Layout) -> tuple[Tensor, Momentum]:
    b = rates.momentum * state.b + u
    return descend(x, rates.lr, b), Momentum(b)
