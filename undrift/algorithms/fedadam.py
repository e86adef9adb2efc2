"""FedAdam: Adam on the server, with the clients' mean change as its gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization. ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Cohort, LocalSGD, Server, Up
from undrift.algorithms.checks import above, below_one
from undrift.core.layout import Layout


@dataclass(frozen=True)
class AdaptiveServer(Server):
    """x_{t+1} = x_t - eta_g m / (sqrt(v) + tau), element by element; the methods differ in v.

    Differs: v starts at 0 as in most code (`v0=tau2` for the paper's tau^2), and the paper has no bias correction.
    """

    server_lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    v0: Literal["zero", "tau2"] = "zero"
    bias_correction: bool = False

    varies: ClassVar[tuple[str, ...]] = ("beta1", "beta2", "tau")

    class State(NamedTuple):
        m: Tensor
        v: Tensor
        t: Tensor  # [1] rounds so far

    def server_init(self, x0: Tensor, clients: int, layout: Layout) -> State:
        start = self.tau**2 if self.v0 == "tau2" else 0.0
        return self.State(torch.zeros_like(x0), torch.full_like(x0, start), torch.zeros_like(x0[..., :1]))

    @abstractmethod
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """v_{t+1} from v_t and d^2."""

    def server_step(self, server: State, x: Tensor, d: Tensor, up: Up, cohort: Cohort) -> tuple[Tensor, State]:
        m = self.beta1 * server.m + (1 - self.beta1) * d
        v, t = self.second_moment(server.v, d * d), server.t + 1
        rate: float | Tensor = self.server_lr
        if self.bias_correction:
            rate = rate * (1 - self.beta2**t).sqrt() / (1 - self.beta1**t)
        return x - rate * m / (v.sqrt() + self.tau), self.State(m, v, t)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        below_one(self, "beta1", "beta2")
        above(self, 0.0, "tau")


@dataclass(frozen=True)
class AdamServer(AdaptiveServer):
    """v_{t+1} = beta_2 v_t + (1 - beta_2) d^2."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedAdam(LocalSGD, AdamServer):
    """Local SGD on the clients, Adam on the server."""
