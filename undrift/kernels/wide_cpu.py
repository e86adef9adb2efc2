"""Passes over long float32 vectors in float64 on a CPU, in blocks whose float64 copies fit the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from undrift.algorithms.gradient_memory.wide import wide_combination, wide_products
from undrift.core.forms import faster
from undrift.kernels import devices

BLOCK = 1 << 14  # entries in a block


@faster(wide_products, when=lambda vectors: devices.cpu(vectors.device))
def wide_products_cpu(vectors: Tensor) -> Tensor:
    return torch.stack([v @ v.mT for v in blocks(vectors)]).sum(0)


@faster(wide_combination, when=lambda share, vectors: devices.cpu(vectors.device))
def wide_combination_cpu(share: Tensor, vectors: Tensor) -> Tensor:
    parts = [(share.unsqueeze(-2) @ v[..., :3, :]).squeeze(-2) + v[..., 3, :] for v in blocks(vectors)]
    return torch.cat(parts, -1).to(vectors.dtype)


def blocks(vectors: Tensor) -> Iterator[Tensor]:
    """The blocks of vectors [..., P], in float64."""
    return (block.double() for block in vectors.split(BLOCK, -1))
