"""Two passes over the rows [m, P] of a memory that may be hundreds of megabytes, on a CPU in as few readings as there can be.

`fade_and_add` writes some rows anew where they lie. `inner_products` multiplies few long vectors with all rows: a general
product copies all rows into another order first, which costs more than the multiplication; blocks so small that the BLAS
of numpy (OpenBLAS) multiplies them as they lie need one reading.
"""

from __future__ import annotations

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


def inner_products(vectors: Tensor, rows: Tensor) -> Tensor:
    """vectors [k, P] @ rows' [P, m], block after block, summed in float64."""
    v, r, length = vectors.numpy(), rows.numpy(), rows.shape[1]
    block = max(64, SMALL // (len(v) * len(r)))
    threads = torch.get_num_threads()

    def some(thread: int) -> NDArray[np.float64]:
        total = np.zeros((len(r), len(v)))
        for a in range(thread * block, length, threads * block):
            total += r[:, a : a + block] @ np.ascontiguousarray(v[:, a : a + block].T)
        return total

    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(some, range(threads)), start=np.zeros((len(r), len(v))))
    return torch.from_numpy(total.T)
