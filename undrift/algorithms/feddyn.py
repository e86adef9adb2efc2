"""FedDyn: a dynamic regulariser that makes the clients' optima agree with the server's.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization. ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Down, GradientOracle, Up, Vec, Work, Worker
from undrift.algorithms.checks import above
from undrift.core.vec import mean


@dataclass(frozen=True)
class DynamicRegularizer(Worker):
    """Clients minimise f_i(x) - <lambda_i, x> + alpha/2 |x - x_t|^2 and keep lambda_i.

    `form=scaled` keeps h_i = -lambda_i / alpha instead, as the authors' code does: the same iterates.
    """

    alpha: float = 0.1
    form: Literal["paper", "scaled"] = "paper"

    varies: ClassVar[tuple[str, ...]] = ("alpha",)

    class Companion(NamedTuple):
        h: Vec  # (1/N) sum of lambda_i over all clients (scaled: of h_i)

    class Client(NamedTuple):
        h: Tensor  # lambda_i (scaled: h_i)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        g = oracle.grad(work.x)
        if self.form == "scaled":
            return self.move(work, g + self.alpha * (work.x - down.x + client.h), oracle)
        return self.move(work, g - client.h + self.alpha * (work.x - down.x), oracle)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
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
        above(self, 0.0, "alpha")


@dataclass(frozen=True)
class FedDyn(DynamicRegularizer, Average):
    """Dynamic regularisation on the clients; the server's mean is corrected by h."""
