"""Krum: the client that is nearest to its neighbours; Multi-Krum: the mean of the few that are.

Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent. NeurIPS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.core.vec import mean, positions
from undrift.round.aggregate import Rule, normalise, spread


@dataclass(frozen=True)
class Krum(Rule):
    """The `chosen` clients with the smallest sums of squared distances to their n - `faulty` - 2 nearest neighbours."""

    faulty: int = 1  # f, the most hostile clients of a cohort
    chosen: int = 1  # m; with more than one it is Multi-Krum, their weighted mean

    @property
    def least(self) -> int:
        return 2 * self.faulty + 3

    def __call__(self, v: Tensor, weight: Tensor) -> Tensor:
        there = weight > 0
        count = there.sum(-2, keepdim=True)
        u, _ = normalise(v, weight)
        # Differences, not products: in |a|^2 + |b|^2 - 2ab a long vector would drown the others.
        apart = torch.cdist(u, u, compute_mode="donot_use_mm_for_euclid_dist").square()
        near = apart.masked_fill(~there.transpose(-1, -2), torch.inf).sort(-1).values  # the first is the client itself
        place, wanted = positions(near, -1), (count - self.faulty - 2).clamp(min=1).minimum(count - 1)
        score = torch.where((place >= 1) & (place <= wanted), near, 0).sum(-1, keepdim=True)
        order = score.masked_fill(~there, torch.inf).argsort(dim=-2, stable=True)
        best = torch.where((order.argsort(-2) < self.chosen) & there, weight, 0)
        return spread(mean(v, best / best.sum(-2, keepdim=True)), v)

    def __post_init__(self) -> None:
        if self.faulty < 0 or self.chosen < 1:
            raise BadSetting(f"krum takes krum:F or krum:F:M with F of at least 0 and M of at least 1, not {self}")
