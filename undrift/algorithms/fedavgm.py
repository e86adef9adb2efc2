"""FedAvgM: FedAvg with momentum on the server (also called FedAvgSM, slow momentum).

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification. 2019;
here in the heavy-ball form of GradMA's Algorithm 5 (Luo et al., CVPR 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Cohort, LocalSGD, Server, Up
from undrift.algorithms.checks import below_one, needs_steady_rate
from undrift.core.errors import BadSetting


@dataclass(frozen=True)
class ServerMomentum(Server):
    """The server follows a momentum of the clients' directions.

    Differs: Hsu et al. step along d + beta_1 m (`nesterov=true`), MOON's code damps d by 1 - beta_1 (`dampening=beta_1`),
    the DOMO thesis keeps m in gradient units (`momentum_units=grad`), which matters only when rates or steps change.
    """

    beta1: float = 0.9
    nesterov: bool = False
    dampening: float = 0.0
    momentum_units: Literal["param", "grad"] = "param"  # m is a sum of updates, or of updates per unit of eta_l K

    varies: ClassVar[tuple[str, ...]] = ("beta1", "dampening")

    class State(NamedTuple):
        m: Tensor

    def server_step(self, server: State, x: Tensor, d: Tensor, up: Up, cohort: Cohort) -> tuple[Tensor, State]:
        unit = cohort.lr * cohort.mean_steps if self.momentum_units == "grad" else 1.0
        m = self.beta1 * server.m + (1 - self.dampening) * d / unit  # m_{t+1} = beta_1 m_t + d
        step = d / unit + self.beta1 * m if self.nesterov else m
        return x - self.server_lr * unit * step, self.State(m)  # x_{t+1} = x_t - eta_g m_{t+1}

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        below_one(self, "beta1", "dampening")
        if self.momentum_units == "grad":
            needs_steady_rate(self)
        if self.dampening and not self.beta1:
            raise BadSetting("dampening goes with momentum; set beta1 above 0 or dampening to 0")


@dataclass(frozen=True)
class FedAvgM(LocalSGD, ServerMomentum):
    """m_{t+1} = beta_1 m_t + d;  x_{t+1} = x_t - eta_g m_{t+1}."""
