"""Maths on vectors [..., P]: every reduction keeps the last dimension, so that its result meets vectors again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# One product of a vector with a matrix is made on one core; the pieces of a long mean on all of them.
LONG, PIECES = 1 << 16, 8


def dot(u: Tensor, v: Tensor) -> Tensor:
    """<u, v> as [..., 1].

    >>> dot(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([11.])
    """
    return (u * v).sum(-1, keepdim=True)


def norm(v: Tensor) -> Tensor:
    """|v| as [..., 1].

    >>> norm(torch.tensor([3.0, 4.0]))
    tensor([5.])
    """
    return v.square().sum(-1, keepdim=True).sqrt()


def mean(v: Tensor, weight: Tensor) -> Tensor:
    """The clients' weighted mean, [..., S, P] and [..., S, 1] to [..., P]; the weights add up to one.

    >>> mean(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([[0.5], [0.5]]))
    tensor([2., 4.])
    """
    if fuses(v):
        first, *more = (w * u for w, u in zip(weight.unbind(-2), v.unbind(-2), strict=True))
        return sum(more, start=first)
    if v.dim() == 2 and v.device.type == "cpu" and v.shape[-1] >= LONG and v.shape[-1] % PIECES == 0:
        pieces = v.unflatten(-1, (PIECES, -1)).transpose(0, 1)
        return torch.matmul(weight.T, pieces).flatten()
    return (weight.transpose(-1, -2) @ v).squeeze(-2)


def fuses(v: Tensor) -> bool:
    """Whether a mean is written as a sum, which a compiler puts into the kernels around it, as it does not do with a product."""
    return v.shape[-2] <= 16 and v.device.type == "cuda" and get_proxy_mode() is not None


def clip(v: Tensor, largest: float) -> Tensor:
    """v, shortened to the norm `largest` where it is longer (torch.nn.utils.clip_grad_norm_'s rule).

    >>> clip(torch.tensor([3.0, 4.0]), 10.0)
    tensor([3., 4.])
    """
    return v * (largest / (norm(v) + 1e-6)).clamp(max=1.0)


def descend(x: Tensor, rate: float | Tensor, u: Tensor) -> Tensor:
    """x - rate u, in one pass over memory.

    >>> descend(torch.tensor([1.0]), 0.5, torch.tensor([4.0]))
    tensor([-1.])
    """
    return torch.addcmul(x, rate, u, value=-1) if isinstance(rate, Tensor) else torch.sub(x, u, alpha=rate)
