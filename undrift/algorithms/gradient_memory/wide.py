"""Vectors in float64: inner products and combinations of a few long ones, and lengths that can be squared."""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.core.forms import plain

EXPONENT = 0x7FF << 52  # the bits of a float64's exponent


@plain
def wide_products(vectors: Tensor) -> Tensor:
    """The inner products [..., k, k] of vectors [..., k, P].

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


def rescale(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [..., P] in float64, each divided by a power of two so that its largest entry is about 1; also the powers [..., 1].

    Nothing is rounded. A vector that is not finite stays as it is.

    >>> rescale(torch.tensor([0.0, 5.0]))
    (tensor([0.0000, 1.2500], dtype=torch.float64), tensor([4.], dtype=torch.float64))
    """
    wide = vectors.double()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    power = (largest.view(torch.int64) & EXPONENT).view(torch.float64)
    power = torch.where(power.isfinite(), power, 1.0)
    return wide / power, power
