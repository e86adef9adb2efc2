"""FT: FedAvg, and then every client fine-tunes the final model on its own samples.

Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage: Federated Evaluation of On-device Personalization. 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Down, GradientOracle, LocalData, Nothing, State, Up, Worker
from undrift.algorithms.checks import at_least
from undrift.algorithms.personal import Served, stand_still
from undrift.core.trees import nbytes, where


@dataclass(frozen=True)
class FineTuning(Worker):
    """Rounds 0 .. begin - 1 are FedAvg's; afterwards each client continues alone from the last x."""

    begin: int = 90  # R, rounds of FedAvg
    phase: int = 0  # 0: FedAvg; 1: fine-tuning. Set by the run

    personalises: ClassVar[bool] = True
    sends_updates: ClassVar[bool] = False  # not while clients fine-tune

    class Client(NamedTuple):
        v: Tensor  # the fine-tuned model
        statistics: Tensor
        tuned: Tensor  # [..., 1] 1 once fine-tuning has begun

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        buffers: Tensor

    def at(self, t: int) -> FineTuning:
        return replace(self, phase=int(t >= self.begin))

    def bytes_down(self, down: Down, invited: int, returning: int, clients: int) -> int:
        return (invited - returning if self.phase else invited) * nbytes(down)  # x_R only to those without a v_i

    @property
    def since(self) -> int | None:
        return self.begin if self.phase else None

    @property
    def stands_still(self) -> bool:
        return self.phase > 0

    def buffers_down(self, invited: int, returning: int) -> int:
        return invited - returning if self.phase else invited

    @property
    def buffers_up(self) -> bool:
        return self.phase == 0

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(down.x, buffers, torch.zeros_like(down.x[..., :1]))

    def serves(self, down: Down, client: Client, local: LocalData) -> Served:
        """The server's model, or the client's once it is fine-tuned."""
        if not self.phase:
            return Served(down.x, local.buffers)
        tuned = client.tuned > 0
        return Served(torch.where(tuned, client.v, down.x), torch.where(tuned, client.statistics, local.buffers))

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        x, buffers = self.serves(down, client, local)
        return super().local_start(down, client, local)._replace(x=x, buffers=buffers)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        if self.phase:
            oracle.buffers = work.buffers
        return self.move(work, oracle.grad(work.x), oracle)._replace(buffers=oracle.buffers)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[State, Client]:
        if not self.phase:
            return Up(down.x - work.x), client
        return Nothing(), self.Client(work.x, work.buffers, torch.ones_like(client.tuned))

    def take_moments(self, client: Client, work: Work, opt: State) -> Work:
        kept = where(client.tuned > 0, opt, work.opt) if self.phase else opt  # fine-tuning begins with new moments
        return work._replace(opt=kept)

    def gather(self, companion: State, up: State, cohort: Cohort) -> tuple[Tensor, State]:
        return super().gather(companion, up, cohort) if not self.phase else (stand_still(cohort), companion)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0, "begin")


@dataclass(frozen=True)
class FT(FineTuning, Average):
    """FedAvg and fine-tuning after it."""
