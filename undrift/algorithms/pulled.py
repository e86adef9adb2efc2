"""Models that the server pulls towards each other: the common part of SoftPull, FedSM and FedSM-extra.

Xu, Li, Guo, Yang, Roth, Hatamizadeh, Zhao, Xu, Huang, Xu: Closing the Generalization Gap of Cross-silo Federated Medical
Image Segmentation. CVPR 2022, equation (11), and lines 8 and 9 of Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Cohort, Down, GradientOracle, LocalData, State, Vec, Worker
from undrift.algorithms.checks import at_least
from undrift.algorithms.personal import Personal, Served, Stream, advance
from undrift.core.errors import BadSetting
from undrift.core.vec import mean


def pull(v: Tensor, lam: float, cohort: Cohort) -> Tensor:
    """v_i <- lam v_i + (1 - lam) / (S - 1) sum_{j != i} v_j, for all v [..., S, P] at once; a single model does not change.

    This is lam' v_i + (1 - lam') mean(v) with lam' = (lam - u) / (1 - u) and u = 1/S.
    """
    u = cohort.uniform
    share = torch.where(u < 1, (lam - u) / (1 - u), 1.0)
    return share * v + (1 - share) * mean(v, u).unsqueeze(-2)


@dataclass(frozen=True)
class Pulled(Personal):
    """The settings and the reply of methods that pull the clients' models."""

    lam: float = 0.7  # lambda: 1/N averages, 1 does not pull

    class Pull(NamedTuple):
        v: Vec
        statistics: Tensor

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "lam")
        if self.lam > 1:
            raise BadSetting(f"lam must lie in [0, 1], best from 1/S = {1 / cohort:.3g} on, not {self.lam}")

    def remarks(self, rounds: int, cohort: int) -> list[str]:
        """A lambda below 1/S is allowed: the thesis' Table 15 has one."""
        remarks = super().remarks(rounds, cohort)
        if self.lam * cohort < 1:
            least = f"1/S = {1 / cohort:.3g}"
            remarks.append(f"lam {self.lam:g} is below {least}: a model then has less of itself than of each other one")
        return remarks


@dataclass(frozen=True)
class GlobalAndPulled(Pulled, Worker):
    """Two models on every mini-batch: x_i as in FedAvg, and the client's own v_i, pulled by the server after the round."""

    keep_moments: bool = True

    personalises: ClassVar[bool] = True

    class Client(NamedTuple):
        own: Stream  # v_i

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        own: Stream

    class Up(NamedTuple):
        d: Vec
        v: Vec
        statistics: Tensor  # v's BatchNorm statistics

    def client_init(self, down: State, ids: Tensor, buffers: Tensor) -> State:
        return self.Client(Stream(down.x, torch.zeros_like(down.x[..., :1]), self.rest(down.x), buffers))

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        own = client.own._replace(k=torch.zeros_like(client.own.k))
        own = own if self.keep_moments else own._replace(opt=self.rest(own.x))
        return super().local_start(down, client, local)._replace(own=own)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        own, _ = advance(self, work.own, oracle)  # v_i <- OPT(v_i, grad f_i(v_i))
        return self.move(work, oracle.grad(work.x), oracle)._replace(own=own)  # x_i <- OPT(x_i, grad f_i(x_i))

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        return self.Up(down.x - work.x, work.own.x, work.own.statistics), client._replace(own=work.own)

    def reply(self, companion: State, up: Up, buffers: Tensor, cohort: Cohort) -> Pulled.Pull:
        return self.Pull(pull(up.v, self.lam, cohort), pull(up.statistics, self.lam, cohort))

    def receive(self, client: Client, reply: Pulled.Pull) -> Client:
        return client._replace(own=client.own._replace(x=reply.v, statistics=reply.statistics))

    def serves(self, down: Down, client: Client, local: LocalData) -> Served:
        return Served(client.own.x, client.own.statistics)
