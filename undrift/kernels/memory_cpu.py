"""Passes over the rows [m, P] of a memory of hundreds of megabytes, on a CPU with as few reads as possible.

`fade_and_add` updates some rows in place. `row_products` multiplies a few rows with all: a general matrix product first copies
all rows, which takes longer than the multiplication. C (memory_cpu.c) multiplies blocks in place, and `in_one_pass` does both
steps. Without a compiler, numpy's OpenBLAS multiplies blocks so small that it does not copy them.
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

SMALL = 990_000  # multiplications in a product that OpenBLAS computes without a copy
BLOCK = 1 << 16  # entries that are converted to float64 at a time, so that they fit the cache


def long(rows: Tensor) -> bool:
    """Whether `row_products` serves: float32 on a CPU, and several blocks for each thread."""
    return devices.cpu(rows.device) and rows.dtype == torch.float32 and rows.shape[1] >= 1 << 16


@faster(renew_products, when=lambda rows, at, scale, updates, m, segments: devices.cpu(rows.device))
def renew_products_cpu(
    rows: Tensor, at: Tensor, scale: Tensor, updates: Tensor, m: Tensor, segments: list[slice]
) -> Tensor:
    return torch.stack([renew_part(rows[:, s], at, scale, updates[:, s], m[s]) for s in segments])


def renew_part(rows: Tensor, at: Tensor, scale: Tensor, updates: Tensor, m: Tensor) -> Tensor:
    """`renew_products` for one segment of all vectors."""
    if (products := in_one_pass(rows, at, scale, updates, m)) is not None:
        return products
    fade_and_add(rows, at, scale, updates)
    if long(rows):
        return row_products(rows, at, m)
    return gram(torch.cat([rows.index_select(0, at), m[None]]), rows).double()


def fade_and_add(rows: Tensor, at: Tensor, scale: Tensor, updates: Tensor) -> None:
    """rows[at] <- scale rows[at] + updates, in place, for at [S], scale [S, 1] and updates [S, P]."""
    for place, factor, update in zip(at.tolist(), scale.squeeze(-1).tolist(), updates, strict=True):
        torch.add(update, rows[place], alpha=factor, out=rows[place])


def row_products(rows: Tensor, at: Tensor, m: Tensor) -> Tensor:
    """The products [S + 1, m] of rows[at] and the vector m [P] with all rows [m, P], by blocks, summed in float64."""
    if library() is not None and rows.stride(1) == 1 and m.stride(0) == 1:
        return native_products(rows, [*(rows[i] for i in at.tolist()), m], m.new_zeros(0), [])
    return blas_products(rows, at, m)


def in_one_pass(rows: Tensor, at: Tensor, scale: Tensor, updates: Tensor, m: Tensor) -> Tensor | None:
    """`fade_and_add` and `row_products` in C; None, with nothing changed, if C does not serve."""
    straight = all(t.stride(-1) == 1 and t.dtype == torch.float32 for t in (rows, updates, m))
    if not long(rows) or not straight or library() is None:
        return None
    vectors = [*(rows[i] for i in at.tolist()), m]
    return native_products(rows, vectors, scale.squeeze(-1).to(torch.float32).contiguous(), list(updates))


def native_products(rows: Tensor, vectors: Sequence[Tensor], scale: Tensor, updates: Sequence[Tensor]) -> Tensor:
    """The products [n, m] of n vectors with all rows [m, P], in C. The updates are first added to the first vectors."""
    products = rows.new_empty(len(vectors), len(rows), dtype=torch.float64)
    failed = library().inner_products(  # type: ignore[union-attr]
        ctypes.c_long(len(rows)), ctypes.c_long(rows.shape[1]), address(rows), ctypes.c_long(rows.stride(0)),
        ctypes.c_long(len(vectors)), addresses(vectors), ctypes.c_long(len(updates)), address(scale), addresses(updates),
        address(products), ctypes.c_int(torch.get_num_threads()),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for a block of the vectors")
    return products


def addresses(vectors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(vectors))(*(v.data_ptr() for v in vectors))


def blas_products(rows: Tensor, at: Tensor, m: Tensor) -> Tensor:
    """`row_products` with numpy's BLAS."""
    r, v, which, length = rows.numpy(), m.numpy(), at.numpy(), rows.shape[1]
    width = len(which) + 1
    block = max(64, SMALL // (len(r) * width))
    threads = torch.get_num_threads()

    def sum_blocks(thread: int) -> NDArray[np.float64]:
        total = np.zeros((len(r), width))
        for a in range(thread * block, length, threads * block):
            part = r[:, a : a + block]
            vectors = np.empty((part.shape[1], width), np.float32)
            vectors[:, :-1], vectors[:, -1] = part[which].T, v[a : a + block]
            total += part @ vectors
        return total

    others = helpers(os.getpid()).map(sum_blocks, range(1, threads))
    return torch.from_numpy(sum(others, start=sum_blocks(0)).T)


@functools.cache
def helpers(process: int) -> ThreadPoolExecutor:
    """Threads that stay alive, because starting them takes a tenth of the time. A forked process has its own."""
    return ThreadPoolExecutor()


@faster(norm, when=lambda p: long(p.unsqueeze(0)))
def norm_cpu(p: Tensor) -> Tensor:
    """As exact as the products, in a quarter of the time of the plain form."""
    return row_products(p.unsqueeze(0), torch.arange(0), p).sqrt()


@faster(combine, when=lambda p, rows, index, share: devices.cpu(p.device))
def combine_cpu(p: Tensor, rows: Tensor, index: Tensor, share: Tensor) -> Tensor:
    u, chosen = torch.empty_like(p), [rows[i] for i in index.tolist()]
    contiguous = all(v.dtype == torch.float32 and v.stride(0) == 1 for v in (p, *chosen))
    if contiguous and (native := library()) is not None:
        weights, threads = share.to(torch.float64).contiguous(), ctypes.c_int(torch.get_num_threads())
        counts = ctypes.c_long(len(p)), ctypes.c_long(len(chosen))
        native.combined(counts[0], address(p), counts[1], addresses(chosen), address(weights), address(u), threads)
        return u
    for first in range(0, len(p), BLOCK):
        part = slice(first, first + BLOCK)
        total = p[part].to(torch.float64, copy=True)
        for row, z in zip(chosen, share.tolist(), strict=True):
            total.add_(row[part], alpha=z)
        u[part] = total
    return u
