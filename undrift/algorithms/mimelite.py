"""MimeLite: every local step takes the server's momentum, which is made of full local gradients.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Breaking the Centralized Barrier for Cross-Device Federated
Learning. NeurIPS 2021, with momentum SGD as the base optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Worker, below_one
from undrift.core.vec import mean
from undrift.oracle.oracle import GradientOracle, LocalData


@dataclass(frozen=True)
class FrozenMomentum(Worker):
    """Clients are sent the server's momentum m_t, which stays as it is during the round.

    `ema=false` is the heavy-ball form: direction g + beta m, and m <- beta m + grad f.
    """

    beta: float = 0.9
    ema: bool = True

    def mixed(self, g: Tensor, m: Tensor) -> Tensor:
        """(1 - beta) g + beta m, or g + beta m."""
        return (1 - self.beta) * g + self.beta * m if self.ema else g + self.beta * m

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        below_one(self, "beta")


@dataclass(frozen=True)
class LiteMomentum(FrozenMomentum):
    """x_i^{k+1} = x_i^k - eta_l ( (1 - beta) g_i(x_i^k) + beta m_t ); m is made of the clients' full gradients at x_t.

    Differs: the full gradient is taken batch by batch in training mode, without augmentation and dropout.
    """

    class Companion(NamedTuple):
        m: Tensor

    class Down(NamedTuple):
        x: Tensor
        m: Tensor

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: Any
        full: Tensor  # grad f_i(x_t)

    class Up(NamedTuple):
        d: Tensor
        full: Tensor

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(torch.zeros_like(x0))

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> Down:
        return self.Down(x, companion.m)

    def local_start(self, down: Down, client: Any) -> Work:
        return self.Work(down.x, torch.zeros_like(down.x[..., :1]), self.rest(down.x), torch.zeros_like(down.x))

    def prepare(self, down: Down, client: Any, work: Work, local: LocalData) -> Work:
        return work._replace(full=local.full_grad(down.x))

    def local_step(self, down: Down, client: Any, work: Work, oracle: GradientOracle) -> Any:
        return self.move(work, self.mixed(oracle.grad(work.x), down.m), oracle)

    def local_end(self, down: Down, client: Any, work: Work) -> tuple[Up, Any]:
        return self.Up(down.x - work.x, work.full), client

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        m = self.mixed(mean(up.full, cohort.weight), companion.m)  # m_{t+1} = (1 - beta) mean grad f_i(x_t) + beta m_t
        return mean(up.d, cohort.weight), self.Companion(m)


@dataclass(frozen=True)
class MimeLite(LiteMomentum, Average):
    """Frozen server momentum on the clients and a weighted mean."""

    paper: ClassVar[str] = """@inproceedings{karimireddy2021mime,
  title     = {Breaking the Centralized Barrier for Cross-Device Federated Learning},
  author    = {Karimireddy, Sai Praneeth and Jaggi, Martin and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank and
               Stich, Sebastian and Suresh, Ananda Theertha},
  booktitle = {NeurIPS},
  year      = {2021}
}"""
