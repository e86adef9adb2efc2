"""FT: FedAvg, and then every client fine-tunes the final model on its own samples.

Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage: Federated Evaluation of On-device Personalization. 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Served, Up, Worker, at_least, standing_still
from undrift.core.trees import nbytes
from undrift.oracle.oracle import GradientOracle, LocalData


@dataclass(frozen=True)
class FineTuning(Worker):
    """Rounds 0 .. begin - 1 are FedAvg's; in the rounds after that each client goes on alone from the last x."""

    begin: int = 90  # R, rounds of FedAvg
    phase: int = 0  # 0: FedAvg; 1: the first round of fine-tuning; 2: later ones. Set by the run

    personalises: ClassVar[bool] = True
    sends_updates: ClassVar[bool] = False  # not while clients fine-tune

    class Client(NamedTuple):
        v: Tensor  # the fine-tuned model
        statistics: Tensor
        tuned: Tensor  # [..., 1] 1 once fine-tuning has begun

    class Silence(NamedTuple):
        """What goes up while clients fine-tune."""

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: Any
        buffers: Tensor

    def at(self, t: int) -> Any:
        return replace(self, phase=0 if t < self.begin else 1 if t == self.begin else 2)

    def bytes_down(self, down: Any, invited: int, returning: int, clients: int) -> int:
        return invited * nbytes(down) if self.phase < 2 else 0

    @property
    def buffers_down(self) -> bool:
        return self.phase < 2

    @property
    def buffers_up(self) -> bool:
        return self.phase == 0

    def client_init(self, down: Any, ids: Tensor, buffers: Tensor) -> Any:
        return self.Client(down.x, buffers, torch.zeros_like(down.x[..., :1]))

    def start(self, x: Tensor, buffers: Tensor, client: Any) -> Served:
        """The server's model, or the client's own once it has one."""
        if not self.phase:
            return Served(x, buffers)
        tuned = client.tuned > 0
        return Served(torch.where(tuned, client.v, x), torch.where(tuned, client.statistics, buffers))

    def local_start(self, down: Any, client: Any) -> Work:
        x, buffers = self.start(down.x, client.statistics, client)
        return self.Work(x, torch.zeros_like(down.x[..., :1]), self.rest(down.x), buffers)

    def prepare(self, down: Any, client: Any, work: Work, local: LocalData) -> Work:
        return work._replace(buffers=self.start(down.x, local.buffers, client).buffers)

    def local_step(self, down: Any, client: Any, work: Work, oracle: GradientOracle) -> Any:
        if self.phase:
            oracle.buffers = work.buffers
        return self.move(work, oracle.grad(work.x), oracle)

    def local_end(self, down: Any, client: Any, work: Work) -> tuple[Any, Any]:
        if not self.phase:
            return Up(down.x - work.x), client
        return self.Silence(), self.Client(work.x, work.buffers, torch.ones_like(client.tuned))

    def take_moments(self, work: Any, opt: Any) -> Any:
        return work if self.phase == 1 else work._replace(opt=opt)  # fine-tuning begins with new moments

    def gather(self, companion: Any, up: Any, cohort: Cohort) -> tuple[Tensor, Any]:
        return super().gather(companion, up, cohort) if not self.phase else (standing_still(cohort), companion)

    def serves(self, down: Any, client: Any, local: LocalData) -> Served:
        return self.start(down.x, local.buffers, client)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0, "begin")


@dataclass(frozen=True)
class FT(FineTuning, Average):
    """FedAvg and fine-tuning after it."""

    paper: ClassVar[str] = """@article{wang2019ondevice,
  title   = {Federated Evaluation of On-device Personalization},
  author  = {Wang, Kangkang and Mathews, Rajiv and Kiddon, Chlo{\\'e} and Eichner, Hubert and Beaufays, Fran{\\c{c}}oise
             and Ramage, Daniel},
  journal = {arXiv:1910.10252},
  year    = {2019}
}"""
