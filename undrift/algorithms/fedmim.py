"""FedMIM: multi-step inertial momentum, the last J rounds' directions in every local step.

Liu, Sun, Ding, Shen, Liu, Tao: Enhance Local Consistency in Federated Learning: A Multi-Step Inertial Momentum Approach. 2023,
Algorithm 1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, GradientOracle, Nothing, Up, Vec, Work, Worker
from undrift.core.errors import BadSetting
from undrift.core.trees import nbytes


@dataclass(frozen=True)
class MultiStepInertia(Worker):
    """Local steps carried on by a_t and looking ahead by b_t, both combinations of the last rounds' delta.

    Differs: Algorithm 1 sends every model to every client, so that all know delta; clients here get the exact a_t and b_t,
    and the downlink is counted as that (`downlink=broadcast`) or as x, a and b to the cohort (`on_demand`).
    """

    alpha: tuple[float, ...] = (0.6, 0.3)  # weights of delta_t, delta_{t-1}, ... in the step
    beta: tuple[float, ...] = (0.9, 0.1)  # their weights in the point where the gradient is taken
    downlink: Literal["broadcast", "on_demand"] = "broadcast"

    varies: ClassVar[tuple[str, ...]] = ("alpha", "beta")

    class Companion(NamedTuple):
        deltas: Vec  # [J, P] the newest first

    class Down(NamedTuple):
        x: Vec
        a: Vec
        b: Vec

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        depth = max(len(self.alpha), len(self.beta))
        return self.Companion(torch.zeros_like(x0).unsqueeze(-2).repeat_interleave(depth, -2))

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> Down:
        return self.Down(x, inertia(self.alpha, companion.deltas), inertia(self.beta, companion.deltas))

    def local_step(self, down: Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        y1 = work.x - down.a  # line 8: y_1 = x_i^k - sum_j alpha_j delta_{t+1-j}
        y2 = work.x - down.b  # line 9: y_2 = x_i^k - sum_j beta_j delta_{t+1-j}
        g = oracle.grad(y2)  # line 11
        A = 1 - sum(self.alpha)
        return self.move(work, A * g, oracle, start=y1)  # line 12: x_i^{k+1} = y_1 - (1 - sum_j alpha_j) eta_l g

    def companion_step(self, companion: Companion, up: Up, cohort: Cohort, x_old: Tensor, x_new: Tensor) -> Companion:
        delta = (x_old - x_new) / cohort.mean_steps  # line 6: delta_{t+1} = (x_t - x_{t+1}) / K
        return self.Companion(torch.cat([delta.unsqueeze(-2), companion.deltas[..., :-1, :]], -2))

    def bytes_down(self, down: Down, invited: int, returning: int, clients: int) -> int:
        if self.downlink == "broadcast":
            return clients * nbytes(down.x)
        one = not any(self.alpha) or not any(self.beta) or proportional(self.alpha, self.beta)
        return invited * (nbytes(down.x) + nbytes(down.a) * (1 if one else 2))

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        if not self.alpha or not self.beta or min(*self.alpha, *self.beta, 0.0) < 0 or not sum(self.alpha) < 1:
            raise BadSetting(f"alpha and beta must be >= 0, sum(alpha) < 1, not {self.alpha} and {self.beta}")


def proportional(alpha: tuple[float, ...], beta: tuple[float, ...]) -> bool:
    """Whether b_t is a multiple of a_t, so that one vector serves both."""
    pairs = list(itertools.zip_longest(alpha, beta, fillvalue=0.0))
    return all(a * d == c * b for (a, b), (c, d) in itertools.combinations(pairs, 2))


def inertia(weights: tuple[float, ...], deltas: Tensor) -> Tensor:
    """sum_j weight_j delta_{t+1-j}, [..., J, P] to [..., P]."""
    return sum((w * deltas[..., j, :] for j, w in enumerate(weights)), torch.zeros_like(deltas[..., 0, :]))


@dataclass(frozen=True)
class FedMIM(MultiStepInertia, Average):
    """Multi-step inertial momentum on the clients and a mean on the server."""
