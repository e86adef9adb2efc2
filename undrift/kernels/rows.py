"""Two passes over the rows [m, P] of a memory that may be hundreds of megabytes, on a CPU in as few readings as there can be.

`fade_and_add` writes some rows anew where they lie. `inner_products` multiplies a few of them with all: a general
product copies all rows into another order first, which costs more than the multiplication; blocks so small that the BLAS
of numpy (OpenBLAS) multiplies them as they lie need one reading.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SMALL = 990_000  # multiplications in a product that OpenBLAS takes as it is


def fade_and_add(rows: Tensor, at: Tensor, scale: Tensor, updates: Tensor) -> None:
    """rows[at] <- scale rows[at] + updates, in place, for at [S], scale [S, 1] and updates [S, P]."""
    if rows.device.type != "cpu":
        rows.index_copy_(0, at, scale * rows[at] + updates)
        return
    for place, factor, update in zip(at.tolist(), scale.squeeze(-1).tolist(), updates, strict=True):
        torch.add(update, rows[place], alpha=factor, out=rows[place])


def long_products(rows: Tensor) -> bool:
    """Whether `inner_products` is for these: float32 on a CPU, and long enough for several blocks a thread."""
    return rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.shape[1] >= 1 << 16


def inner_products(rows: Tensor, at: Tensor, m: Tensor) -> Tensor:
    """The products [S + 1, m] of rows[at] and of the vector m [P] with all rows [m, P], block after block, summed in float64."""
    r, v, which, length = rows.numpy(), m.numpy(), at.numpy(), rows.shape[1]
    width = len(which) + 1
    block = max(64, SMALL // (len(r) * width))
    threads = torch.get_num_threads()

    def some(thread: int) -> NDArray[np.float64]:
        total = np.zeros((len(r), width))
        for a in range(thread * block, length, threads * block):
            here = r[:, a : a + block]
            vectors = np.empty((here.shape[1], width), np.float32)
            vectors[:, :-1], vectors[:, -1] = here[which].T, v[a : a + block]
            total += here @ vectors
        return total

    others = helpers(os.getpid()).map(some, range(1, threads))
    return torch.from_numpy(sum(others, start=some(0)).T)


@functools.cache
def helpers(process: int) -> ThreadPoolExecutor:
    """Threads that are kept, for to start them takes a tenth of the time; a forked process has its own."""
    return ThreadPoolExecutor()
