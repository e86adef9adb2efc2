"""Adam: m and v are running means of u and u^2, and x moves along m / sqrt(v), both corrected for their start at zero.

Kingma, Ba: Adam: A Method for Stochastic Optimization. ICLR 2015. beta_1 is `momentum`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.optimise import LocalOptimizer
from undrift.core.vec import descend

BETA2, EPSILON = 0.999, 1e-8


class Adam(NamedTuple):
    """The moments, and how many steps they have seen."""

    m: Tensor
    v: Tensor
    n: Tensor  # [..., 1]


def init(x: Tensor) -> Adam:
    return Adam(torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x[..., :1]))


def step(rates: LocalOptimizer, x: Tensor, state: Adam, u: Tensor) -> tuple[Tensor, Adam]:
    n, beta1 = state.n + 1, rates.momentum
    m, v = torch.lerp(u, state.m, beta1), torch.lerp(u * u, state.v, BETA2)
    direction = m / (1 - beta1**n) / ((v / (1 - BETA2**n)).sqrt() + EPSILON)
    return descend(x, rates.lr, direction), Adam(m, v, n)
