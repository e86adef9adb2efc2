"""EF21-SGDM: EF21 on each worker's own momentum instead of its gradient, so that the noise of small batches is averaged.

Fatkhullin, Tyurin, Richtarik: Momentum Provably Improves Error Feedback! NeurIPS 2023, Algorithm 1. In each iteration:

    v_k <- mu v_k + (1 - mu) g_k(x)
    q_k = C(v_k - h_k)
    h_k <- h_k + q_k;   h <- h + mean_k q_k         the only communication
    x <- x - eta h

mu is the momentum, the paper's 1 - eta; with mu = 0 it is EF21 without momentum. The first iteration sends the whole
gradient, v_k = h_k = g_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.compress import Compressor, Fill, skip
from undrift.dataparallel.def_ import Rates
from undrift.dataparallel.sgd import SGDMethod
from undrift.dataparallel.workers import Workers


class Averages(NamedTuple):
    """The state between iterations, updated in place."""

    x: Tensor  # [d] like mean_h, equal bits on all workers
    mean_h: Tensor  # [d]
    h: Tensor  # [..., d]
    v: Tensor  # [..., d]


@dataclass(frozen=True)
class EF21SGDMMethod(SGDMethod):
    """The engine of EF21-SGDM."""

    own: ClassVar[tuple[str, ...]] = ("h", "v")

    def start(self, x: Tensor, workers: Workers) -> Averages:
        h, v = (x.new_zeros(*workers.lead, len(x)) for _ in range(2))
        return Averages(x, x.new_zeros(len(x)), h, v)

    def step(
        self, state: Averages, g: Tensor, rates: Rates, t: int, C: Compressor, workers: Workers, early: Fill = skip
    ) -> None:
        """One iteration with the gradients g [..., d] at x; nothing can be computed early."""
        x, mean_h, h, v = state
        if t == 0:
            h.copy_(g)
            v.copy_(g)
            mean_h.copy_(workers.mean(g))
        else:
            for rate in rates:
                part, mu = rate.part, rate.momentum
                v[..., part].mul_(mu).add_(g[..., part], alpha=1 - mu)
            q = g.copy_(v).sub_(h).clone()
            C.exchange(g, t, workers).add_to(mean_h)  # h <- h + mean_k q_k; g keeps what C dropped
            h.add_(q.sub_(g))  # q_k = C(v_k - h_k);  h_k <- h_k + q_k
        for rate in rates:
            x[rate.part].sub_(mean_h[rate.part], alpha=rate.lr)


METHOD = EF21SGDMMethod()
