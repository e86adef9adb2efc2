"""Norm bound that follows the cohort: no vector is longer than a few times the median of their norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.round.aggregate import MAJORITY, Rule, middle
from undrift.round.aggregate.bound import lengths, shorten


@dataclass(frozen=True)
class Clip(Rule):
    """v_i min(1, C / |v_i|) with C = `times` the median of all |v_j|; the method takes their weighted mean."""

    times: float = 1.0

    keeps_single: ClassVar[bool] = True

    @property
    def least(self) -> int:
        return MAJORITY

    def __call__(self, v: Tensor, weight: Tensor) -> Tensor:
        _, unit, length = lengths(v)
        return shorten(v, self.times * middle(length * unit, weight).unsqueeze(-2))

    def __post_init__(self) -> None:
        if not 0.0 < self.times < 1e6:
            raise BadSetting(f"clip takes a multiple of the median norm above 0 and below 1e6, not {self.times}")
