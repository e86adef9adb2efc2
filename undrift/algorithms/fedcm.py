"""FedCM: local steps mixed with the last round's mean direction.

Xu, Wang, Wang, Yao: FedCM: Federated Learning with Client-level Momentum. 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, GradientOracle, Nothing, Up, Vec, Work, Worker
from undrift.core.errors import BadSetting
from undrift.core.vec import mean


@dataclass(frozen=True)
class LastDirection(Worker):
    """Clients get Delta_t, the mean direction of a local step in the round before.

    Differs: the paper's eta_g multiplies the normalised Delta; here it multiplies d, so that eta_g = 1 averages.
    """

    alpha: float = 0.1  # weight of the client's own gradient

    varies: ClassVar[tuple[str, ...]] = ("alpha",)
    steady_rate: ClassVar[bool] = True  # Delta is divided by it

    class Companion(NamedTuple):
        delta: Vec  # Delta_t, in gradient units

    class Down(NamedTuple):
        x: Vec
        delta: Vec

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        d = mean(up.d, cohort.weight)
        return d, self.Companion(d / (cohort.mean_steps * cohort.lr))  # Delta_{t+1} = d / (K eta_l)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        if not 0.0 < self.alpha <= 1.0:
            raise BadSetting(f"alpha must lie in (0, 1], not {self.alpha}")


@dataclass(frozen=True)
class ClientMomentum(LastDirection):
    """x_i^{k+1} = x_i^k - eta_l ( alpha g_i(x_i^k) + (1 - alpha) Delta_t )."""

    def local_step(self, down: LastDirection.Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        return self.move(work, self.alpha * oracle.grad(work.x) + (1 - self.alpha) * down.delta, oracle)


@dataclass(frozen=True)
class FedCM(ClientMomentum, Average):
    """Client-level momentum and a weighted mean."""
