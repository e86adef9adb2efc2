"""FedExP: the server steps further along the mean update the more the clients' updates disagree.

Jhunjhunwala, Wang, Joshi: FedExP: Speeding Up Federated Averaging via Extrapolation. ICLR 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Cohort, LocalSGD, Server, Up
from undrift.algorithms.checks import above
from undrift.core.layout import Layout
from undrift.core.vec import dot, mean


@dataclass(frozen=True)
class Extrapolation(Server):
    """x_{t+1} = x_t - eta_g e d with e = max(1, sum_i w_i |d_i|^2 / (2 (|d|^2 + eps))).

    Differs: the authors' code multiplies eps by the size of the cohort and lets it decay with the squared local rate; the paper
    tests the mean of the last two models, and here the last one is tested.
    """

    eps: float = 1e-3

    needs_single_updates: ClassVar[bool] = True
    varies: ClassVar[tuple[str, ...]] = ("eps",)

    class State(NamedTuple):
        e: Tensor  # [1] the last round's extrapolation

    def server_init(self, x0: Tensor, clients: int, layout: Layout) -> State:
        return self.State(torch.ones_like(x0[..., :1]))

    def server_step(self, server: State, x: Tensor, d: Tensor, up: Up, cohort: Cohort) -> tuple[Tensor, State]:
        lengths = mean(dot(up.d, up.d), cohort.weight)  # sum_i w_i |d_i|^2
        e = (lengths / (2 * (dot(d, d) + self.eps))).clamp(min=1.0)
        return x - self.server_lr * e * d, self.State(e)

    def facts(self, server: State) -> dict[str, Tensor]:
        return {"extrapolation": server.e}

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        above(self, 0.0, "eps")


@dataclass(frozen=True)
class FedExP(LocalSGD, Extrapolation):
    """Local SGD on the clients, extrapolation on the server."""
