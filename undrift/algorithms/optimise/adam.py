"""Adam: m and v are running means of u and u^2, and x moves along m / sqrt(v), both corrected for their start at zero.

Kingma, Ba: Adam: A Method for Stochastic Optimization. ICLR 2015. beta_1 is `momentum`, beta_2 `momentum2`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.optimise import LocalOptimizer
from undrift.core.layout import Layout
from undrift.core.vec import descend

DECOUPLED = False
READS = ("momentum", "momentum2", "epsilon")


class Adam(NamedTuple):
    """The moments, and how many steps they have seen."""

    m: Tensor
    v: Tensor
    n: Tensor  # [..., 1]


def init(x: Tensor) -> Adam:
    return Adam(torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x[..., :1]))


def step(rates: LocalOptimizer, x: Tensor, state: Adam, u: Tensor, layout: Layout) -> tuple[Tensor, Adam]:
    direction, state = adapt(rates, state, u)
    return descend(x, rates.lr, direction), state


def adapt(rates: LocalOptimizer, state: Adam, u: Tensor) -> tuple[Tensor, Adam]:
    """The direction of the step, and the moments after it."""
    n, beta1, beta2 = state.n + 1, rates.momentum, rates.momentum2
    m, v = torch.lerp(u, state.m, beta1), torch.lerp(u * u, state.v, beta2)
    return m / (1 - beta1**n) / ((v / (1 - beta2**n)).sqrt() + rates.epsilon), Adam(m, v, n)
