"""FedGAMMA: SCAFFOLD's control variates on sharpness-aware gradients.

Dai, Yang, Sun, Shen, Tian, Wang, Zhang: FedGAMMA: Federated Learning with Global Sharpness-Aware Minimization. IEEE
Transactions on Neural Networks and Learning Systems, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from undrift.algorithms.base import Average, GradientOracle, Work
from undrift.algorithms.checks import at_least
from undrift.algorithms.fedsam import sharp_gradient
from undrift.algorithms.scaffold import Controlled


@dataclass(frozen=True)
class SharpVariates(Controlled):
    """x_i^{k+1} = x_i^k - eta_l ( g_i(x_i^k + rho u / |u|) - c_i + c )."""

    lr: float = 0.05
    radius: float = 0.1  # rho

    varies: ClassVar[tuple[str, ...]] = ("radius",)

    def local_step(self, down: Controlled.Down, client: Controlled.Client, work: Work, oracle: GradientOracle) -> Work:
        return self.move(work, sharp_gradient(oracle, work.x, self.radius) - client.c + down.c, oracle)

    def local_end(
        self, down: Controlled.Down, client: Controlled.Client, work: Work
    ) -> tuple[Controlled.Up, Controlled.Client]:
        d = down.x - work.x
        c = client.c - down.c + d / (work.k * self.lr)  # c_i^+ of option II
        return self.Up(d, c - client.c), self.Client(c)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "radius")


@dataclass(frozen=True)
class FedGamma(SharpVariates, Average):
    """Sharpness-aware control variates, and a weighted mean."""
