"""AdamW on the mean of the workers' gradients, uncompressed: the baseline of DEF-AdamW.

g <- mean_k g_k(x);   m, v <- means of g, g^2;   x <- x - eta (m^ / (sqrt(v^) + eps) + decay x)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.compress import Compressor, Fill, skip
from undrift.dataparallel.def_ import GroupRates, Rates
from undrift.dataparallel.sgd import SGDMethod
from undrift.dataparallel.workers import Workers


class Moments(NamedTuple):
    """The state between iterations, equal on all workers and updated in place."""

    x: Tensor  # [d]
    m: Tensor  # [d]
    v: Tensor  # [d]


@dataclass(frozen=True)
class AdamWMethod(SGDMethod):
    """The engine of AdamW."""

    decoupled: ClassVar[bool] = True

    def start(self, x: Tensor, workers: Workers) -> Moments:
        return Moments(x, x.new_zeros(len(x)), x.new_zeros(len(x)))

    def step(
        self, state: Any, g: Tensor, rates: Rates, t: int, C: Compressor, workers: Workers, early: Fill = skip
    ) -> None:
        """One iteration with the gradients g [..., d] at x."""
        x, m, v = state
        mean = workers.mean(g)
        for rate in rates:
            s = rate.part
            u = direction(m[s], v[s], mean[s], rate, t).add_(x[s], alpha=rate.decay)
            x[s].sub_(u, alpha=rate.lr)


def direction(m: Tensor, v: Tensor, g: Tensor, rate: GroupRates, t: int) -> Tensor:
    """Adam's direction m^ / (sqrt(v^) + eps) in iteration t; m and v become their means with g."""
    m.lerp_(g, 1 - rate.momentum)
    v.mul_(rate.momentum2).addcmul_(g, g, value=1 - rate.momentum2)
    scale = (v / (1 - rate.momentum2 ** (t + 1))).sqrt_().add_(rate.epsilon)
    return torch.div(m, scale.mul_(1 - rate.momentum ** (t + 1)))


METHOD = AdamWMethod()
