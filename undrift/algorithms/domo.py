"""DOMO: double momentum, the server's momentum fused into the clients' start.

Xu: New Efficient and Privacy-Preserving Methods for Distributed Training. PhD thesis, chapter 4, Algorithm 4, option I;
Xu & Huang: Coordinating Momenta for Cross-silo Federated Learning. AAAI 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Cohort, GradientOracle, LocalData, Nothing, Server, Up, Vec, Work, Worker
from undrift.algorithms.checks import ServerRate, above, at_least, below_one, needs_fresh_momentum, needs_steady_rate
from undrift.algorithms.optimise.momentum import Momentum
from undrift.core.trees import nbytes
from undrift.core.vec import mean


@dataclass(frozen=True)
class FusedMomentum(Worker, ServerRate):
    """Clients know M_t, the server's momentum in gradient units, from two successive models and eta_g: line 5.

    A client that missed the round before lacks x_{t-1} and is sent M_t, which the downlink counts. `buffers=average` starts
    local momentum from the cohort's mean buffer, which travels both ways, instead of zero.
    """

    optimizer: str = "momentum"
    momentum: float = 0.6  # mu_l
    beta: float = 0.9  # how much of the server's momentum is fused in
    buffers: Literal["reset", "average"] = "reset"

    varies: ClassVar[tuple[str, ...]] = ("beta",)
    steady_rate: ClassVar[bool] = True  # the momentum is inferred from it

    class Companion(NamedTuple):
        M: Vec
        b: Vec  # the mean buffer, [0] where buffers are reset

    class Down(NamedTuple):
        x: Vec
        M: Vec
        b: Vec
        K: Tensor  # [1] the cohort's mean number of local steps

    class Up(NamedTuple):
        d: Vec  # eta_l K D_i = eta_l sum_k b: the update without the server's momentum
        b: Vec

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        zero = torch.zeros_like(x0)
        return self.Companion(zero, zero if self.buffers == "average" else zero[..., :0])

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> Down:
        return self.Down(x, companion.M, companion.b, invited.mean_steps)

    def local_start(self, down: Down, client: Nothing, local: LocalData) -> Work:
        work = super().local_start(down, client, local)
        return work._replace(opt=Momentum(down.b)) if self.buffers == "average" else work

    def local_step(self, down: Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        return self.move(work, oracle.grad(work.x), oracle)  # lines 8 and 9: b <- mu_l b + g, x <- x - eta_l b

    def upload(self, down: Down, work: Work, K: Tensor) -> Up:
        """Line 12, D_i = (1/K) sum_k b, from the models: eta_l K D_i = x_t - x_i^K - eta_l beta K M_t."""
        d = down.x - work.x - self.lr * self.beta * K * down.M
        return self.Up(d, work.opt.b if self.buffers == "average" else down.b)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        return mean(up.d, cohort.weight), companion._replace(b=mean(up.b, cohort.weight))

    def companion_step(self, companion: Companion, up: Up, cohort: Cohort, x_old: Tensor, x_new: Tensor) -> Companion:
        M = (x_old - x_new) / (self.server_lr * cohort.lr * cohort.mean_steps)  # line 5, with this round's eta_l and K
        return companion._replace(M=M)

    def bytes_down(self, down: Down, invited: int, returning: int, clients: int) -> int:
        return invited * (nbytes(down.x) + nbytes(down.b)) + (invited - returning) * nbytes(down.M)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "beta")
        above(self, 0.0, "server_lr")  # the momentum is inferred from the server's steps
        needs_fresh_momentum(self)


@dataclass(frozen=True)
class FusedStart(FusedMomentum):
    """Option I: the server's momentum is applied before the first step."""

    def local_start(self, down: FusedMomentum.Down, client: Nothing, local: LocalData) -> Work:
        x = down.x - self.lr * self.beta * down.K * down.M  # line 7: x_i^0 = x_t - eta_l beta K M_t
        return super().local_start(down, client, local)._replace(x=x)

    def local_end(self, down: FusedMomentum.Down, client: Nothing, work: Work) -> tuple[FusedMomentum.Up, Nothing]:
        return self.upload(down, work, down.K), client


@dataclass(frozen=True)
class GradientMomentum(Server):
    """The server's momentum M, in gradient units; d is eta_l K times the mean of the D_i."""

    beta1: float = 0.9  # mu_s

    varies: ClassVar[tuple[str, ...]] = ("beta1",)

    class State(NamedTuple):
        m: Tensor  # M_t

    def server_step(self, server: State, x: Tensor, d: Tensor, up: Up, cohort: Cohort) -> tuple[Tensor, State]:
        unit = cohort.lr * cohort.mean_steps  # eta_l K
        M = self.beta1 * server.m + d / unit  # line 14: M_{t+1} = mu_s M_t + mean D_i
        return x - self.server_lr * unit * M, self.State(M)  # line 15: x_{t+1} = x_t - eta_g eta_l K M_{t+1}

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        below_one(self, "beta1")
        needs_steady_rate(self)


@dataclass(frozen=True)
class DOMO(FusedStart, GradientMomentum):
    """Coordinated momenta of clients and server."""
