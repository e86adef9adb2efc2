"""Layers that a client keeps for itself: the common part of FedPer and FedRep."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Down, LocalData, State, Up, Worker
from undrift.algorithms.personal import Served
from undrift.core.layout import Layout


@dataclass(frozen=True)
class KeptLayers(Worker):
    """A client joins its own tensors to those that the server sends, and sends an update of the others alone.

    Differs: messages are whole models, so that any server part fits; the places of kept layers are zero on the way up and not
    read on the way down, and their bytes are counted.
    """

    personalises: ClassVar[bool] = True

    class Client(NamedTuple):
        v: Tensor  # the client's last model, of which only the kept layers are read

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        kept: Tensor  # 1 where the client keeps what it has

    @abstractmethod
    def keeps(self, layout: Layout, like: Tensor) -> Tensor:
        """[P] with 1 for the tensors that the client keeps, and 0 for the others."""

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(down.x)

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        x = self.serves(down, client, local).x
        kept = self.keeps(local.layout, x)
        return super().local_start(down, client, local)._replace(x=x, kept=kept)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        return Up((1 - work.kept) * (down.x - work.x)), self.Client(work.x)

    def serves(self, down: Down, client: Client, local: LocalData) -> Served:
        kept = self.keeps(local.layout, down.x) > 0
        return Served(torch.where(kept, client.v, down.x), local.buffers)
