"""MimeLite: every local step uses the server's momentum, a mean of full local gradients.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Breaking the Centralized Barrier for Cross-Device Federated
Learning. NeurIPS 2021, with momentum SGD as the base optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, GradientOracle, LocalData, Nothing, State, Vec, Worker
from undrift.algorithms.checks import below_one
from undrift.core.vec import mean


@dataclass(frozen=True)
class FrozenMomentum(Worker):
    """Clients get the server's momentum m_t, which does not change during the round.

    `ema=false` is the heavy-ball form: direction g + beta m, and m <- beta m + grad f.
    """

    beta: float = 0.9
    ema: bool = True

    varies: ClassVar[tuple[str, ...]] = ("beta",)

    def mix(self, g: Tensor, m: Tensor) -> Tensor:
        """(1 - beta) g + beta m, or g + beta m."""
        return (1 - self.beta) * g + self.beta * m if self.ema else g + self.beta * m

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        below_one(self, "beta")


@dataclass(frozen=True)
class LiteMomentum(FrozenMomentum):
    """x_i^{k+1} = x_i^k - eta_l ( (1 - beta) g_i(x_i^k) + beta m_t ); m averages the clients' full gradients at x_t.

    Differs: the full gradient is taken batch by batch in training mode, without augmentation and dropout.
    """

    class Companion(NamedTuple):
        m: Vec

    class Down(NamedTuple):
        x: Vec
        m: Vec

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        full: Tensor  # grad f_i(x_t)

    class Up(NamedTuple):
        d: Vec
        full: Vec

    def local_start(self, down: Down, client: Nothing, local: LocalData) -> Work:
        return super().local_start(down, client, local)._replace(full=local.full_grad(down.x))

    def local_step(self, down: Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        return self.move(work, self.mix(oracle.grad(work.x), down.m), oracle)

    def local_end(self, down: Down, client: Nothing, work: Work) -> tuple[Up, Nothing]:
        return self.Up(down.x - work.x, work.full), client

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        m = self.mix(mean(up.full, cohort.weight), companion.m)  # m_{t+1} = (1 - beta) mean grad f_i(x_t) + beta m_t
        return mean(up.d, cohort.weight), self.Companion(m)


@dataclass(frozen=True)
class MimeLite(LiteMomentum, Average):
    """Frozen server momentum on the clients and a weighted mean."""
