"""DP-FTRL: follow the regularised leader, whose sum over all rounds needs little noise to be private.

Kairouz, McMahan, Song, Thakkar, Thakurta, Xu: Practical and Private (Deep) Learning without Sampling or Shuffling. ICML 2021,
Algorithm 1 with momentum (DP-FTRLM), for the clients of a federation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Cohort, LocalSGD, Server, Up
from undrift.algorithms.checks import at_least, below_one
from undrift.core.layout import Layout


@dataclass(frozen=True)
class FollowTheLeader(Server):
    """The server steps from where it began, along the sum of all directions since.

    With privacy, d brings the noise with it: that of s_t is the sum of at most log2(tree) + 1 nodes of a tree over the rounds.
    Differs: the paper completes a tree before the next begins; here the next begins from the model reached.
    """

    beta1: float = 0.9  # gamma
    tree: int = 1024  # rounds of a tree; then the sum begins anew

    varies: ClassVar[tuple[str, ...]] = ("beta1",)

    class State(NamedTuple):
        start: Tensor  # theta_0, the model with which the tree began
        s: Tensor
        v: Tensor
        t: Tensor  # [1] rounds of the tree so far

    def server_step(self, server: State, x: Tensor, d: Tensor, up: Up, cohort: Cohort) -> tuple[Tensor, State]:
        begins = server.t >= self.tree
        start = torch.where(begins, x, server.start)
        s, v, t = (torch.where(begins, 0.0, old) for old in server[1:])
        s = s + d  # s_t, the sum of the tree's rounds
        v = self.beta1 * v + s  # v_t = gamma v_{t-1} + s_t
        return start - self.server_lr * v, self.State(start, s, v, t + 1)  # theta_{t+1} = theta_0 - eta v_t

    @property
    def sums_over(self) -> int:
        return self.tree

    def server_init(self, x0: Tensor, clients: int, layout: Layout) -> State:
        zero = torch.zeros_like(x0)
        return self.State(zero, zero, zero, torch.full_like(x0[..., :1], self.tree))

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        below_one(self, "beta1")
        at_least(self, 1.0, "tree")


@dataclass(frozen=True)
class DPFTRL(LocalSGD, FollowTheLeader):
    """s_t = s_{t-1} + d;  v_t = gamma v_{t-1} + s_t;  x_{t+1} = x_0 - eta_g v_t."""
