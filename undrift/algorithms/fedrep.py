"""FedRep: in each round a client first fits its own last layer, and then the body that all share.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning. ICML 2021,
Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Down, GradientOracle
from undrift.algorithms.checks import at_least
from undrift.algorithms.kept_layers import KeptLayers
from undrift.core.errors import BadSetting
from undrift.core.layout import Layout, last_layer
from undrift.core.trees import where


@dataclass(frozen=True)
class HeadThenBody(KeptLayers):
    """The first head_steps local steps move the head alone, the others the body alone.

    Differs: steps are counted, not epochs; a client with at most head_steps steps in a round leaves the body as it is.
    """

    head_steps: int = 2  # tau, local steps of the head in a round

    def keeps(self, layout: Layout, like: Tensor) -> Tensor:
        return last_layer(layout, like)

    def local_step(
        self, down: Down, client: KeptLayers.Client, work: KeptLayers.Work, oracle: GradientOracle
    ) -> KeptLayers.Work:
        moving = torch.where(work.k < self.head_steps, work.kept, 1 - work.kept)
        work = work._replace(opt=where(work.k == self.head_steps, self.rest(work.x), work.opt))  # new for the body
        moved = self.move(work, moving * oracle.grad(work.x), oracle)
        return moved._replace(x=torch.where(moving > 0, moved.x, work.x))  # not decayed, nor carried on by momentum

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0, "head_steps")
        if self.keep_moments:
            raise BadSetting(
                f"{type(self).__name__} begins with new moments twice a round; leave keep_moments at false"
            )


@dataclass(frozen=True)
class FedRep(HeadThenBody, Average):
    """Heads, then bodies, and a weighted mean of the bodies."""
