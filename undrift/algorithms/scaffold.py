"""SCAFFOLD: control variates against client drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.
ICML 2020, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Cohort, Worker
from undrift.algorithms.fedavgm import ServerMomentum
from undrift.core.errors import BadSetting
from undrift.core.vec import mean
from undrift.oracle.oracle import GradientOracle, LocalData


@dataclass(frozen=True)
class ControlVariates(Worker):
    """Local steps corrected by c - c_i, the difference of the server's and the client's control variate.

    `option=2` takes the round's mean gradient as c_i^+, `option=1` the full local gradient at x_t, one more pass over the data.
    """

    option: int = 2

    class Companion(NamedTuple):
        c: Tensor  # (1/N) sum of all c_i

    class Down(NamedTuple):
        x: Tensor
        c: Tensor

    class Client(NamedTuple):
        c: Tensor  # c_i: kept between rounds, never sent

    class Up(NamedTuple):
        d: Tensor
        dc: Tensor  # c_i^+ - c_i

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: Any
        full: Tensor  # option I: the full local gradient at x_t; else [0]

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(torch.zeros_like(x0))

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> Down:
        return self.Down(x, companion.c)

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(torch.zeros_like(down.c))

    def local_start(self, down: Down, client: Client) -> Work:
        return self.Work(down.x, torch.zeros_like(down.x[..., :1]), self.rest(down.x), down.x[..., :0])

    def prepare(self, down: Down, client: Client, work: Work, local: LocalData) -> Work:
        return work._replace(full=local.full_grad(down.x)) if self.option == 1 else work

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Any:
        return self.move(work, oracle.grad(work.x) - client.c + down.c, oracle)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        d = down.x - work.x
        c = client.c - down.c + d / (work.k * self.lr)  # option II: c_i^+ = c_i - c + d_i / (K_i eta_l)
        if self.option == 1:
            c = work.full  # option I: c_i^+ = grad f_i(x_t)
        return self.Up(d, c - client.c), self.Client(c)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        # c <- c + (1/N) sum_S (c_i^+ - c_i): uniform whatever the weights of the models are
        c = companion.c + cohort.size / cohort.total * mean(up.dc, cohort.uniform)
        return mean(up.d, cohort.weight), self.Companion(c)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        if self.option not in (1, 2):
            raise BadSetting(f"option must be 1 or 2, not {self.option}")


@dataclass(frozen=True)
class Scaffold(ControlVariates, ServerMomentum):
    """Control variates on the clients; the server averages, with momentum if beta1 > 0."""

    beta1: float = 0.0

    paper: ClassVar[str] = """@inproceedings{karimireddy2020scaffold,
  title     = {{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning},
  author    = {Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank and Stich, Sebastian and
               Suresh, Ananda Theertha},
  booktitle = {ICML},
  year      = {2020}
}"""
