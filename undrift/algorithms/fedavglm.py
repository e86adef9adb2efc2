"""FedAvgLM: local momentum SGD whose buffers are averaged with the models.

Baseline of DOMO (Xu & Huang, AAAI 2022); as local SGD with momentum in Yu, Jin, Yang, ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, LocalData, LocalSGD, Nothing, Vec, Work
from undrift.algorithms.checks import needs_fresh_momentum
from undrift.algorithms.optimise.momentum import Momentum
from undrift.core.vec import mean


@dataclass(frozen=True)
class AveragedMomentum(LocalSGD):
    """b <- mu_l b + g_i(x_i^k), x_i^{k+1} = x_i^k - eta_l b; a round starts from the mean of the last round's buffers."""

    optimizer: str = "momentum"

    class Companion(NamedTuple):
        b: Vec

    class Down(NamedTuple):
        x: Vec
        b: Vec

    class Up(NamedTuple):
        d: Vec
        b: Vec

    def local_start(self, down: Down, client: Nothing, local: LocalData) -> Work:
        return super().local_start(down, client, local)._replace(opt=Momentum(down.b))

    def local_end(self, down: Down, client: Nothing, work: Work) -> tuple[Up, Nothing]:
        return self.Up(down.x - work.x, work.opt.b), client

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        return mean(up.d, cohort.weight), self.Companion(mean(up.b, cohort.weight))

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        needs_fresh_momentum(self)


@dataclass(frozen=True)
class FedAvgLM(AveragedMomentum, Average):
    """Averaged local momentum and a weighted mean."""
