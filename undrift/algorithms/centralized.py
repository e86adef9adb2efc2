"""Centralized: all samples in one place, the upper bound of what a federation can reach.

Xu: New Efficient and Privacy-Preserving Methods for Distributed Training. PhD thesis, University of Pittsburgh, 2023, chapter 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from undrift.algorithms.base import Average, LocalSGD


@dataclass(frozen=True)
class Pooled(LocalSGD):
    """Plain steps of one client that holds all samples."""

    keep_moments: bool = True

    pools: ClassVar[bool] = True


@dataclass(frozen=True)
class Centralized(Pooled, Average):
    """x <- x - eta_l g(x) on mini-batches of everything."""
