"""Mime: MimeLite with local gradients corrected by the cohort's full gradient.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Breaking the Centralized Barrier for Cross-Device Federated
Learning. NeurIPS 2021, with momentum SGD as the base optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Up, Work
from undrift.algorithms.mimelite import FrozenMomentum, MimeLite
from undrift.core.vec import mean
from undrift.oracle.oracle import GradientOracle


@dataclass(frozen=True)
class CorrectedMomentum(FrozenMomentum):
    """Two exchanges: the clients send grad f_i(x_t), then they train with its mean c."""

    measures: ClassVar[bool] = True

    class Companion(NamedTuple):
        m: Tensor
        c: Tensor  # the cohort's mean full gradient at x_t

    class Down(NamedTuple):
        x: Tensor
        m: Tensor
        c: Tensor

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(torch.zeros_like(x0), torch.zeros_like(x0))

    def measured(self, companion: Companion, sent: Tensor, invited: Cohort) -> Companion:
        return self.Companion(companion.m, mean(sent, invited.weight))

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> Down:
        return self.Down(x, companion.m, companion.c)

    def local_step(self, down: Down, client: Any, work: Work, oracle: GradientOracle) -> Any:
        here, there = oracle.grads(work.x, down.x)  # on one mini-batch: g_i(x_i^k) - g_i(x_t) + c
        return self.move(work, self.mixed(here - there + down.c, down.m), oracle)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        m = self.mixed(companion.c, companion.m)  # m_{t+1} = (1 - beta) c + beta m_t
        return mean(up.d, cohort.weight), self.Companion(m, companion.c)


@dataclass(frozen=True)
class Mime(CorrectedMomentum, Average):
    """Frozen server momentum, corrected local gradients, and a weighted mean."""

    paper: ClassVar[str] = MimeLite.paper
