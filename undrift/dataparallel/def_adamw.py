"""Detached error feedback around AdamW: each worker makes AdamW's step from its own gradients, and sends a block of it.

As in def_.py, with AdamW's direction in the momentum's place. Worker k has moments m_k, v_k and an error e_k. In each iteration:

    z_k = x - lambda e_k                                  where the gradient is taken
    m_k, v_k <- means of g(z_k), g(z_k)^2                 beta_1 and beta_2, from zero
    p_k = eta (m^_k / (sqrt(v^_k) + eps) + decay z_k) + e_k
    e_k <- p_k - C(p_k)
    x <- x - mean_k C(p_k)                                the only communication

lambda = 0 is error feedback around AdamW, lambda = 1 partial synchronisation of local models that AdamW trains. With one
worker and lambda = 1, y is AdamW's path for any C. Where nothing is dropped it is AdamW for one worker, and for several the
mean of their AdamW steps, each scaled by its own v_k: v of the mean gradient would take a second exchange.

Not in the thesis, whose experiments have momentum SGD (Loshchilov, Hutter: Decoupled Weight Decay Regularization, ICLR 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from undrift.dataparallel.adamw import direction
from undrift.dataparallel.def_ import Detached, GroupRates
from undrift.dataparallel.workers import Workers


class Moments(NamedTuple):
    """The state between iterations, updated in place."""

    x: Tensor  # [d] equal bits on all workers
    m: Tensor  # [..., d]
    v: Tensor  # [..., d]
    e: Tensor  # [..., d]
    products: Tensor  # [..., 2] as in def_.py


@dataclass(frozen=True)
class DetachedAdamW(Detached):
    """The engine of DEF-AdamW."""

    own: ClassVar[tuple[str, ...]] = ("m", "v", "e", "products")
    decoupled: ClassVar[bool] = True

    def start(self, x: Tensor, workers: Workers) -> Moments:
        m, v, e = (x.new_zeros(*workers.lead, len(x)) for _ in range(3))
        return Moments(x, m, v, e, x.new_zeros(*workers.lead, 2))

    def feed(self, state: Any, g: Tensor, rate: GroupRates, t: int, s: slice) -> None:
        m, v, e = (part[..., s] for part in (state.m, state.v, state.e))
        u = direction(m, v, g[..., s], rate, t)
        if rate.decay:
            u.add_(self.point(state, e.clone(), s), alpha=rate.decay)  # at z_k
        e.add_(u, alpha=rate.lr)  # p_k
