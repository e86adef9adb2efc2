"""DOMO-S: double momentum, the server's momentum fused into every local step.

Xu: New Efficient and Privacy-Preserving Methods for Distributed Training. PhD thesis, chapter 4, Algorithm 4, option II;
Xu & Huang: Coordinating Momenta for Cross-silo Federated Learning. AAAI 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

from undrift.algorithms.base import GradientOracle, Nothing, Work
from undrift.algorithms.domo import FusedMomentum, GradientMomentum
from undrift.core.vec import descend


@dataclass(frozen=True)
class FusedSteps(FusedMomentum):
    """Option II: a share of the server's momentum is applied in every step."""

    def local_step(self, down: FusedMomentum.Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        moved = super().local_step(down, client, work, oracle)
        return moved._replace(x=descend(moved.x, self.lr * self.beta, down.M))  # line 10: x - eta_l b - eta_l beta M_t

    def local_end(self, down: FusedMomentum.Down, client: Nothing, work: Work) -> tuple[FusedMomentum.Up, Nothing]:
        return self.upload(down, work, work.k), client


@dataclass(frozen=True)
class DOMOS(FusedSteps, GradientMomentum):
    """Coordinated momenta of clients and server."""
