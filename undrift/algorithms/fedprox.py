"""FedProx: local SGD held near the server's model by a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from undrift.algorithms.base import Average, Down, GradientOracle, Nothing, Work, Worker
from undrift.algorithms.checks import at_least


@dataclass(frozen=True)
class Proximal(Worker):
    """Clients minimise f_i(x) + mu/2 |x - x_t|^2."""

    mu: float = 0.01

    varies: ClassVar[tuple[str, ...]] = ("mu",)

    def local_step(self, down: Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        # x_i^{k+1} = x_i^k - eta_l ( g_i(x_i^k) + mu (x_i^k - x_t) )
        return self.move(work, oracle.grad(work.x) + self.mu * (work.x - down.x), oracle)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "mu")


@dataclass(frozen=True)
class FedProx(Proximal, Average):
    """Proximal local SGD and a weighted mean."""
