"""Coordinate-wise trimmed mean: in every entry the largest and the smallest values are left out.

Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. ICML 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.core.vec import positions
from undrift.round.aggregate import Rule, in_order, spread

ROUNDING = 1e-4  # 0.3 times 10 clients are three


@dataclass(frozen=True)
class Trimmed(Rule):
    """The plain mean of what is left of each entry without the `share` n largest and as many smallest values."""

    share: float = 0.1

    @property
    def least(self) -> int:
        """With fewer clients nothing is left out, and the rule is the plain mean."""
        return math.ceil((1 - ROUNDING) / self.share) if self.share else 1

    def __call__(self, v: Tensor, weight: Tensor) -> Tensor:
        ordered, count = in_order(v, weight)
        cut = (self.share * count + ROUNDING).floor()
        place = positions(v, -2).unsqueeze(-1)
        left = (place >= cut) & (place < count - cut)
        return spread(torch.where(left, ordered, 0).sum(-2) / (count - 2 * cut).squeeze(-2), v)

    def __post_init__(self) -> None:
        if not 0.0 <= self.share < 0.5:
            raise BadSetting(f"trimmed cuts a share of at least 0 and below 0.5 on either side, not {self.share}")
