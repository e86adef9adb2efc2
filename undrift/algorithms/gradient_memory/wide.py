"""Inner products and combinations of a few long float32 vectors, in float64."""

from __future__ import annotations

from torch import Tensor

from undrift.core.forms import plain


@plain
def wide_products(vectors: Tensor) -> Tensor:
    """The inner products [..., k, k] of vectors [..., k, P].

    >>> import torch
    >>> wide_products(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    tensor([[5., 6.],
            [6., 9.]], dtype=torch.float64)
    """
    wide = vectors.double()
    return wide @ wide.mT


@plain
def wide_combination(share: Tensor, vectors: Tensor) -> Tensor:
    """share [..., 3] times the first three of the vectors [..., 4, P], added to the last one, in the vectors' dtype."""
    wide = vectors.double()
    return ((share.unsqueeze(-2) @ wide[..., :3, :]).squeeze(-2) + wide[..., 3, :]).to(vectors.dtype)
