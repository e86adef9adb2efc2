"""MoFedSAM: FedSAM's local steps mixed with the last round's mean direction.

Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization. ICML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from undrift.algorithms.base import Average, GradientOracle, Nothing, Work
from undrift.algorithms.checks import at_least
from undrift.algorithms.fedcm import LastDirection
from undrift.algorithms.fedsam import sharp_gradient


@dataclass(frozen=True)
class SharpnessAwareMomentum(LastDirection):
    """x_i^{k+1} = x_i^k - eta_l ( alpha g_i(x_i^k + rho u / |u|) + (1 - alpha) Delta_t )."""

    radius: float = 0.1  # rho

    varies: ClassVar[tuple[str, ...]] = ("radius",)

    def local_step(self, down: LastDirection.Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        g = sharp_gradient(oracle, work.x, self.radius)
        return self.move(work, self.alpha * g + (1 - self.alpha) * down.delta, oracle)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "radius")


@dataclass(frozen=True)
class MoFedSAM(SharpnessAwareMomentum, Average):
    """Sharpness-aware local steps with client-level momentum, and a weighted mean."""
