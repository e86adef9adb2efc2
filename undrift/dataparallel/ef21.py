"""EF21: each worker compresses the difference between its gradient and what the others believe it to be.

Richtarik, Sokolov, Fatkhullin: EF21: A New, Simpler, Theoretically Better, and Practically Faster Error Feedback,
NeurIPS 2021. Worker k and the others share a belief h_k about its gradient. In each iteration:

    q_k = C(g_k(x) - h_k)
    h_k <- h_k + q_k;   h <- h + mean_k q_k         the only communication
    m <- mu m + h;   x <- x - eta m

The first iteration sends the whole gradient, h_k = g_k (C keeps everything). With RBGS it does not converge on
networks at high ratios, as the thesis behind DEF says; it is here to be compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.compress import Compressor, Fill
from undrift.dataparallel.def_ import ALL, Rates
from undrift.dataparallel.workers import Workers


class Beliefs(NamedTuple):
    """What is kept between iterations; all of it is written in place."""

    x: Tensor  # [d] the same bits on all workers, as m and mean_h
    m: Tensor  # [d]
    mean_h: Tensor  # [d]
    h: Tensor  # [..., d]


@dataclass(frozen=True)
class EF21Method:
    """The engine of EF21."""

    own: ClassVar[tuple[str, ...]] = ("h",)
    returns: ClassVar[str] = "x"

    def check(self, compressor: Compressor) -> None:
        """Any compressor will do."""

    def start(self, x: Tensor, workers: Workers) -> Beliefs:
        return Beliefs(x, x.new_zeros(len(x)), x.new_zeros(len(x)), x.new_zeros(*workers.lead, len(x)))

    def step(
        self,
        state: Beliefs,
        g: Tensor,
        rates: Sequence[Rates],
        t: int,
        compressor: Compressor,
        workers: Workers,
        meanwhile: Fill | None = None,
    ) -> None:
        """One iteration, given the gradients g [..., d] at x, all of which depends on what is exchanged."""
        x, m, mean_h, h = state
        if t == 0:
            h.copy_(g)
            mean_h.copy_(workers.mean(g))
        else:
            q = g.sub_(h).clone()
            compressor.exchange(g, t, workers).add_to(mean_h)  # h <- h + mean_k q_k; g is left with what C dropped
            h.add_(q.sub_(g))  # q_k = C(g_k - h_k);  h_k <- h_k + q_k
        for part, lr, momentum in rates:
            m[part].mul_(momentum).add_(mean_h[part])
            x[part].sub_(m[part], alpha=lr)

    def point(self, state: Beliefs, out: Tensor, part: slice = ALL) -> Tensor:
        return out.copy_(state.x[part])

    def returned(self, state: Beliefs, workers: Workers, which: str = "") -> Tensor:
        return state.x

    def facts(self, state: Beliefs) -> dict[str, Tensor]:
        return {}


METHOD = EF21Method()
