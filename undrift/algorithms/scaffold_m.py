"""SCAFFOLD-M: SCAFFOLD's corrected local steps mixed with the last round's mean direction.

Cheng, Huang, Wu, Yuan: Momentum Benefits Non-IID Federated Learning Simply and Provably. ICLR 2024, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, GradientOracle, State, Vec, Worker
from undrift.core.errors import BadSetting
from undrift.core.vec import mean


@dataclass(frozen=True)
class MomentumVariates(Worker):
    """x_i^{k+1} = x_i^k - eta_l ( beta (g_i(x_i^k) - c_i + c) + (1 - beta) g_t ); c_i^+ is the mean of the round's g_i.

    Clients are sent beta c + (1 - beta) g_t as one vector: they need neither alone.

    Differs: the paper's gamma multiplies the normalised g_{t+1}; here eta_g multiplies d, so that eta_g = 1 averages.
    """

    lr: float = 0.1
    beta: float = 0.2  # weight of the client's own corrected gradient

    varies: ClassVar[tuple[str, ...]] = ("beta",)
    steady_rate: ClassVar[bool] = True  # g_t is divided by it

    class Companion(NamedTuple):
        c: Vec  # (1/N) sum of all c_i
        g: Vec  # g_t, the last round's mean direction in gradient units

    class Down(NamedTuple):
        x: Vec
        common: Vec  # beta c + (1 - beta) g_t

    class Client(NamedTuple):
        c: Tensor  # c_i

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        total: Tensor  # the sum of the gradients so far

    class Up(NamedTuple):
        d: Vec
        dc: Vec  # c_i^+ - c_i

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> Down:
        return self.Down(x, self.beta * companion.c + (1 - self.beta) * companion.g)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        g = oracle.grad(work.x)
        moved = self.move(work, self.beta * (g - client.c) + down.common, oracle)
        return moved._replace(total=work.total + g)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        c = work.total / work.k  # c_i^+ = (1/K) sum_k g_i(x_i^k)
        return self.Up(down.x - work.x, c - client.c), self.Client(c)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        d = mean(up.d, cohort.weight)
        c = companion.c + cohort.size / cohort.total * mean(up.dc, cohort.uniform)  # c <- c + (1/N) sum_S (c_i^+ - c_i)
        return d, self.Companion(c, d / (cohort.mean_steps * cohort.lr))  # g_{t+1} = d / (K eta_l)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        if not 0.0 < self.beta <= 1.0:
            raise BadSetting(f"beta must lie in (0, 1], not {self.beta}")


@dataclass(frozen=True)
class ScaffoldM(MomentumVariates, Average):
    """Control variates and momentum on the clients, and a weighted mean."""
