"""FedVARP: the last updates of absent clients reduce the variance of a cohort's mean.

Jhunjhunwala, Sharma, Nagarkatti, Joshi: FedVARP: Tackling the Variance Due to Partial Client Participation in Federated
Learning. UAI 2022, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Down, LocalSGD, Up, Vec, Work
from undrift.core.vec import mean


@dataclass(frozen=True)
class ReducedVariance(LocalSGD):
    """d = mean_S (d_i - y_i) + mean_all y_j; then y_i <- d_i for i in S.

    Differs: each client keeps its own y_i and sends d_i - y_i, and the server keeps the mean of all, which is the same with less
    memory; updates are kept in parameter units, not divided by the rate.
    """

    sends_updates: ClassVar[bool] = False

    class Companion(NamedTuple):
        y: Vec  # (1/N) sum of y_j over all clients

    class Client(NamedTuple):
        y: Tensor  # the last update, 0 before the first

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        d = down.x - work.x
        return Up(d - client.y), self.Client(d)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        news = mean(up.d, cohort.uniform)  # mean_S (d_i - y_i)
        return news + companion.y, self.Companion(companion.y + cohort.size / cohort.total * news)


@dataclass(frozen=True)
class FedVARP(ReducedVariance, Average):
    """x_{t+1} = x_t - eta_g d."""
