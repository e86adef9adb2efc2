"""Ensemble: the models first, and then, in extra rounds, a network that weighs their predictions for each sample.

Xu, Li, Guo, Yang, Roth, Hatamizadeh, Zhao, Xu, Huang, Xu: Closing the Generalization Gap of Cross-silo Federated Medical
Image Segmentation. CVPR 2022, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from undrift.algorithms.base import Average
from undrift.algorithms.fedsm_extra import ThenSelector
from undrift.oracle.oracle import View


@dataclass(frozen=True)
class Weighed(ThenSelector):
    """The same rounds; the network minimises L(sum_k y_k h_k, y), with y the softmax of its outputs and h_k probabilities."""

    chooses: ClassVar[str] = "mix"

    @staticmethod
    def score_models(model: View, h: Tensor, targets: Tensor) -> Tensor:
        """[B, (N + 1) ...] each model's probabilities."""
        each = targets.repeat_interleave(h.shape[1], 0)
        return model.probabilities(h.flatten(0, 1), each).reshape(len(h), -1)

    @staticmethod
    def objective(model: View, s: Tensor, inputs: Tensor, targets: Tensor, known: Tensor) -> Tensor:
        weight = model(s, inputs).softmax(-1)  # [B, N + 1]
        h = known.view(*weight.shape, -1, *targets.shape[1:])
        mixed = (weight.view(*weight.shape, *(1,) * (h.dim() - 2)) * h).sum(1)
        return model.mixed_loss(mixed, targets)


@dataclass(frozen=True)
class Ensemble(Weighed, Average):
    """Models first, their mixture afterwards."""
