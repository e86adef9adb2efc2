"""pFedMe: personal models near the server's, which follows them through Moreau envelopes.

Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Down, GradientOracle, LocalData, State, Up, Worker
from undrift.algorithms.checks import at_least
from undrift.algorithms.personal import Served


@dataclass(frozen=True)
class MoreauEnvelope(Worker):
    """theta takes inner_steps steps down f_i + lam/2 |theta - w|^2, then w <- w - eta lam (w - theta); eta is `lr`.

    The server's beta is `server_lr`. theta starts at w in each round and continues from step to step.
    """

    lam: float = 15.0  # lambda
    inner_lr: float = 0.05  # a, the rate of theta
    inner_steps: int = 5
    reset: bool = False  # begin every local step with theta = w
    theta_decay: float = 0.0  # the authors' code pulls theta to zero by 0.001

    personalises: ClassVar[bool] = True

    class Client(NamedTuple):
        theta: Tensor
        statistics: Tensor

    class Work(NamedTuple):
        x: Tensor  # w
        k: Tensor
        opt: State
        theta: Tensor
        buffers: Tensor

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(down.x, buffers)

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        return super().local_start(down, client, local)._replace(theta=down.x, buffers=client.statistics)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        w, theta = work.x, work.x if self.reset else work.theta
        for inner in range(self.inner_steps):
            g = oracle.grad(theta, track=inner == 0)
            theta = theta - self.inner_lr * (g + self.lam * (theta - w) + self.theta_decay * theta)
        return self.move(work, self.lam * (w - theta), oracle)._replace(theta=theta, buffers=oracle.buffers)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        return Up(down.x - work.x), self.Client(work.theta, work.buffers)

    def serves(self, down: Down, client: Client, local: LocalData) -> Served:
        return Served(client.theta, client.statistics)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "lam", "inner_lr", "theta_decay")
        at_least(self, 1, "inner_steps")


@dataclass(frozen=True)
class PFedMe(MoreauEnvelope, Average):
    """Moreau envelopes and x_{t+1} = (1 - beta) x_t + beta mean(w_i)."""
