"""RoLoRA: of every adapter B A one round trains B under a common A, and the next one A under a common B.

Chen, Guo, Ju, Dalal, Zhu, Khisti: Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA. NeurIPS 2025.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Down, GradientOracle, LocalData, State, Worker
from undrift.algorithms.personal import stand_still
from undrift.core.layout import places_without
from undrift.core.vec import mean


@dataclass(frozen=True)
class AlternatingFactors(Worker):
    """Clients change one factor of each adapter, and what is in no adapter, and send that alone.

    The other factor is the same for all, so the mean of the products B_i A_i is the product of the means.
    """

    phase: int = 0  # 0: B is trained; 1: A. Set by the run

    sends_updates: ClassVar[bool] = False  # only a part of it

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        places: Tensor  # [..., n] of what is trained

    class UpB(NamedTuple):
        B: Tensor  # [..., n] the update of B, and of what is in no adapter

    class UpA(NamedTuple):
        A: Tensor

    def at(self, t: int) -> AlternatingFactors:
        return replace(self, phase=t % 2)  # B first: it begins as zero, where A has no gradient

    def remarks(self, rounds: int, cohort: int) -> list[str]:
        return []

    @property
    def fixed(self) -> str:
        return "B" if self.phase else "A"

    def local_start(self, down: Down, client: State, local: LocalData) -> Work:
        places = places_without(local.layout, self.fixed, down.x)
        work = super().local_start(down, client, local)
        return work._replace(places=places.expand(*down.x.shape[:-1], len(places)))

    def local_step(self, down: Down, client: State, work: Work, oracle: GradientOracle) -> Work:
        moving = torch.zeros_like(work.x).scatter(-1, work.places, 1.0)
        moved = self.move(work, moving * oracle.grad(work.x), oracle)
        return moved._replace(x=torch.where(moving > 0, moved.x, work.x))  # what stands still is not decayed either

    def local_end(self, down: Down, client: State, work: Work) -> tuple[State, State]:
        part = (down.x - work.x).gather(-1, work.places)
        return (self.UpA(part) if self.phase else self.UpB(part)), client

    def gather(self, companion: State, up: State, cohort: Cohort) -> tuple[Tensor, State]:
        d = stand_still(cohort)
        part = mean(up[0], cohort.weight)  # the mean of the factor that moves
        places = places_without(cohort.layout, self.fixed, d).expand(part.shape)
        return d.scatter(-1, places, part), companion


@dataclass(frozen=True)
class RoLoRA(AlternatingFactors, Average):
    """B_{t+1} = mean of B_i under A_t in rounds 1, 3, ...;  A_{t+1} = mean of A_i under B_t in rounds 2, 4, ..."""
