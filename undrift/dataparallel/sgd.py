"""Momentum SGD on the mean of the workers' gradients, nothing compressed: what the other methods are measured against.

m <- mu m + mean_k g_k(x);   x <- x - eta m
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.compress import Compressor
from undrift.dataparallel.def_ import ALL, Rates
from undrift.dataparallel.workers import Workers


class Shared(NamedTuple):
    """What is kept between iterations, the same on all workers; all of it is written in place."""

    x: Tensor  # [d]
    m: Tensor  # [d]


@dataclass(frozen=True)
class SGDMethod:
    """The engine of SGD."""

    own: ClassVar[tuple[str, ...]] = ()
    returns: ClassVar[str] = "x"

    def check(self, compressor: Compressor) -> None:
        """There is none."""

    def start(self, x: Tensor, workers: Workers) -> Shared:
        return Shared(x, x.new_zeros(len(x)))

    def step(
        self, state: Shared, g: Tensor, rates: Sequence[Rates], t: int, compressor: Compressor, workers: Workers
    ) -> None:
        x, m = state
        mean = workers.mean(g)
        for part, lr, momentum in rates:
            m[part].mul_(momentum).add_(mean[part])
            x[part].sub_(m[part], alpha=lr)

    def point(self, state: Shared, out: Tensor, part: slice = ALL) -> Tensor:
        return out.copy_(state.x[part])

    def returned(self, state: Shared, workers: Workers, which: str = "") -> Tensor:
        return state.x

    def facts(self, state: Shared) -> dict[str, Tensor]:
        return {}


METHOD = SGDMethod()
