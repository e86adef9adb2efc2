"""FedAsync: the server mixes every client's model into its own at once, less of it if it began with an old one.

Xie, Koyejo, Gupta: Asynchronous Federated Optimization. OPT 2020 (arXiv 1903.03934), Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from undrift.algorithms.base import Cohort, Nothing, Server, State
from undrift.algorithms.checks import at_least
from undrift.algorithms.fedprox import Proximal
from undrift.algorithms.stale import Stale
from undrift.core.errors import BadSetting
from undrift.core.vec import mean


@dataclass(frozen=True)
class StaleMixing(Stale, Server):
    """x_{t+1} = (1 - alpha_t) x_t + alpha_t x_new, with alpha_t = alpha s(t - tau) for an answer that began with x_tau.

    A round of several answers mixes in their mean, weighed by s, with the mean of their alpha_t.
    Differs: the staleness of an answer to the newest model is 0 as in the authors' code; in the paper it is 1 (`fresh=1`).
    """

    mixing_rate: float = 0.6  # alpha
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    a: float = 0.5  # the polynomial's exponent, or how steep the hinge is
    b: float = 4.0  # the hinge's staleness that costs nothing yet
    fresh: Literal[0, 1] = 0  # what is added to t - tau

    varies: ClassVar[tuple[str, ...]] = ()

    def discount(self, missed: Tensor) -> Tensor:
        missed = missed + self.fresh  # t - tau
        if self.staleness == "polynomial":
            return (missed + 1) ** -self.a
        if self.staleness == "hinge":
            return 1 / (self.a * (missed - self.b).clamp(min=0.0) + 1)
        return torch.ones_like(missed)

    def mixing(self, cohort: Cohort) -> Tensor:
        return self.mixing_rate * mean(self.scale(cohort), cohort.weight)  # alpha_t, [..., 1]

    def server_step(self, server: Nothing, x: Tensor, d: Tensor, up: State, cohort: Cohort) -> tuple[Tensor, Nothing]:
        began = x if cohort.start is None else mean(cohort.start, self.weigh(cohort).weight)
        new = began - d  # x_new
        return x + self.server_lr * self.mixing(cohort) * (new - x), server

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "a", "b")
        if not 0 < self.mixing_rate <= 1:
            raise BadSetting(f"mixing_rate must lie above 0 and at most at 1, not {self.mixing_rate}")


@dataclass(frozen=True)
class FedAsync(Proximal, StaleMixing):
    """Clients minimise f_i(x) + rho/2 |x - x_tau|^2 from x_tau, with rho the field `mu`."""

    mu: float = 0.1

    def remarks(self, rounds: int, cohort: int) -> list[str]:
        one = f"FedAsync mixes one model at a time; here it is the mean of {cohort}: give --cohort 1"
        return [*super().remarks(rounds, cohort), *([one] if cohort > 1 else [])]
