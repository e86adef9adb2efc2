"""Ditto: FedAvg, and beside it a model of its own for every client, held near the server's.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Down, GradientOracle, LocalData, State, Up, Worker
from undrift.algorithms.checks import at_least
from undrift.algorithms.personal import Served, Stream


@dataclass(frozen=True)
class HeldNear(Worker):
    """x_i follows its own gradient, as in FedAvg; v_i <- v_i - eta_l ( g_i(v_i) + lam (v_i - x_t) ) on the same mini-batches.

    Differs: v_i begins at the server's x_t of the client's first round, not at x_0, which a client that comes later never saw.
    """

    lam: float = 1.0  # lambda

    personalises: ClassVar[bool] = True

    class Client(NamedTuple):
        own: Stream  # v_i

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        own: Stream

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(Stream(down.x, torch.zeros_like(down.x[..., :1]), self.rest(down.x), buffers))

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        own = client.own if self.keep_moments else client.own._replace(opt=self.rest(client.own.x))
        return super().local_start(down, client, local)._replace(own=own)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        v, other = work.own.x, oracle.at(work.own.statistics)
        own = self.move(work.own, other.grad(v) + self.lam * (v - down.x), oracle)._replace(statistics=other.buffers)
        return self.move(work, oracle.grad(work.x), oracle)._replace(own=own)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        return Up(down.x - work.x), self.Client(work.own)

    def serves(self, down: Down, client: Client, local: LocalData) -> Served:
        return Served(client.own.x, client.own.statistics)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "lam")


@dataclass(frozen=True)
class Ditto(HeldNear, Average):
    """Models held near the server's, and a weighted mean."""
