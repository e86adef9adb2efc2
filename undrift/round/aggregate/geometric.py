"""Geometric median: the point with the smallest mean distance to the clients, by smoothed Weiszfeld steps.

Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning. IEEE Transactions on Signal Processing, 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.core.vec import mean, norm
from undrift.round.aggregate import MAJORITY, Rule, middle, normalise, spread

SMOOTHING = 1e-6  # nu, in units of a usual client's largest entry


@dataclass(frozen=True)
class Geometric(Rule):
    """z <- sum_i b_i v_i / sum_i b_i with b_i = w_i / max(nu, |v_i - z|), `steps` times.

    Differs: it begins at the coordinate-wise median instead of the mean, which one client can move anywhere.
    """

    steps: int = 10

    @property
    def least(self) -> int:
        return MAJORITY

    def __call__(self, v: Tensor, weight: Tensor) -> Tensor:
        u, unit = normalise(v, weight)
        z = middle(u, weight)
        for _ in range(self.steps):
            b = weight / norm(u - z.unsqueeze(-2)).clamp(min=SMOOTHING)
            z = mean(u, b / b.sum(-2, keepdim=True))
        return spread(z * unit.squeeze(-2), v)

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 1000:
            raise BadSetting(f"geometric takes 1 to 1000 steps, not {self.steps}")
