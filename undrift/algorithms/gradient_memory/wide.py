"""Passes over four long float32 vectors in float64: all their inner products, and a combination of them.

On a CPU block by block, so that what is widened stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 1 << 14  # entries widened at a time on a CPU


def inner_products(vectors: Tensor) -> Tensor:
    """[..., k, k] for vectors [..., k, P].

    >>> inner_products(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    tensor([[5., 6.],
            [6., 9.]], dtype=torch.float64)
    """
    return torch.stack([v @ v.mT for v in widened(vectors)]).sum(0)


def combination(share: Tensor, vectors: Tensor) -> Tensor:
    """share [..., 3] times the first three of the vectors [..., 4, P], added to the last one, in the vectors' dtype."""
    parts = [(share.unsqueeze(-2) @ v[..., :3, :]).squeeze(-2) + v[..., 3, :] for v in widened(vectors)]
    return torch.cat(parts, -1).to(vectors.dtype)


def widened(vectors: Tensor) -> Iterator[Tensor]:
    """The vectors [..., P] in float64, block after block on a CPU."""
    blocks = vectors.split(BLOCK, -1) if vectors.device.type == "cpu" else [vectors]
    return (block.double() for block in blocks)
