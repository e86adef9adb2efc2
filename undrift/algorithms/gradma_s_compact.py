"""GradMA-S-compact: GradMA-S whose memory takes an eleventh of the space.

Ours. The method is that of Luo, Li, Lan, Gao: GradMA, CVPR 2023, Algorithms 3, 4 and 8; only the remembered updates are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from undrift.algorithms.base import LocalSGD
from undrift.algorithms.gradient_memory.packed import PackedMemory
from undrift.algorithms.gradma_s import ServerMemory


@dataclass(frozen=True)
class CompactMemory(ServerMemory):
    """D[i] is kept in five levels an entry, and each block of 96 entries has a scale."""

    remembers: ClassVar[type[PackedMemory]] = PackedMemory


@dataclass(frozen=True)
class GradMASCompact(LocalSGD, CompactMemory):
    """Local SGD on the clients; momentum, a packed memory and projection on the server."""
