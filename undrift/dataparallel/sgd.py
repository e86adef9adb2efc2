"""Momentum SGD on the mean of the workers' gradients, uncompressed: the baseline of the other methods.

m <- mu m + mean_k g_k(x);   x <- x - eta m
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from undrift.compress import Compressor, Fill, skip
from undrift.dataparallel.def_ import ALL, Rates
from undrift.dataparallel.workers import Workers


class Momentum(NamedTuple):
    """The state between iterations, equal on all workers and updated in place."""

    x: Tensor  # [d]
    m: Tensor  # [d]


@dataclass(frozen=True)
class SGDMethod:
    """The engine of SGD, and the base of methods that take gradients at x and return x."""

    own: ClassVar[tuple[str, ...]] = ()
    returns: ClassVar[str] = "x"
    decoupled: ClassVar[bool] = False

    def check(self, compressor: Compressor) -> None:
        """Accept any compressor."""

    def start(self, x: Tensor, workers: Workers) -> Any:
        return Momentum(x, x.new_zeros(len(x)))

    def step(
        self, state: Any, g: Tensor, rates: Rates, t: int, C: Compressor, workers: Workers, early: Fill = skip
    ) -> None:
        """One iteration with the gradients g [..., d] at x; `early` is not used."""
        descend(state.x, state.m, workers.mean(g), rates)

    def point(self, state: Any, out: Tensor, part: slice = ALL) -> Tensor:
        return out.copy_(state.x[part])

    def model(self, state: Any, workers: Workers, which: str = "") -> Tensor:
        return state.x  # type: ignore[no-any-return]

    def facts(self, state: Any) -> dict[str, Tensor]:
        return {}


def descend(x: Tensor, m: Tensor, g: Tensor, rates: Rates) -> None:
    """m <- mu m + g;   x <- x - eta m."""
    for rate in rates:
        m[rate.part].mul_(rate.momentum).add_(g[rate.part])
        x[rate.part].sub_(m[rate.part], alpha=rate.lr)


METHOD = SGDMethod()
