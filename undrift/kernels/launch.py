"""Launching Triton's kernels, and compiling those of a whole program side by side before anything is launched.

Triton compiles a kernel when it is first launched, so that one waits for the other: GradMA on LeNet-5 needs thirteen, ten seconds
of a machine's first run. Most of it is spent in Triton's compiler, the GPU's assembler and a C compiler, none of which holds
Python up. In a rehearsal a program is run without its kernels, whose outputs are then zeros: it finds out which ones there are,
and all cores compile them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Rehearsal:
    """The kernels asked for so far, which are being compiled."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.cuda.current_device() if device.index is None else device.index
        self.pool = ThreadPoolExecutor(os.cpu_count())
        self.asked: set[Any] = set()

    def ask(self, kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        names = kernel.params[: len(given)]
        given = tuple(like(value, name.do_not_specialize) for value, name in zip(given, names, strict=True))
        key = kernel, given, tuple(sizes.items())
        if key not in self.asked:
            self.asked.add(key)
            self.pool.submit(self.make, kernel, grid, given, sizes)

    def make(self, kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        with torch.cuda.device(self.device):
            made = kernel.warmup(*given, grid=grid, **sizes)
            _ = made.run  # loads it, with the C that launches it


class Silence(Rehearsal):
    """Nothing is compiled either."""

    def __init__(self) -> None:
        pass

    def ask(self, kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        pass


current: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **sizes: Any) -> None:
    """kernel[grid](*given, **sizes)"""
    rehearsed = current.get()
    if rehearsed is None:
        kernel[grid](*given, **sizes)
    else:
        rehearsed.ask(kernel, grid, given, sizes)


def room(beside: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor for what a kernel makes. In a rehearsal nothing is made, and what goes on with it finds zeros: finite numbers, and
    indices that are valid."""
    make = beside.new_empty if current.get() is None else beside.new_zeros
    return make(shape, dtype=dtype or beside.dtype)


@contextlib.contextmanager
def rehearsal(device: torch.device) -> Iterator[None]:
    """Within it kernels are compiled for a GPU instead of being launched; when it is left, all of them are ready.

    One that cannot be compiled fails where it is launched.
    """
    if device.type != "cuda":
        yield
        return
    mine = Rehearsal(device)
    try:
        with joined(mine):
            yield
    finally:
        mine.pool.shutdown()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Within it kernels are neither launched nor compiled, and what they would make is zero."""
    with joined(Silence()):
        yield


@contextlib.contextmanager
def joined(rehearsal: Rehearsal | None) -> Iterator[None]:
    """Within it this thread takes part: PyTorch runs a GPU's backward pass in a thread of its own, which has to be told."""
    before = current.set(rehearsal)
    try:
        yield
    finally:
        current.reset(before)


@dataclass(frozen=True)
class Pointer:
    """What Triton asks of a tensor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def like(value: Any, any_size: bool = False) -> Any:
    """The same for all arguments for which Triton makes one kernel: it looks whether they are 1, multiples of 16, or long.

    >>> like(1), like(48), like(7), like(7 << 40), like(48, any_size=True)
    (1, 16, 17, 4294967312, 17)
    """
    if isinstance(value, Tensor):
        return Pointer(value.dtype, 16 if value.data_ptr() % 16 == 0 else 4)
    if isinstance(value, tuple):
        return tuple(like(each, any_size) for each in value)
    if type(value) is int:
        kind = 17 if any_size else 1 if value == 1 else 16 if value % 16 == 0 else 17
        return kind if -(1 << 31) <= value < 1 << 31 else (1 << 32) + kind
    return value
