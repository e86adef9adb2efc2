"""FedNTD: clients keep the server's opinion of the classes that are not the true one.

Lee, Jeong, Shin, Bae, Yun: Preservation of the Global Knowledge by Not-True Distillation in Federated Learning. NeurIPS 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.base import Average, Down, GradientOracle, LocalData, Nothing, State, Worker
from undrift.algorithms.checks import above, at_least
from undrift.core.vec import positions
from undrift.oracle.oracle import View


@dataclass(frozen=True)
class NotTrueDistillation(Worker):
    """loss + beta KL(softmax(q_t / tau) || softmax(q / tau)), both without the true class; q_t are the server's logits.

    The server's model is in evaluation mode. With two classes the term is zero.
    """

    beta: float = 1.0
    temperature: float = 3.0  # tau

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        start: Tensor  # the server's BatchNorm statistics at the start of the round

    def local_start(self, down: Down, client: Nothing, local: LocalData) -> Work:
        return super().local_start(down, client, local)._replace(start=local.buffers)

    def local_step(self, down: Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        return self.move(work, oracle.grad(work.x, self.objective, down.x, work.start), oracle)

    def objective(self, model: View, x: Tensor, inputs: Tensor, targets: Tensor, x_t: Tensor, start: Tensor) -> Tensor:
        q, q_t = model(x, inputs), model.still(x_t, start, inputs).detach()
        q, q_t = (model.by_class(outputs, targets) for outputs in (q, q_t))
        true = positions(q, 1).view(q.shape[1], *(1,) * (targets.dim() - 1)) == targets.unsqueeze(1)
        other, other_t = (
            F.log_softmax((logits / self.temperature).masked_fill(true, -torch.inf), 1).masked_fill(true, 0.0)
            for logits in (q, q_t)
        )
        divergence = (other_t.exp().masked_fill(true, 0.0) * (other_t - other)).sum(1)
        return model.loss(q, targets) + self.beta * model.over(divergence, targets)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "beta")
        above(self, 0.0, "temperature")


@dataclass(frozen=True)
class FedNTD(NotTrueDistillation, Average):
    """Distillation of what is not true, and a weighted mean."""
