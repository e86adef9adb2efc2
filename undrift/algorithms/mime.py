"""Mime: MimeLite with local gradients corrected by the cohort's full gradient.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Breaking the Centralized Barrier for Cross-Device Federated
Learning. NeurIPS 2021, with momentum SGD as the base optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, GradientOracle, Nothing, Up, Vec, Work
from undrift.algorithms.mimelite import FrozenMomentum
from undrift.core.vec import mean


@dataclass(frozen=True)
class CorrectedMomentum(FrozenMomentum):
    """Two exchanges: the clients send grad f_i(x_t), then they train with its mean c."""

    measures: ClassVar[bool] = True

    class Companion(NamedTuple):
        m: Vec
        c: Vec  # the cohort's mean full gradient at x_t

    class Down(NamedTuple):
        x: Vec
        m: Vec
        c: Vec

    def gather_measured(self, companion: Companion, sent: Tensor, invited: Cohort) -> Companion:
        return self.Companion(companion.m, mean(sent, invited.weight))

    def local_step(self, down: Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        here, there = oracle.grads(work.x, down.x)  # on one mini-batch: g_i(x_i^k) - g_i(x_t) + c
        return self.move(work, self.mix(here - there + down.c, down.m), oracle)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        m = self.mix(companion.c, companion.m)  # m_{t+1} = (1 - beta) c + beta m_t
        return mean(up.d, cohort.weight), self.Companion(m, companion.c)


@dataclass(frozen=True)
class Mime(CorrectedMomentum, Average):
    """Frozen server momentum, corrected local gradients, and a weighted mean."""
