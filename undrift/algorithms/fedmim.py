"""FedMIM: multi-step inertial momentum, the last J rounds' directions in every local step.

Liu, Sun, Ding, Shen, Liu, Tao: Enhance Local Consistency in Federated Learning: A Multi-Step Inertial Momentum Approach. 2023,
Algorithm 1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Work, Worker
from undrift.core.errors import BadSetting, UnknownName
from undrift.core.trees import nbytes
from undrift.oracle.oracle import GradientOracle


@dataclass(frozen=True)
class MultiStepInertia(Worker):
    """Local steps carried on by a_t and looking ahead by b_t, both combinations of the last rounds' delta.

    Differs: Algorithm 1 sends every model to every client, so that all know delta; clients here get the exact a_t and b_t,
    and the downlink is counted as that (`downlink=broadcast`) or as x, a and b to the cohort (`on_demand`).
    """

    alpha: tuple[float, ...] = (0.6, 0.3)  # of delta_t, delta_{t-1}, ... in the step
    beta: tuple[float, ...] = (0.9, 0.1)  # of the same in the point where the gradient is taken
    downlink: str = "broadcast"

    class Companion(NamedTuple):
        deltas: Tensor  # [J, P] the newest first

    class Down(NamedTuple):
        x: Tensor
        a: Tensor
        b: Tensor

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        depth = max(len(self.alpha), len(self.beta))
        return self.Companion(torch.zeros_like(x0).unsqueeze(-2).repeat_interleave(depth, -2))

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> Down:
        return self.Down(x, inertia(self.alpha, companion.deltas), inertia(self.beta, companion.deltas))

    def local_step(self, down: Down, client: Any, work: Work, oracle: GradientOracle) -> Any:
        g = oracle.grad(work.x - down.b)  # at y = x_i^k - b_t
        u = down.a / self.lr + (1 - sum(self.alpha)) * g
        return self.move(work, u, oracle)  # x_i^{k+1} = x_i^k - a_t - A eta_l g

    def companion_step(self, companion: Companion, up: Any, cohort: Cohort, x_old: Tensor, x_new: Tensor) -> Companion:
        delta = (x_old - x_new) / cohort.mean_steps  # delta_{t+1} = (x_t - x_{t+1}) / K
        return self.Companion(torch.cat([delta.unsqueeze(-2), companion.deltas[..., :-1, :]], -2))

    def bytes_down(self, down: Down, invited: int, returning: int, clients: int) -> int:
        if self.downlink == "broadcast":
            return clients * nbytes(down.x)
        one = not any(self.alpha) or not any(self.beta) or proportional(self.alpha, self.beta)
        return invited * (nbytes(down.x) + nbytes(down.a) * (1 if one else 2))

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        if not self.alpha or not self.beta or min(*self.alpha, *self.beta, 0.0) < 0 or not sum(self.alpha) < 1:
            raise BadSetting(
                f"alpha and beta must be >= 0 and alpha add up to less than 1, not {self.alpha} and {self.beta}"
            )
        if self.downlink not in ("broadcast", "on_demand"):
            raise UnknownName("downlink", self.downlink, ("broadcast", "on_demand"))


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

    paper: ClassVar[str] = """@article{liu2023fedmim,
  title   = {Enhance Local Consistency in Federated Learning: A Multi-Step Inertial Momentum Approach},
  author  = {Liu, Yixing and Sun, Yan and Ding, Zhengtao and Shen, Li and Liu, Bo and Tao, Dacheng},
  journal = {arXiv:2302.05726},
  year    = {2023}
}"""
