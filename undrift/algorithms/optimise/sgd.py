"""x <- x - eta_l u."""

from __future__ import annotations

from torch import Tensor

from undrift.algorithms.optimise import LocalOptimizer
from undrift.core.layout import Layout
from undrift.core.trees import Nothing
from undrift.core.vec import descend

DECOUPLED = False
READS: tuple[str, ...] = ()


def init(x: Tensor) -> Nothing:
    return Nothing()


def step(rates: LocalOptimizer, x: Tensor, state: Nothing, u: Tensor, layout: Layout) -> tuple[Tensor, Nothing]:
    return descend(x, rates.lr, u), state
