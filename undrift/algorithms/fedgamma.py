"""FedGAMMA: SCAFFOLD's control variates on sharpness-aware gradients.

Dai, Yang, Sun, Shen, Tian, Wang, Zhang: FedGAMMA: Federated Learning with Global Sharpness-Aware Minimization. IEEE
Transactions on Neural Networks and Learning Systems, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from undrift.algorithms.base import Average, GradientOracle
from undrift.algorithms.checks import at_least
from undrift.algorithms.fedsam import sharp_gradient
from undrift.algorithms.scaffold import ControlVariates


@dataclass(frozen=True)
class SharpVariates(ControlVariates):
    """x_i^{k+1} = x_i^k - eta_l ( g_i(x_i^k + rho u / |u|) - c_i + c )."""

    option: Literal[2] = 2
    radius: float = 0.1  # rho

    varies: ClassVar[tuple[str, ...]] = ("radius",)

    def local_step(
        self,
        down: ControlVariates.Down,
        client: ControlVariates.Client,
        work: ControlVariates.Work,
        oracle: GradientOracle,
    ) -> ControlVariates.Work:
        return self.move(work, sharp_gradient(oracle, work.x, self.radius) - client.c + down.c, oracle)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "radius")


@dataclass(frozen=True)
class FedGamma(SharpVariates, Average):
    """Sharpness-aware control variates, and a weighted mean."""
