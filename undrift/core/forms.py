"""Dispatch from plain functions to their faster forms.

A `plain` function is readable PyTorch for any device and dtype. A faster form equals it up to rounding and registers itself with
`faster` and a condition on the arguments. Within `plain_forms()` only plain functions run. `watch()` reports what ran: a function
that decides by values cannot be recorded, one that writes into its arguments must not be compiled, and one that could not solve
its problem reports a `doubt`.

>>> @plain
... def double(x: int) -> int:
...     return 2 * x
>>> @faster(double, when=lambda x: x > 10)
... def shift(x: int) -> int:
...     return x << 1
>>> double(3), double.choose(3).__name__, double.choose(30).__name__
(6, 'double', 'shift')
>>> with plain_forms():
...     double.choose(30).__name__
'double'
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, TypeVar, overload

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Seen:
    """What ran inside a `watch` block."""

    by_value: bool = False  # a plain function that decides by values
    in_place: bool = False  # a function that writes into its arguments
    doubts: list[Tensor] = field(default_factory=list)  # bool [...] each, True where a problem was not solved


_watchers: ContextVar[tuple[Seen, ...]] = ContextVar("watchers", default=())
_lock = threading.Lock()
_plain_only = 0  # how many `plain_forms` are open, in all threads


class Form(Generic[P, R]):
    """A plain function and its faster forms. A call runs the first form whose condition holds."""

    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R], by_value: bool = False, in_place: bool = False) -> None:
        functools.update_wrapper(self, function)
        self.plain = function
        self.by_value, self.in_place, self.marked = by_value, in_place, by_value or in_place
        self.forms: list[tuple[Callable[P, bool], Callable[P, R]]] = []

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        form = self.plain
        if not _plain_only:
            for when, other in self.forms:  # `choose`, inlined to save a call in every local step
                if when(*args, **kwargs):
                    form = other
                    break
        if self.marked:
            for seen in _watchers.get():
                seen.in_place |= self.in_place
                seen.by_value |= self.by_value and form is self.plain
        return form(*args, **kwargs)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Callable[P, R]:
        """Return the form that a call with these arguments runs."""
        if not _plain_only:
            for when, form in self.forms:
                if when(*args, **kwargs):
                    return form
        return self.plain


@overload
def plain(function: Callable[P, R], /) -> Form[P, R]: ...
@overload
def plain(*, by_value: bool = False, in_place: bool = False) -> Callable[[Callable[P, R]], Form[P, R]]: ...


def plain(
    function: Callable[P, R] | None = None, /, *, by_value: bool = False, in_place: bool = False
) -> Form[P, R] | Callable[[Callable[P, R]], Form[P, R]]:
    """Mark a function that may have faster forms. `by_value`: it decides by values. `in_place`: it writes into its arguments."""
    if function is not None:
        return Form(function)
    return lambda function: Form(function, by_value, in_place)


def faster(of: Form[P, R], when: Callable[P, bool]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as a faster form of `of` for arguments with `when`; earlier forms come first."""

    def register(form: Callable[P, R]) -> Callable[P, R]:
        of.forms.append((when, form))
        return form

    return register


@contextlib.contextmanager
def plain_forms(wanted: bool = True) -> Iterator[None]:
    """Run only plain functions, in every thread, if that is wanted."""
    global _plain_only
    with _lock:
        _plain_only += wanted
    try:
        yield
    finally:
        with _lock:
            _plain_only -= wanted


@contextlib.contextmanager
def watch() -> Iterator[Seen]:
    """Record what runs in this thread; outer watchers record it too."""
    seen = Seen()
    before = _watchers.set((*_watchers.get(), seen))
    try:
        yield seen
    finally:
        _watchers.reset(before)


def doubt(flag: Tensor) -> bool:
    """Report to all watchers where [...] a problem was not solved; False where nobody watches: then it must be solved now."""
    for seen in _watchers.get():
        seen.doubts.append(flag)
    return bool(_watchers.get())
