"""Maths on vectors [..., P]: every reduction keeps the last dimension, so its result broadcasts against vectors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from undrift.core.forms import plain


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


@plain
def mean(v: Tensor, weight: Tensor) -> Tensor:
    """The weighted mean [..., P] of clients [..., S, P] with weights [..., S, 1] that add up to one.

    >>> mean(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([[0.5], [0.5]]))
    tensor([2., 4.])
    """
    return (weight.transpose(-1, -2) @ v).squeeze(-2)


@plain
def witness(v: Tensor, weight: Tensor) -> Tensor:
    """Numbers that are finite only if v [..., S, P] is: v itself, or its `mean` if that is computed anyway."""
    return v


def clip(v: Tensor, largest: float) -> Tensor:
    """v, scaled down to the norm `largest` if it is longer (the rule of torch.nn.utils.clip_grad_norm_).

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


def constant(values: tuple[Any, ...], other: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Nested tuples as a tensor on the device of `other`, cached because a CUDA graph cannot copy from the host.

    >>> constant((1.0, 2.0), torch.zeros(5))
    tensor([1., 2.])
    """
    return _constant(values, dtype, other.device)


@functools.cache
def _constant(values: tuple[Any, ...], dtype: torch.dtype | None, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def place_with(t: Tensor, other: Tensor) -> Tensor:
    """t, moved to where another tensor lies."""
    return t.to(other.device)


def positions(t: Tensor, dim: int) -> Tensor:
    """0, 1, 2, ... for each place along a dimension of t."""
    return first_numbers(t.shape[dim], t)


def first_numbers(n: int, like: Tensor) -> Tensor:
    """0, 1, ..., n - 1, for use with `like`."""
    return torch.arange(n, device=like.device)
