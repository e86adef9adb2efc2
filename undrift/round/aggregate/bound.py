"""Fixed norm bound: no vector is longer than a given number.

Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning? 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.core.vec import norm
from undrift.round.aggregate import Rule, scaled


@dataclass(frozen=True)
class Bound(Rule):
    """v_i min(1, C / |v_i|) with C = `largest`; the method takes their weighted mean."""

    largest: float = 10.0

    keeps_single: ClassVar[bool] = True

    def __call__(self, v: Tensor, weight: Tensor) -> Tensor:
        u, unit = scaled(v, weight)
        return shorten(v, u, unit, self.largest / unit)

    def __post_init__(self) -> None:
        if not 0.0 < self.largest < 1e30:
            raise BadSetting(f"bound takes a largest norm above 0 and below 1e30, not {self.largest}")


def shorten(v: Tensor, u: Tensor, unit: Tensor, longest: Tensor) -> Tensor:
    """v = `unit` u where u [..., S, P] is at most `longest`, and u at that length, times the unit, where it is longer."""
    length = norm(u).clamp(min=torch.finfo(u.dtype).tiny)
    return torch.where(length > longest, u * (longest / length) * unit, v)
