"""FedBABU: FedAvg of the body under a head that stays as it was drawn; then every client fine-tunes.

Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from undrift.algorithms.base import Average, Down, GradientOracle
from undrift.algorithms.ft import FineTuning
from undrift.core.layout import last_layer


@dataclass(frozen=True)
class FrozenHead(FineTuning):
    """Rounds 0 .. begin - 1 train all but the last layer; afterwards each client trains its last layer, or all, alone."""

    tunes: Literal["head", "all"] = "head"  # what is fine-tuned

    def local_step(
        self, down: Down, client: FineTuning.Client, work: FineTuning.Work, oracle: GradientOracle
    ) -> FineTuning.Work:
        if self.phase:
            oracle.buffers = work.buffers
        head = last_layer(oracle.layout, work.x)
        moving = torch.ones_like(head) if self.phase and self.tunes == "all" else head if self.phase else 1 - head
        moved = self.move(work, moving * oracle.grad(work.x), oracle)
        x = torch.where(moving > 0, moved.x, work.x)  # what stands still is not decayed either
        return moved._replace(x=x, buffers=oracle.buffers)


@dataclass(frozen=True)
class FedBABU(FrozenHead, Average):
    """Body alone, then fine-tuning."""
