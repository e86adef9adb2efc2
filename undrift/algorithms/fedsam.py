"""FedSAM: sharpness-aware local steps.

Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization. ICML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from undrift.algorithms.base import Average, Down, GradientOracle, Nothing, Work, Worker
from undrift.algorithms.checks import at_least
from undrift.core.vec import norm


def sharp_gradient(oracle: GradientOracle, x: Tensor, radius: float) -> Tensor:
    """The gradient at x + rho u / |u|, u the gradient at x, both on the same mini-batch; BatchNorm is tracked at x only."""
    u = oracle.grad(x)
    return oracle.grad(x + radius * u / (norm(u) + 1e-7), track=False)


@dataclass(frozen=True)
class SharpnessAware(Worker):
    """x_i^{k+1} = x_i^k - eta_l g_i(x_i^k + rho u / |u|)."""

    radius: float = 0.1  # rho

    varies: ClassVar[tuple[str, ...]] = ("radius",)

    def local_step(self, down: Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        return self.move(work, sharp_gradient(oracle, work.x, self.radius), oracle)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "radius")


@dataclass(frozen=True)
class FedSAM(SharpnessAware, Average):
    """Sharpness-aware local steps and a weighted mean."""
