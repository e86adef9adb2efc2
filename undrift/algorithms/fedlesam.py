"""FedLESAM: sharpness-aware local steps with one gradient, perturbed along the server's last movement.

Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang: Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
Sharpness-aware Minimization. ICML 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, GradientOracle, LocalData, State, Up, Vec, Worker
from undrift.algorithms.checks import at_least
from undrift.core.vec import norm


@dataclass(frozen=True)
class GlobalPerturbation(Worker):
    """x_i^{k+1} = x_i^k - eta_l g_i(x_i^k + rho u / |u|), u = x_old - x_t, x_old the model that the client was sent last time.

    Differs: the authors' code takes the server's model of the round before for x_old and sends it to everybody
    (`before=server`), and divides by the sum of the tensors' norms, not by the norm of the vector; only the latter is here.
    """

    radius: float = 0.1  # rho
    before: Literal["client", "server"] = "client"

    varies: ClassVar[tuple[str, ...]] = ("radius",)

    class Companion(NamedTuple):
        old: Vec  # the server's last model, [0] unless it is sent

    class Down(NamedTuple):
        x: Vec
        old: Vec

    class Client(NamedTuple):
        old: Tensor  # the model that the client was sent last time, [0] unless it counts

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        away: Tensor  # rho u / |u|, the same in all steps of a round; zero in the first one

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(x0 if self.before == "server" else x0[..., :0])

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(down.x if self.before == "client" else down.x[..., :0])

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        u = (client.old if self.before == "client" else down.old) - down.x
        return super().local_start(down, client, local)._replace(away=self.radius * u / (norm(u) + 1e-7))

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        return self.move(work, oracle.grad(work.x + work.away), oracle)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        return Up(down.x - work.x), self.client_init(down, torch.empty(0), torch.empty(0))

    def companion_step(self, companion: Companion, up: Up, cohort: Cohort, x_old: Tensor, x_new: Tensor) -> Companion:
        return self.companion_init(x_old, cohort.total)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "radius")


@dataclass(frozen=True)
class FedLESAM(GlobalPerturbation, Average):
    """Local steps perturbed along the server's movement, and a weighted mean."""
