"""States: nested NamedTuples whose leaves are tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from undrift.core.errors import BadSetting

T = TypeVar("T")
State = Any  # a NamedTuple whose fields are tensors, or such NamedTuples again


class Nothing(NamedTuple):
    """An empty state."""


def leaves(state: object) -> list[Tensor]:
    """The tensors of a state (nested NamedTuples), depth first."""
    if isinstance(state, Tensor):
        return [state]
    return [leaf for part in cast("tuple[object, ...]", state) for leaf in leaves(part)]


def map_leaves(f: Callable[..., Tensor], state: T, *others: T) -> T:
    """Apply f to each tensor of the state, together with the matching tensors of `others`.

    >>> from undrift.algorithms.base import Down
    >>> map_leaves(lambda t: t + 1, Down(torch.zeros(2)))
    Down(x=tensor([1., 1.]))
    """
    if isinstance(state, Tensor):
        return cast(T, f(state, *others))
    states = cast("tuple[tuple[object, ...], ...]", (state, *others))
    return type(state)(*(map_leaves(f, *each) for each in zip(*states, strict=True)))


def nbytes(state: object) -> int:
    """The size of a message in bytes, measured on its tensors."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(state))


def where(live: Tensor, new: T, old: T) -> T:
    """`new` for live clients [..., 1], `old` for the others."""
    return map_leaves(lambda n, o: torch.where(live, n, o), new, old)


def unstack(state: Any, clients: int) -> list[Any]:
    """Split a state [S, ...] into the states of its clients."""
    return [map_leaves(lambda v, s=s: v[s], state) for s in range(clients)]


def named_leaves(name: str, state: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a state under dotted names, such as state.server.m."""
    if isinstance(state, Tensor):
        return [(name, state)]
    fields = zip(state._fields, state, strict=True)
    return [leaf for field, part in fields for leaf in named_leaves(f"{name}.{field}", part)]


def map_tagged(f: Callable[..., Tensor], state: T, *others: Any, tag: str = "") -> T:
    """Replace each tensor of the state by f(tensor, tag, *tensors of others).

    The tag comes from the annotation of the field or of an enclosing field, such as `Annotated[Tensor, "model"]`.

    >>> from undrift.algorithms.base import Down
    >>> map_tagged(lambda t, tag: t + (tag == "model"), Down(torch.zeros(2)))
    Down(x=tensor([1., 1.]))
    """
    if isinstance(state, Tensor):
        return cast(T, f(state, tag, *others))
    states = cast("tuple[tuple[Any, ...], ...]", (state, *others))
    each = zip(field_tags(cast(Any, type(state))), *states, strict=True)
    return type(state)(*(map_tagged(f, *values, tag=own or tag) for own, *values in each))


@functools.cache
def field_tags(kind: Any) -> tuple[str, ...]:
    """The tag of each field of a NamedTuple; empty for a field without one."""
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise BadSetting(
            f"the annotations of {kind.__qualname__} cannot be read: {error}; import it in its file"
        ) from error
    marks = [getattr(hints[field], "__metadata__", ("",))[0] for field in kind._fields]
    return tuple(mark if isinstance(mark, str) else "" for mark in marks)
