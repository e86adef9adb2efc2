"""APFL: a client's model is a mixture of its own and the server's, and both are trained.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. 2020, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Down, GradientOracle, LocalData, State, Up, Worker
from undrift.algorithms.checks import at_least
from undrift.algorithms.personal import Served, Stream
from undrift.core.errors import BadSetting
from undrift.core.vec import dot


@dataclass(frozen=True)
class Mixture(Worker):
    """u_i = lam v_i + (1 - lam) x_i; x_i follows its own gradient, as in FedAvg, and v_i the gradient of f_i(u_i).

    Differs: the parameters are mixed, as in the paper, not the outputs; lam is fixed unless `adaptive`. A client that comes
    later starts v_i at the server's x_t, not at x_0, which it has never seen: sending x_0 would cost one more vector.
    """

    keep_moments: bool = True
    lam: float = 0.5  # lambda
    adaptive: bool = False  # let every client learn its lambda, one step a round
    lam_lr: float = 0.1  # its rate

    personalises: ClassVar[bool] = True

    class Client(NamedTuple):
        own: Stream  # v_i
        lam: Tensor  # [..., 1]

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        own: Stream
        lam: Tensor

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        none = torch.zeros_like(down.x[..., :1])
        return self.Client(Stream(down.x, none, self.rest(down.x), buffers), none + self.lam)

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        own = client.own._replace(k=torch.zeros_like(client.own.k))
        own = own if self.keep_moments else own._replace(opt=self.rest(own.x))
        return super().local_start(down, client, local)._replace(own=own, lam=client.lam)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        x, v, lam = work.x, work.own.x, work.lam
        g = oracle.grad(x)
        mixed = oracle.at(work.own.statistics)
        g_u = mixed.grad(lam * v + (1 - lam) * x)
        own = self.move(work.own, lam * g_u, oracle)._replace(statistics=mixed.buffers)
        if self.adaptive:  # on the first batch of a round, with v and x before their own steps
            slope = dot(v - x, g_u) + 0.02 * lam
            lam = torch.where(work.k == 0, (lam - self.lam_lr * slope).clamp(0, 1), lam)
        return self.move(work, g, oracle)._replace(own=own, lam=lam)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        return Up(down.x - work.x), self.Client(work.own, work.lam)

    def serves(self, down: Down, client: Client, local: LocalData) -> Served:
        return Served(client.lam * client.own.x + (1 - client.lam) * down.x, client.own.statistics)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "lam", "lam_lr")
        if self.lam > 1:
            raise BadSetting(f"lam must lie in [0, 1], not {self.lam}")


@dataclass(frozen=True)
class APFL(Mixture, Average):
    """Mixed personal models and a weighted mean."""
