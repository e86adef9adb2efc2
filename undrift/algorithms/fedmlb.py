"""FedMLB: local blocks trained through the frozen rest of the server's model.

Kim, Kim, Han: Multi-Level Branched Regularization for Federated Learning. ICML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.base import Average, Down, GradientOracle, Nothing, Work, Worker
from undrift.algorithms.checks import above, at_least
from undrift.oracle.oracle import View


@dataclass(frozen=True)
class Branched(Worker):
    """l1 loss(q) + (l2 / M) sum_m loss(q_m) + (l3 / M) sum_m KL(softmax(q_m / T) || softmax(q / T)).

    q is the local model's output; q_m that of the server's blocks behind the local ones up to m. Nothing is detached: both
    sides of the divergence move the local blocks.
    """

    lambda1: float = 1.0
    lambda2: float = 1.0
    lambda3: float = 1.0
    temperature: float = 1.0

    def local_step(self, down: Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        return self.move(work, oracle.grad(work.x, self.objective, down.x), oracle)

    def objective(self, model: View, x: Tensor, inputs: Tensor, targets: Tensor, x_t: Tensor) -> Tensor:
        *hidden, q = model.trace(x, inputs)
        total = self.lambda1 * model.loss(q, targets)
        for m, h in enumerate(hidden, 1):
            q_m = model.onward(m, x_t, h)
            main, branch = (F.log_softmax(model.by_class(o, targets) / self.temperature, 1) for o in (q, q_m))
            divergence = model.over((branch.exp() * (branch - main)).sum(1), targets)
            total = total + (self.lambda2 * model.loss(q_m, targets) + self.lambda3 * divergence) / len(hidden)
        return total

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "lambda1", "lambda2", "lambda3")
        above(self, 0.0, "temperature")


@dataclass(frozen=True)
class FedMLB(Branched, Average):
    """Branched local losses and a weighted mean."""
