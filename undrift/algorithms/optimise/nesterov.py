"""b <- mu b + u;  x <- x - eta_l (u + mu b): momentum that looks ahead.

Sutskever, Martens, Dahl, Hinton: On the importance of initialization and momentum in deep learning. ICML 2013, in PyTorch's form.
"""

from __future__ import annotations

from torch import Tensor

from undrift.algorithms.optimise import LocalOptimizer
from undrift.algorithms.optimise.momentum import Momentum, init
from undrift.core.layout import Layout
from undrift.core.vec import descend

__all__ = ["DECOUPLED", "READS", "init", "step"]

DECOUPLED = False
READS = ("momentum",)


def step(rates: LocalOptimizer, x: Tensor, state: Momentum, u: Tensor, layout: Layout) -> tuple[Tensor, Momentum]:
    b = rates.momentum * state.b + u
    return descend(x, rates.lr, u + rates.momentum * b), Momentum(b)
