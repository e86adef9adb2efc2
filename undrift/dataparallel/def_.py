"""Detached error feedback: the error of compression is fed back twice, with its own weight where gradients are taken.

An Xu: New Efficient and Privacy-Preserving Methods for Distributed Training, thesis, University of Pittsburgh, 2023,
chapter 2, Algorithm 1, with momentum as in its experiments. All workers hold the same x. Worker k has a momentum m_k
and an error e_k, in units of the parameters. In each iteration:

    z_k = x - lambda e_k                    where the gradient is taken
    m_k <- mu m_k + g(z_k)                  weight decay belongs to g and is taken at z_k
    p_k = eta m_k + e_k
    e_k <- p_k - C(p_k)
    x <- x - mean_k C(p_k)                  the only communication

lambda = 0 is EF, lambda = 1 is SAEF and PSync. DEF returns y = x - mean_k e_k, DEF-A returns x.

lambda = "auto" is measured: see `estimate`. The part of the errors that all workers share leaves the mean of the gradients
unchanged to first order only with lambda = 1; a worker's own part would be left out with 0.

Differs: the thesis has lambda = 0.3 and no "auto". It prints C(g + e) in (2-4), which must be C(eta g + e).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.compress import Compressor, Fill, overlaps, skip
from undrift.core.errors import BadSetting
from undrift.core.vec import dot
from undrift.dataparallel.workers import Workers

ALL = slice(None)
MEMORY = 0.99  # decay of the running products for lambda = "auto"
UNMEASURED = 0.6  # lambda = "auto" with topk


class GroupRates(NamedTuple):
    """The rates of a parameter group, which is a stretch of the vectors."""

    part: slice
    lr: float  # eta
    momentum: float  # mu; beta_1 of AdamW
    momentum2: float = 0.999  # beta_2 of AdamW
    epsilon: float = 1e-8  # AdamW's epsilon
    decay: float = 0.0  # the weight decay beside AdamW's step; elsewhere it belongs to the gradient


Rates = Sequence[GroupRates]


class Errors(NamedTuple):
    """The state between iterations, updated in place."""

    x: Tensor  # [d] equal bits on all workers
    m: Tensor  # [..., d]
    e: Tensor  # [..., d]
    products: Tensor  # [..., 2] running <mean p, p_k> and |p_k|^2 of the exchanged blocks, for lambda = "auto"


@dataclass(frozen=True)
class Detached:
    """The engine of DEF, EF, SAEF and PSync."""

    lam: float | str = "auto"  # lambda, or "auto"
    returns: str = "y"  # or x
    average_every: int = 0  # average the errors every so many iterations (SAEF's tau); 0: never

    own: ClassVar[tuple[str, ...]] = ("m", "e", "products")  # differ between workers; x does not
    decoupled: ClassVar[bool] = False  # whether weight decay is beside the gradient

    def check(self, compressor: Compressor) -> None:
        if self.lam != "auto" and not (isinstance(self.lam, int | float) and 0.0 <= self.lam <= 1.0):
            raise BadSetting(f"lam must lie in [0, 1] or be 'auto', not {self.lam!r}; 0.3 is the paper's")

    def start(self, x: Tensor, workers: Workers) -> Any:
        zeros = x.new_zeros(*workers.lead, len(x))
        return Errors(x, zeros, zeros.clone(), x.new_zeros(*workers.lead, 2))

    def feed(self, state: Any, g: Tensor, rate: GroupRates, t: int, s: slice) -> None:
        """Feed a stretch of the gradients to the momenta and the errors, which become p_k."""
        torch.add(g[..., s], state.m[..., s], alpha=rate.momentum, out=state.m[..., s])  # m_k <- mu m_k + g_k
        state.e[..., s].add_(state.m[..., s], alpha=rate.lr)  # p_k = eta m_k + e_k, stored in e_k

    def step(
        self, state: Any, g: Tensor, rates: Rates, t: int, C: Compressor, workers: Workers, early: Fill = skip
    ) -> None:
        """One iteration with the gradients g [..., d] at z_k; `early` takes stretches of z_k known before the end."""
        x, e, products = state.x, state.e, state.products

        def feed(stretches: Sequence[slice]) -> None:
            for rate in rates:
                for s in overlaps(rate.part, stretches):
                    self.feed(state, g, rate, t, s)

        def feed_rest(stretches: Sequence[slice]) -> None:
            feed(stretches)
            if self.lam != "auto" and not self.average_every:
                early(stretches)

        c = C.exchange(e, t, workers, feed, feed_rest, self.lam == "auto")  # e_k <- p_k - C(p_k)
        c.add_to(x, alpha=-1.0)  # x <- x - mean_k C(p_k)
        if c.kept is not None:
            mean = torch.cat(c.values)
            block_products = torch.cat([dot(mean, c.kept), dot(c.kept, c.kept)], -1)
            products.mul_(MEMORY).add_(block_products, alpha=1.0 - MEMORY)
        if self.average_every and (t + 1) % self.average_every == 0:
            e.copy_(workers.mean(e.clone()))  # e_k <- mean_j e_j

    def point(self, state: Any, out: Tensor, part: slice = ALL) -> Tensor:
        """Write z_k = x - lambda e_k [..., d], or a part of it, to `out`."""
        x, e = state.x[part], state.e[..., part]
        if self.lam == "auto":
            return torch.addcmul(x, e, self.estimate(state), value=-1.0, out=out)
        return torch.sub(x, e, alpha=float(self.lam), out=out)

    def estimate(self, state: Any) -> Tensor:
        """[..., 1] lambda = (1 + s) / 2, where s = <mean p, p_k> / |p_k|^2 minimises |mean e - s e_k| on the blocks.

        Topk's blocks differ between workers and are not measured.
        """
        along, square = state.products.split(1, -1)
        return torch.where(square > 0, 0.5 + 0.5 * (along / square).clamp(0.0, 1.0), UNMEASURED)

    def model(self, state: Any, workers: Workers, which: str = "") -> Tensor:
        """The model [d]: x, or y = x - mean_k e_k, which costs one exchange of d numbers."""
        x: Tensor = state.x
        return x if (which or self.returns) == "x" else x - workers.mean(state.e.clone())

    def facts(self, state: Any) -> dict[str, Tensor]:
        """Numbers of each worker [..., 1], whose means are recorded."""
        return {"lambda": self.estimate(state)} if self.lam == "auto" else {}
