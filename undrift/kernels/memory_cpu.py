"""Passes over the rows [m, P] of a memory that may be hundreds of megabytes, on a CPU in as few readings as there can be.

`fade_and_add` writes some rows anew where they lie. `row_products` multiplies a few of them with all: a general
product copies all rows into another order first, which costs more than the multiplication. In C (memory_cpu.c) a block of every
row is multiplied as it lies, and `in_one_pass` does both; without a compiler, blocks so small that the BLAS of numpy
(OpenBLAS) does the same.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.gradient_memory.cone import combine, gram, norm
from undrift.algorithms.gradient_memory.memory import renew_products
from undrift.core.forms import faster
from undrift.kernels import devices
from undrift.kernels.native import address, library

SMALL = 990_000  # multiplications in a product that OpenBLAS takes as it is
BLOCK = 1 << 16  # entries of a vector that are widened at a time, so that the cache holds them


def long(rows: Tensor) -> bool:
    """Whether `row_products` is for these: float32 on a CPU, and long enough for several blocks a thread."""
    return devices.cpu(rows.device) and rows.dtype == torch.float32 and rows.shape[1] >= 1 << 16


@faster(renew_products, when=lambda rows, at, scale, updates, m: devices.cpu(rows.device))
def renew_products_cpu(rows: Tensor, at: Tensor, scale: Tensor, updates: Tensor, m: Tensor) -> Tensor:
    if (found := in_one_pass(rows, at, scale, updates, m)) is not None:
        return found
    fade_and_add(rows, at, scale, updates)
    if long(rows):
        return row_products(rows, at, m)
    return gram(torch.cat([rows.index_select(0, at), m[None]]), rows).double()


def fade_and_add(rows: Tensor, at: Tensor, scale: Tensor, updates: Tensor) -> None:
    """rows[at] <- scale rows[at] + updates, in place, for at [S], scale [S, 1] and updates [S, P]."""
    for place, factor, update in zip(at.tolist(), scale.squeeze(-1).tolist(), updates, strict=True):
        torch.add(update, rows[place], alpha=factor, out=rows[place])


def row_products(rows: Tensor, at: Tensor, m: Tensor) -> Tensor:
    """The products [S + 1, m] of rows[at] and of the vector m [P] with all rows [m, P], block after block, summed in float64."""
    if library() is not None and rows.stride(1) == 1 and m.stride(0) == 1:
        return native_products(rows, [*(rows[i] for i in at.tolist()), m], m.new_zeros(0), [])
    return blas_products(rows, at, m)


def in_one_pass(rows: Tensor, at: Tensor, scale: Tensor, updates: Tensor, m: Tensor) -> Tensor | None:
    """`fade_and_add` and then `row_products`; None, and nothing changed, where that is not to be had at once."""
    straight = all(t.stride(-1) == 1 and t.dtype == torch.float32 for t in (rows, updates, m))
    if not long(rows) or not straight or library() is None:
        return None
    vectors = [*(rows[i] for i in at.tolist()), m]
    return native_products(rows, vectors, scale.squeeze(-1).to(torch.float32).contiguous(), list(updates))


def native_products(rows: Tensor, vectors: Sequence[Tensor], scale: Tensor, updates: Sequence[Tensor]) -> Tensor:
    """The products [n, m] of n vectors with all rows [m, P], in C; the first of them are rows, which the updates are added to."""
    found = rows.new_empty(len(vectors), len(rows), dtype=torch.float64)
    failed = library().inner_products(  # type: ignore[union-attr]
        ctypes.c_long(len(rows)), ctypes.c_long(rows.shape[1]), address(rows), ctypes.c_long(rows.stride(0)),
        ctypes.c_long(len(vectors)), addresses(vectors), ctypes.c_long(len(updates)), address(scale), addresses(updates),
        address(found), ctypes.c_int(torch.get_num_threads()),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for a block of the vectors")
    return found


def addresses(vectors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(vectors))(*(v.data_ptr() for v in vectors))


def blas_products(rows: Tensor, at: Tensor, m: Tensor) -> Tensor:
    """`row_products` with numpy's BLAS."""
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


@faster(norm, when=lambda p: long(p.unsqueeze(0)))
def norm_cpu(p: Tensor) -> Tensor:
    """As exact as the products beside it, in a quarter of the time."""
    return row_products(p.unsqueeze(0), torch.arange(0), p).sqrt()


@faster(combine, when=lambda p, rows, index, share: devices.cpu(p.device))
def combine_cpu(p: Tensor, rows: Tensor, index: Tensor, share: Tensor) -> Tensor:
    u, named = torch.empty_like(p), [rows[i] for i in index.tolist()]
    whole = all(v.dtype == torch.float32 and v.stride(0) == 1 for v in (p, *named))
    if whole and (native := library()) is not None:
        weights = share.to(torch.float64).contiguous()
        sizes = ctypes.c_long(len(p)), ctypes.c_long(len(named))
        threads = ctypes.c_int(torch.get_num_threads())
        native.combined(sizes[0], address(p), sizes[1], addresses(named), address(weights), address(u), threads)
        return u
    for first in range(0, len(p), BLOCK):
        part = slice(first, first + BLOCK)
        total = p[part].to(torch.float64, copy=True)
        for row, z in zip(named, share.tolist(), strict=True):
            total.add_(row[part], alpha=z)
        u[part] = total
    return u
