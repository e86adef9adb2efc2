"""Per-FedAvg: a start from which one local step serves every client well.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach. NeurIPS 2020, Algorithm 1, with its first-order (FO) and Hessian-free (HF) gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from undrift.algorithms.base import Average, Down, GradientOracle, LocalData, Nothing, Work, Worker
from undrift.algorithms.checks import above, at_least
from undrift.algorithms.personal import Served
from undrift.core.vec import descend


@dataclass(frozen=True)
class MetaSteps(Worker):
    """w <- w - beta r with r the gradient after one step of rate alpha; beta is `lr`.

    Differs: the two or three independent batches of a step are the parts of one mini-batch.
    """

    alpha: float = 0.01  # the rate of the inner step
    hessian_free: bool = False  # correct r by a Hessian-vector product: (I - alpha H) r
    delta: float = 1e-3  # the step of its central difference
    split: bool = True  # False: all gradients of a step are on the whole mini-batch
    adapt_steps: int = 1  # inner steps of a client before it uses the model, on all of its training samples

    personalises: ClassVar[bool] = True

    def local_step(self, down: Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        count = 3 if self.hessian_free else 2
        first, second, *third = oracle.parts(count) if self.split else [oracle] * count
        inner = descend(work.x, self.alpha, first.grad(work.x, track=False))  # w' = w - alpha g(w; xi)
        r = second.grad(inner)  # r = g(w'; xi')
        oracle.buffers, oracle.loss = second.buffers, second.loss
        if self.hessian_free:  # r - alpha [g(w + delta r; xi'') - g(w - delta r; xi'')] / (2 delta)
            ahead = third[0].grad(work.x + self.delta * r, track=False)
            behind = third[0].grad(work.x - self.delta * r, track=False)
            r = r - self.alpha * (ahead - behind) / (2 * self.delta)
        return self.move(work, r, oracle)

    def serves(self, down: Down, client: Nothing, local: LocalData) -> Served:
        x = down.x
        for _ in range(self.adapt_steps):
            x = x - self.alpha * local.full_grad(x)
        return Served(x, local.buffers)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "alpha", "adapt_steps")
        above(self, 0.0, "delta")


@dataclass(frozen=True)
class PerFedAvg(MetaSteps, Average):
    """Meta-learning on the clients and a weighted mean."""
