"""SCAFFOLD: control variates against client drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: Stochastic Controlled Averaging for Federated Learning. ICML 2020, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Cohort, GradientOracle, LocalData, State, Vec, Worker
from undrift.algorithms.fedavgm import ServerMomentum
from undrift.core.vec import mean


@dataclass(frozen=True)
class ControlVariates(Worker):
    """Local steps corrected by c - c_i, the difference of the server's and the client's control variate."""

    lr: float = 0.05  # with 0.1 it diverges where few of many unequal clients take part
    option: Literal[1, 2] = 2  # c_i^+ is the round's mean gradient (2) or the full local gradient at x_t (1)
    steady_rate: ClassVar[bool] = True  # d is divided by it

    class Companion(NamedTuple):
        c: Vec  # (1/N) sum of all c_i

    class Down(NamedTuple):
        x: Vec
        c: Vec

    class Client(NamedTuple):
        c: Tensor  # c_i: kept between rounds, never sent

    class Up(NamedTuple):
        d: Vec
        dc: Vec  # c_i^+ - c_i

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        full: Tensor  # grad f_i(x_t), [0] with option II

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        full = local.full_grad(down.x) if self.option == 1 else down.x[..., :0]
        return super().local_start(down, client, local)._replace(full=full)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        return self.move(work, oracle.grad(work.x) - client.c + down.c, oracle)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        d = down.x - work.x
        c = work.full if self.option == 1 else client.c - down.c + d / (work.k * self.lr)  # c_i^+ of options I and II
        return self.Up(d, c - client.c), self.Client(c)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        c = companion.c + cohort.size / cohort.total * mean(up.dc, cohort.uniform)  # c <- c + (1/N) sum_S (c_i^+ - c_i)
        return mean(up.d, cohort.weight), self.Companion(c)


@dataclass(frozen=True)
class Scaffold(ControlVariates, ServerMomentum):
    beta1: float = 0.0  # the server averages; above 0 with momentum, which the paper does not have
