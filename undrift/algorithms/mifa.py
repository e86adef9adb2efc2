"""MIFA: the server reuses the last update of absent clients.

Gu, Huang, Zhang, Huang: Fast Federated Learning in the Presence of Arbitrary Device Unavailability. NeurIPS 2021; here
as in GradMA's Algorithm 6 (Luo et al., CVPR 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Down, LocalSGD, Up, Vec, Work
from undrift.algorithms.personal import put
from undrift.core.vec import mean


@dataclass(frozen=True)
class LastUpdates(LocalSGD):
    """A client sends the difference between its update and its last one; D is the mean of all clients' last updates.

    Differs: the repository's main variant waits until every client has answered once (`wait=true`); the updates are kept
    in parameter units, not divided by the rate.
    """

    wait: bool = False
    sends_updates: ClassVar[bool] = False

    class Companion(NamedTuple):
        D: Vec  # (1/N) sum of G_i
        seen: Tensor  # [N, 1] 1 for clients that have answered; [0, 1] unless `wait`

    class Client(NamedTuple):
        G: Tensor  # the last update, 0 before the first

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(torch.zeros_like(x0), x0.new_zeros(clients if self.wait else 0, 1))

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        G = down.x - work.x
        return Up(G - client.G), self.Client(G)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        D = companion.D + cohort.size / cohort.total * mean(up.d, cohort.uniform)  # D <- D + (1/N) sum of the answers
        if not self.wait:
            return D, companion._replace(D=D)
        seen = put(companion.seen, torch.ones_like(cohort.weight), cohort)
        return D * seen.amin(-2), self.Companion(D, seen)


@dataclass(frozen=True)
class MIFA(LastUpdates, Average):
    """x_{t+1} = x_t - eta_g D."""
