"""Launch Triton kernels, and compile the kernels of a whole program in parallel before its first launch.

Triton compiles kernels one by one at their first launch: GradMA's thirteen on LeNet-5 take ten seconds. A rehearsal runs a
program with zeros for its kernels' outputs, collects the kernels and compiles them on all cores (compilers release the lock).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import triton as triton

    tl = triton.language
except ImportError:  # without Triton the plain forms serve
    triton = tl = None


def only_stacked() -> bool:
    """Whether vmap is the only active transform: torch.func.grad and jvp inside a model would bypass the operator."""
    levels = torch._C._functorch.get_interpreter_stack() or []
    under_vmap = all(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)
    return under_vmap and torch.autograd.forward_ad._current_level < 0


def clients_first(info: Any, dims: Any, *given: Tensor | None) -> list[Any]:
    """The arguments of an operator under vmap with the clients as their first dimension."""
    return [
        t if t is None else t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(given, dims[: len(given)], strict=True)
    ]


class Rehearsal:
    """The kernels requested so far, which are being compiled."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.cuda.current_device() if device.index is None else device.index
        self.pool = ThreadPoolExecutor(os.cpu_count())
        self.asked: set[Any] = set()

    def ask(self, kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        names = kernel.params[: len(given)]
        given = tuple(specialise(value, name.do_not_specialize) for value, name in zip(given, names, strict=True))
        key = kernel, given, tuple(sizes.items())
        if key not in self.asked:
            self.asked.add(key)
            self.pool.submit(self.make, kernel, grid, given, sizes)

    def make(self, kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        with torch.cuda.device(self.device):
            _ = kernel.warmup(*given, grid=grid, **sizes).run  # loads the kernel and the C code that launches it


current: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **sizes: Any) -> None:
    """kernel[grid](*given, **sizes)"""
    if (active := current.get()) is None:
        kernel[grid](*given, **sizes)
    else:
        active.ask(kernel, grid, given, sizes)


@functools.cache
def streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(count)]


def side_by_side(count: int, branches: int, device: torch.device, run: Callable[[int], None]) -> None:
    """run(0), run(1), ... on some streams in turn, which begin after and end before what else the current stream does.

    Recorded as a graph they are its branches. Tensors may cross: a stream takes memory again only after the next such begin.
    """
    if device.type != "cuda":
        for number in range(count):
            run(number)
        return
    main, sides = torch.cuda.current_stream(device), streams(device, min(branches, count))
    for side in sides:
        side.wait_stream(main)
    for number in range(count):
        with torch.cuda.stream(sides[number % len(sides)]):
            run(number)
    for side in sides:
        main.wait_stream(side)


def allocate(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor for the output of a kernel; in a rehearsal zeros, which are finite numbers and valid indices."""
    new = like.new_empty if current.get() is None else like.new_zeros
    return new(shape, dtype=dtype or like.dtype)


@contextlib.contextmanager
def rehearsal(device: torch.device) -> Iterator[None]:
    """Compile kernels instead of launching them; all are ready at the end. One that fails to compile fails at its launch."""
    if device.type != "cuda":
        yield
        return
    new = Rehearsal(device)
    with new.pool, take_part(new):
        yield


@contextlib.contextmanager
def take_part(rehearsal: Rehearsal | None) -> Iterator[None]:
    """Let this thread take part in a rehearsal: PyTorch runs the backward pass of a GPU in another thread."""
    before = current.set(rehearsal)
    try:
        yield
    finally:
        current.reset(before)


@dataclass(frozen=True)
class Pointer:
    """The properties of a tensor that Triton specialises on."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def specialise(value: Any, any_size: bool = False) -> Any:
    """A representative of all arguments that share a kernel: Triton distinguishes 1, multiples of 16, and 64-bit integers.

    >>> specialise(1), specialise(48), specialise(7), specialise(7 << 40), specialise(48, any_size=True)
    (1, 16, 17, 4294967312, 17)
    """
    if isinstance(value, Tensor):
        return Pointer(value.dtype, 16 if value.data_ptr() % 16 == 0 else 4)
    if isinstance(value, tuple):
        return tuple(specialise(each, any_size) for each in value)
    if type(value) is int:
        kind = 17 if any_size else 1 if value == 1 else 16 if value % 16 == 0 else 17
        return kind if -(1 << 31) <= value < 1 << 31 else (1 << 32) + kind
    return value
