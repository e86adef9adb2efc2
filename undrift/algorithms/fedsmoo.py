"""FedSMOO: dynamic regularisers that make the clients agree on the model and on where it is sharp.

Sun, Shen, Chen, Ding, Tao: Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching Global Consistency
and Smooth Landscape. ICML 2023, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, GradientOracle, LocalData, State, Vec, Worker
from undrift.algorithms.checks import above, at_least
from undrift.core.vec import mean, norm


@dataclass(frozen=True)
class DynamicSharpness(Worker):
    """s_k = rho v / |v| with v = g_i(x_i^k) - mu_i - s;  mu_i <- mu_i + s_k - s;  the step follows
    g_i(x_i^k + s_k) - lambda_i + alpha (x_i^k - x_t), and lambda_i <- lambda_i + alpha (x_t - x_i^K).

    alpha is the paper's 1 / beta, and the same as FedDyn's.

    Differs: the paper's clients send mu_i - s_K and the server makes s of the mean of that; the authors' code leaves s_K out
    (`dual=code`).
    """

    alpha: float = 0.1
    radius: float = 0.1  # rho
    dual: Literal["paper", "code"] = "paper"

    varies: ClassVar[tuple[str, ...]] = ("alpha", "radius")

    class Companion(NamedTuple):
        h: Vec  # (1/N) sum of lambda_i over all clients
        s: Vec  # the common perturbation

    class Down(NamedTuple):
        x: Vec
        s: Vec

    class Client(NamedTuple):
        h: Tensor  # lambda_i
        mu: Tensor  # mu_i

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        mu: Tensor
        s: Tensor  # s_k of the last step

    class Up(NamedTuple):
        d: Vec
        s: Vec  # mu_i - s_K, or mu_i

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        return super().local_start(down, client, local)._replace(mu=client.mu)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        v = oracle.grad(work.x) - work.mu - down.s
        s = self.radius * v / (norm(v) + 1e-7)
        g = oracle.grad(work.x + s, track=False)
        moved = self.move(work, g - client.h + self.alpha * (work.x - down.x), oracle)
        return moved._replace(mu=work.mu + s - down.s, s=s)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        d = down.x - work.x
        up = self.Up(d, work.mu - work.s if self.dual == "paper" else work.mu)
        return up, self.Client(client.h + self.alpha * d, work.mu)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        h = companion.h + self.alpha * cohort.size / cohort.total * mean(up.d, cohort.uniform)
        s = mean(up.s, cohort.uniform)
        s = self.radius * s / (norm(s) + 1e-7)
        return mean(up.d, cohort.weight) + h / self.alpha, self.Companion(h, s)  # x_{t+1} = mean x_i^K - h / alpha

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        above(self, 0.0, "alpha")
        at_least(self, 0.0, "radius")


@dataclass(frozen=True)
class FedSMOO(DynamicSharpness, Average):
    """Dynamic regularisation of model and perturbation; the server's mean is corrected by h."""
