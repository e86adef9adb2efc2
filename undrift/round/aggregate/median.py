"""Coordinate-wise median: half of the clients lie on either side, in every entry.

Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. ICML 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from undrift.round.aggregate import MAJORITY, Rule, middle, spread


@dataclass(frozen=True)
class Median(Rule):
    """The median of each entry; of an even number, the mean of the two in the middle. Weights do not count."""

    @property
    def least(self) -> int:
        return MAJORITY

    def __call__(self, v: Tensor, weight: Tensor) -> Tensor:
        return spread(middle(v, weight), v)
