"""Launching Triton's kernels, and compiling those of a whole program side by side before anything is launched.

Triton compiles a kernel when it is first launched, so that one waits for the other: GradMA on LeNet-5 needs thirteen, ten seconds
of a machine's first run. Most of it is spent in Triton's compiler, the GPU's assembler and a C compiler, none of which holds
Python up. In a rehearsal a program is run without its kernels, whose outputs then hold anything: it finds out which ones there
are, and all cores compile them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class Rehearsal:
    """The kernels asked for so far, each with its compilation."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.cuda.current_device() if device.index is None else device.index
        self.pool = ThreadPoolExecutor(os.cpu_count())
        self.asked: dict[Any, Future[Any]] = {}

    def ask(self, kernel: Any, grid: Any, given: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        key = kernel, tuple(map(form, given)), tuple(sizes.items())
        if key not in self.asked:
            self.asked[key] = self.pool.submit(self.make, kernel, grid, given, sizes)

    def make(self, kernel: Any, grid: Any, given: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        with torch.cuda.device(self.device):
            made = kernel.warmup(*given, grid=grid, **sizes)
            _ = made.run  # loads it, with the C that launches it


current: Rehearsal | None = None  # for all threads, because PyTorch runs a GPU's backward passes in threads of its own


def launch(kernel: Any, grid: Any, *given: Any, **sizes: Any) -> None:
    """kernel[grid](*given, **sizes)"""
    if current is None:
        kernel[grid](*given, **sizes)
    else:
        current.ask(kernel, grid, given, sizes)


@contextlib.contextmanager
def rehearsal(device: torch.device) -> Iterator[None]:
    """Within it kernels are compiled for a GPU instead of being launched; when it is left, all of them are ready."""
    global current
    if device.type != "cuda":
        yield
        return
    before, mine = current, Rehearsal(device)
    current = mine
    try:
        yield
    finally:
        current = before
        mine.pool.shutdown()
    for made in mine.asked.values():
        made.result()


def form(value: Any) -> Any:
    """What Triton compiles a kernel for, roughly: the type of an argument, and whether it is a multiple of 16."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(map(form, value))
    if isinstance(value, int):
        return int, value == 1, value % 16 == 0, value.bit_length() > 31
    return type(value)
