"""FedACG: clients start where the server's momentum would carry the model, and stay near that point.

Kim, Kim, Han: Communication-Efficient Federated Learning with Accelerated Client Gradient. CVPR 2024, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Down, GradientOracle, Nothing, Up, Vec, Work, Worker
from undrift.algorithms.checks import at_least, below_one
from undrift.core.vec import mean


@dataclass(frozen=True)
class LookAhead(Worker):
    """Clients minimise f_i(x) + beta/2 |x - y_t|^2 from y_t = x_t - lam m_t, the only model that they are sent.

    Differs: the authors' code leaves out the 1/2 of the proximal term; set `beta` to twice its weight.
    """

    lam: float = 0.85  # lambda
    beta: float = 0.01

    varies: ClassVar[tuple[str, ...]] = ("lam", "beta")

    class Companion(NamedTuple):
        m: Vec  # m_t, positive = descent

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> Down:
        return Down(x - self.lam * companion.m)

    def local_step(self, down: Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        return self.move(work, oracle.grad(work.x) + self.beta * (work.x - down.x), oracle)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        m = self.lam * companion.m + mean(up.d, cohort.weight)  # m_{t+1} = lambda m_t + d, with d_i = y_t - x_i^K
        return m, self.Companion(m)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        below_one(self, "lam")
        at_least(self, 0.0, "beta")


@dataclass(frozen=True)
class FedACG(LookAhead, Average):
    """Accelerated clients and x_{t+1} = x_t - eta_g m_{t+1}."""
