"""DOMO-S: double momentum, the server's momentum fused into every local step.

Xu: New Efficient and Privacy-Preserving Methods for Distributed Training. PhD thesis, chapter 4, Algorithm 4, option II;
Xu & Huang: Coordinating Momenta for Cross-silo Federated Learning. AAAI 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from undrift.algorithms.domo import DOMO, FusedMomentum
from undrift.algorithms.fedavgm import ServerMomentum
from undrift.core.vec import descend
from undrift.oracle.oracle import GradientOracle


@dataclass(frozen=True)
class FusedSteps(FusedMomentum):
    """x_i^{k+1} = x_i^k - eta_l b - eta_l beta M_t."""

    def local_start(self, down: FusedMomentum.Down, client: Any) -> Any:
        return self.start(down, down.x)

    def local_step(self, down: FusedMomentum.Down, client: Any, work: Any, oracle: GradientOracle) -> Any:
        moved = self.move(work, oracle.grad(work.x), oracle)
        return moved._replace(x=descend(moved.x, self.lr * self.beta, down.M))

    def local_end(self, down: FusedMomentum.Down, client: Any, work: Any) -> tuple[Any, Any]:
        return self.end(down, work, work.k), client


@dataclass(frozen=True)
class DOMOS(FusedSteps, ServerMomentum):
    """M_{t+1} = mu_s M_t + mean D_i;  x_{t+1} = x_t - eta_g eta_l K M_{t+1}."""

    momentum_units: str = "grad"

    paper: ClassVar[str] = DOMO.paper
