"""Maths on vectors [..., P]: every reduction keeps the last dimension, so that its result meets vectors again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

T = TypeVar("T")

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


def leaves(state: object) -> list[Tensor]:
    """The tensors of a state (nested NamedTuples), depth first."""
    if isinstance(state, Tensor):
        return [state]
    return [leaf for part in cast("tuple[object, ...]", state) for leaf in leaves(part)]


def map_leaves(f: Callable[..., Tensor], state: T, *others: T) -> T:
    """The state with f applied to each tensor (and to the tensors in its place in `others`).

    >>> from undrift.algorithms.base import Down
    >>> map_leaves(lambda t: t + 1, Down(torch.zeros(2)))
    Down(x=tensor([1., 1.]))
    """
    if isinstance(state, Tensor):
        return cast(T, f(state, *others))
    parts = [
        map_leaves(f, *each) for each in zip(*(cast("tuple[object, ...]", s) for s in (state, *others)), strict=True)
    ]
    return type(state)(*parts)


def nbytes(state: object) -> int:
    """The bytes of a message, measured on the tensors that are handed over."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(state))


def where(live: Tensor, new: T, old: T) -> T:
    """`new` for the clients that are live [..., 1], `old` for the others."""
    return map_leaves(lambda n, o: torch.where(live, n, o), new, old)
