"""FedBuff: the server steps along the sum of a buffer of updates, each the shorter the older the model is that it began with.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous Aggregation. AISTATS 2022,
Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from undrift.algorithms.base import Cohort, LocalSGD, State, Up
from undrift.algorithms.checks import at_least
from undrift.algorithms.fedavgm import ServerMomentum
from undrift.algorithms.stale import Stale
from undrift.core.vec import mean


@dataclass(frozen=True)
class StaleBuffer(Stale, ServerMomentum):
    """d = (1/K) sum_i s_i d_i over a buffer of K updates, with s_i = (1 + staleness)^-a.

    Differs: the authors' code divides by the sum of s_i, not by K (`divide_by=weights`); a client is in a buffer once at most.
    """

    beta1: float = 0.0
    a: float = 0.5
    divide_by: Literal["count", "weights"] = "count"

    varies: ClassVar[tuple[str, ...]] = ("beta1", "dampening")

    def discount(self, missed: Tensor) -> Tensor:
        return (1 + missed) ** -self.a  # s_i

    def server_step(self, server: State, x: Tensor, d: Tensor, up: Up, cohort: Cohort) -> tuple[Tensor, State]:
        if self.divide_by == "count":
            d = mean(self.scale(cohort), cohort.weight) * d  # d was divided by the sum of s_i
        return super().server_step(server, x, d, up, cohort)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "a")


@dataclass(frozen=True)
class FedBuff(LocalSGD, StaleBuffer):
    """Local SGD on the clients and x_{t+1} = x_t - eta_g d."""
