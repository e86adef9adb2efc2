"""EF21: each worker compresses the difference between its gradient and what the others believe it to be.

Richtarik, Sokolov, Fatkhullin: EF21: A New, Simpler, Theoretically Better, and Practically Faster Error Feedback,
NeurIPS 2021. Worker k and the others share a belief h_k about its gradient. In each iteration:

    q_k = C(g_k(x) - h_k)
    h_k <- h_k + q_k;   h <- h + mean_k q_k         the only communication
    m <- mu m + h;   x <- x - eta m

The first iteration sends the whole gradient, h_k = g_k. EF21 is a baseline: with RBGS at high ratios it does not
converge on networks, as the thesis behind DEF says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.compress import Compressor, Fill, skip
from undrift.dataparallel.def_ import Rates
from undrift.dataparallel.sgd import SGDMethod, descend
from undrift.dataparallel.workers import Workers


class Beliefs(NamedTuple):
    """The state between iterations, updated in place."""

    x: Tensor  # [d] like m and mean_h, equal bits on all workers
    m: Tensor  # [d]
    mean_h: Tensor  # [d]
    h: Tensor  # [..., d]


@dataclass(frozen=True)
class EF21Method(SGDMethod):
    """The engine of EF21."""

    own: ClassVar[tuple[str, ...]] = ("h",)

    def start(self, x: Tensor, workers: Workers) -> Beliefs:
        return Beliefs(x, x.new_zeros(len(x)), x.new_zeros(len(x)), x.new_zeros(*workers.lead, len(x)))

    def step(
        self, state: Beliefs, g: Tensor, rates: Rates, t: int, C: Compressor, workers: Workers, early: Fill = skip
    ) -> None:
        """One iteration with the gradients g [..., d] at x; nothing can be computed early."""
        x, m, mean_h, h = state
        if t == 0:
            h.copy_(g)
            mean_h.copy_(workers.mean(g))
        else:
            q = g.sub_(h).clone()
            C.exchange(g, t, workers).add_to(mean_h)  # h <- h + mean_k q_k; g keeps what C dropped
            h.add_(q.sub_(g))  # q_k = C(g_k - h_k);  h_k <- h_k + q_k
        descend(x, m, mean_h, rates)


METHOD = EF21Method()
