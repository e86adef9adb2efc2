"""FedDyn: a dynamic regulariser that makes the clients' optima agree with the server's.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization. ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Up, Work, Worker
from undrift.core.errors import BadSetting, UnknownName
from undrift.core.vec import mean
from undrift.oracle.oracle import GradientOracle


@dataclass(frozen=True)
class DynamicRegularizer(Worker):
    """Clients minimise f_i(x) - <lambda_i, x> + alpha/2 |x - x_t|^2 and keep lambda_i.

    `form=scaled` keeps h_i = -lambda_i / alpha instead, as the authors' code does: the same iterates.
    """

    alpha: float = 0.1
    form: str = "paper"

    class Companion(NamedTuple):
        h: Tensor  # (1/N) sum of lambda_i over all clients (scaled: of h_i)

    class Client(NamedTuple):
        h: Tensor  # lambda_i (scaled: h_i)

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(torch.zeros_like(x0))

    def client_init(self, down: Any, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(torch.zeros_like(down.x))

    def local_step(self, down: Any, client: Client, work: Work, oracle: GradientOracle) -> Any:
        g = oracle.grad(work.x)
        if self.form == "scaled":
            return self.move(work, g + self.alpha * (work.x - down.x + client.h), oracle)
        return self.move(work, g - client.h + self.alpha * (work.x - down.x), oracle)

    def local_end(self, down: Any, client: Client, work: Work) -> tuple[Up, Client]:
        d = down.x - work.x
        return Up(d), self.Client(client.h - d if self.form == "scaled" else client.h + self.alpha * d)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        moved = cohort.size / cohort.total * mean(up.d, cohort.uniform)  # (1/N) sum of d_i
        if self.form == "scaled":
            h = companion.h - moved
            return mean(up.d, cohort.weight) - h, self.Companion(h)  # x_{t+1} = mean x_i^K + h
        h = companion.h + self.alpha * moved
        return mean(up.d, cohort.weight) + h / self.alpha, self.Companion(h)  # x_{t+1} = mean x_i^K - h / alpha

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        if not 0.0 < self.alpha < float("inf"):
            raise BadSetting(f"alpha must be a finite number above 0, not {self.alpha}")
        if self.form not in ("paper", "scaled"):
            raise UnknownName("form", self.form, ("paper", "scaled"))


@dataclass(frozen=True)
class FedDyn(DynamicRegularizer, Average):
    """Dynamic regularisation on the clients; the server's mean is corrected by h."""

    paper: ClassVar[str] = """@inproceedings{acar2021feddyn,
  title     = {Federated Learning Based on Dynamic Regularization},
  author    = {Acar, Durmus Alp Emre and Zhao, Yue and Matas, Ramon and Mattina, Matthew and Whatmough, Paul and
               Saligrama, Venkatesh},
  booktitle = {ICLR},
  year      = {2021}
}"""
