"""FedBN: clients keep their normalisation layers, parameters and statistics, for themselves.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. ICLR 2021, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Down, GradientOracle, LocalData, State, Up, Worker
from undrift.algorithms.personal import Served
from undrift.core.layout import normalisation


@dataclass(frozen=True)
class OwnNormalisation(Worker):
    """Local SGD with the client's own normalisation layers. Without such layers it is FedAvg.

    Differs: LayerNorm's and GroupNorm's layers are kept, too. Messages are whole models, so that any server part fits; the
    places of kept layers are zero on the way up, and their bytes are counted. Statistics go up, for tests of the server's model.
    """

    personalises: ClassVar[bool] = True

    class Client(NamedTuple):
        v: Tensor  # the client's last model, of which only the kept layers are read
        statistics: Tensor  # BatchNorm's

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        kept: Tensor  # 1 where the client keeps what it has
        statistics: Tensor

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(down.x, buffers)

    def serves(self, down: Down, client: Client, local: LocalData) -> Served:
        kept = normalisation(local.layout, down.x) > 0
        return Served(torch.where(kept, client.v, down.x), client.statistics)

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        x, statistics = self.serves(down, client, local)
        kept = normalisation(local.layout, x)
        return super().local_start(down, client, local)._replace(x=x, kept=kept, statistics=statistics)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        oracle.buffers = work.statistics  # the client's, not the server's
        return self.move(work, oracle.grad(work.x), oracle)._replace(statistics=oracle.buffers)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        return Up((1 - work.kept) * (down.x - work.x)), self.Client(work.x, work.statistics)


@dataclass(frozen=True)
class FedBN(OwnNormalisation, Average):
    """Own normalisation layers, and a weighted mean of all others."""
