"""MIFA: the server goes on with the last update of clients that are absent.

Gu, Huang, Zhang, Huang: Fast Federated Learning in the Presence of Arbitrary Device Unavailability. NeurIPS 2021; here
as in GradMA's Algorithm 6 (Luo et al., CVPR 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, LocalSGD, Up, Work
from undrift.core.vec import mean


@dataclass(frozen=True)
class LastUpdates(LocalSGD):
    """A client sends the difference of its update from its last one; D is the mean of everybody's last updates.

    Differs: the repository's main variant waits until every client has answered once (`wait=true`); the updates are kept
    in parameter units, not divided by the rate.
    """

    wait: bool = False
    sends_updates: ClassVar[bool] = False

    class Companion(NamedTuple):
        D: Tensor  # (1/N) sum of G_i
        seen: Tensor  # [N] who has answered so far; empty unless `wait`

    class Client(NamedTuple):
        G: Tensor  # the last update, 0 before the first

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(
            torch.zeros_like(x0), torch.zeros(clients if self.wait else 0, dtype=torch.bool, device=x0.device)
        )

    def client_init(self, down: Any, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(torch.zeros_like(down.x))

    def local_end(self, down: Any, client: Client, work: Work) -> tuple[Up, Client]:
        G = down.x - work.x
        return Up(G - client.G), self.Client(G)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        D = companion.D + cohort.size / cohort.total * mean(up.d, cohort.uniform)  # D <- D + (1/N) sum of what came
        seen = companion.seen.index_fill(0, cohort.ids, True) if self.wait else companion.seen
        return D * seen.all() if self.wait else D, self.Companion(D, seen)


@dataclass(frozen=True)
class MIFA(LastUpdates, Average):
    """x_{t+1} = x_t - eta_g D."""

    paper: ClassVar[str] = """@inproceedings{gu2021mifa,
  title     = {Fast Federated Learning in the Presence of Arbitrary Device Unavailability},
  author    = {Gu, Xinran and Huang, Kaixuan and Zhang, Jingzhao and Huang, Longbo},
  booktitle = {NeurIPS},
  year      = {2021}
}"""
