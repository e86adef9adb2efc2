"""DOMO: double momentum, the server's momentum fused into the clients' start.

Xu: New Efficient and Privacy-Preserving Methods for Distributed Training. PhD thesis, chapter 4, Algorithm 4, option I;
Xu & Huang: Coordinating Momenta for Cross-silo Federated Learning. AAAI 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Cohort, Momentum, Worker
from undrift.algorithms.fedavglm_z import FedAvgLMZ
from undrift.algorithms.fedavgm import ServerMomentum
from undrift.core.errors import BadSetting, UnknownName
from undrift.core.trees import nbytes
from undrift.core.vec import mean
from undrift.oracle.oracle import GradientOracle


@dataclass(frozen=True)
class FusedMomentum(Worker):
    """Clients know M_t, the server's momentum in gradient units, from two successive models.

    M_t = (x_{t-1} - x_t) / (eta_g eta_l K) with the rate and the mean steps of the round before. A client that missed that
    round lacks x_{t-1} and is sent M_t, which the downlink counts. `buffers=average` starts local momentum from the
    cohort's mean buffer instead of zero, which travels both ways.
    """

    optimizer: str = "momentum"
    momentum: float = 0.6  # mu_l
    beta: float = 0.9  # how much of the server's momentum is fused in
    buffers: str = "reset"

    class Companion(NamedTuple):
        M: Tensor
        b: Tensor  # the mean buffer, [0] where buffers are reset

    class Down(NamedTuple):
        x: Tensor
        M: Tensor
        b: Tensor
        K: Tensor  # [1] the cohort's mean number of local steps

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: Any

    class Up(NamedTuple):
        d: Tensor  # eta_l K D_i = eta_l sum_k b: the update without the server's momentum
        b: Tensor

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(torch.zeros_like(x0), torch.zeros_like(x0 if self.buffers == "average" else x0[..., :0]))

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> Down:
        return self.Down(x, companion.M, companion.b, invited.mean_steps)

    def start(self, down: Down, x: Tensor) -> Work:
        b = down.b if self.buffers == "average" else torch.zeros_like(x)
        return self.Work(x, torch.zeros_like(x[..., :1]), Momentum(b))

    def end(self, down: Down, work: Any, steps: Tensor) -> Up:
        """D_i from the models: x_t - x_i^K - eta_l beta K M_t."""
        d = down.x - work.x - self.lr * self.beta * steps * down.M
        return self.Up(d, work.opt.b if self.buffers == "average" else down.b)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        return mean(up.d, cohort.weight), companion._replace(b=mean(up.b, cohort.weight))

    def companion_step(self, companion: Companion, up: Up, cohort: Cohort, x_old: Tensor, x_new: Tensor) -> Companion:
        rate: float = getattr(self, "server_lr", 1.0)
        return companion._replace(M=(x_old - x_new) / (rate * cohort.lr * cohort.mean_steps))

    def bytes_down(self, down: Down, invited: int, returning: int, clients: int) -> int:
        return invited * (nbytes(down.x) + nbytes(down.b)) + (invited - returning) * nbytes(down.M)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        if self.optimizer != "momentum" or not self.beta >= 0:
            raise BadSetting(f"DOMO needs optimizer=momentum and beta >= 0, not {self.optimizer} and {self.beta}")
        if self.keep_moments:
            raise BadSetting("DOMO's local buffers are new in each round; leave keep_moments at false")
        if not getattr(self, "server_lr", 1.0) > 0:
            raise BadSetting("DOMO infers its momentum from the server's steps; server_lr must be greater than 0")
        if getattr(self, "nesterov", False):
            raise BadSetting("DOMO infers the server's momentum from its steps; with nesterov they are another vector")
        if self.buffers not in ("reset", "average"):
            raise UnknownName("buffers", self.buffers, ("reset", "average"))


@dataclass(frozen=True)
class FusedStart(FusedMomentum):
    """x_i^0 = x_t - eta_l beta K M_t, then local momentum SGD."""

    def local_start(self, down: FusedMomentum.Down, client: Any) -> Any:
        return self.start(down, down.x - self.lr * self.beta * down.K * down.M)

    def local_step(self, down: Any, client: Any, work: Any, oracle: GradientOracle) -> Any:
        return self.move(work, oracle.grad(work.x), oracle)

    def local_end(self, down: FusedMomentum.Down, client: Any, work: Any) -> tuple[Any, Any]:
        return self.end(down, work, down.K), client


@dataclass(frozen=True)
class DOMO(FusedStart, ServerMomentum):
    """M_{t+1} = mu_s M_t + mean D_i;  x_{t+1} = x_t - eta_g eta_l K M_{t+1}."""

    momentum_units: str = "grad"

    paper: ClassVar[str] = FedAvgLMZ.paper
