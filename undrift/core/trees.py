"""States: nested NamedTuples whose leaves are tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

T = TypeVar("T")
State = Any  # a NamedTuple whose fields are tensors, or such NamedTuples again


class Nothing(NamedTuple):
    """A state with nothing in it."""


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


def unstacked(state: Any, clients: int) -> list[Any]:
    """A state [S, ...] as those of its clients."""
    return [map_leaves(lambda v, s=s: v[s], state) for s in range(clients)]


def named_leaves(name: str, state: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a state under dotted names, such as state.server.m."""
    if isinstance(state, Tensor):
        return [(name, state)]
    return [
        leaf for field, part in zip(state._fields, state, strict=True) for leaf in named_leaves(f"{name}.{field}", part)
    ]


def map_tagged(f: Callable[..., Tensor], state: T, *others: Any, tag: str = "") -> T:
    """The state with f(tensor, tag, *others' tensors) in place of each tensor.

    The tag is what the field's annotation says, as in `Annotated[Tensor, "model"]`, its own or that of a field above it.

    >>> from undrift.algorithms.base import Down
    >>> map_tagged(lambda t, tag: t + (tag == "model"), Down(torch.zeros(2)))
    Down(x=tensor([1., 1.]))
    """
    if isinstance(state, Tensor):
        return cast(T, f(state, tag, *others))
    parts = cast("tuple[Any, ...]", state)
    kind: Any = type(state)
    tags = field_tags(kind)
    each = zip(tags, *(cast("tuple[Any, ...]", s) for s in (parts, *others)), strict=True)
    return type(state)(*(map_tagged(f, *values, tag=own or tag) for own, *values in each))


@functools.cache
def field_tags(kind: Any) -> tuple[str, ...]:
    """What a NamedTuple's annotations say of each field; empty where they say nothing."""
    hints = get_type_hints(kind, include_extras=True)
    marks = [getattr(hints[field], "__metadata__", ("",))[0] for field in kind._fields]
    return tuple(mark if isinstance(mark, str) else "" for mark in marks)
