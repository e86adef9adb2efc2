"""Optional functions of a server part that weighs answers by how old the model is that they began with.

Their defaults weigh no answer otherwise than the cohort does. See `fedbuff.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from undrift.algorithms.checks import Checked

if TYPE_CHECKING:
    from undrift.algorithms.base import Cohort


class Weighing(Checked):
    """How a server part weighs answers."""

    weighs_staleness: ClassVar[bool] = False

    def weigh(self, cohort: Cohort) -> Cohort:
        """The cohort as the worker part adds its answers up: with other weights, which add up to one."""
        return cohort

    def mixing(self, cohort: Cohort) -> float | Tensor:
        """How far BatchNorm's statistics go towards the mean of the answers': a number, or [..., 1]."""
        return 1.0


class Stale(Weighing):
    """A server part whose answers count the less, the older the model is that they began with."""

    weighs_staleness: ClassVar[bool] = True

    def discount(self, missed: Tensor) -> Tensor:
        """s of answers [..., S, 1] that have missed so many server steps."""
        raise NotImplementedError

    def scale(self, cohort: Cohort) -> Tensor:
        """s of each answer, [..., S, 1]."""
        return self.discount(torch.zeros_like(cohort.weight) if cohort.staleness is None else cohort.staleness)

    def weigh(self, cohort: Cohort) -> Cohort:
        share = cohort.weight * self.scale(cohort)
        return cohort._replace(weight=share / share.sum(-2, keepdim=True))
