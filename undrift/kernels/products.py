"""Two passes over a few long float32 vectors in float64: all their inner products, and a combination of them.

On a CPU block by block, so that what is widened stays in the cache; on a GPU in kernels that read the vectors once. Written
with PyTorch alone either pass would write float64 copies of the vectors first, several times their size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from torch.library import triton_op, wrap_triton
except ImportError:  # no Triton here: the plain forms serve
    triton = None

BLOCK = 1 << 14  # entries widened at a time on a CPU


def inner_products(vectors: Tensor) -> Tensor:
    """[..., k, k] for vectors [..., k, P].

    >>> inner_products(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    tensor([[5., 6.],
            [6., 9.]], dtype=torch.float64)
    """
    if triton is None or vectors.device.type != "cuda" or vectors.shape[-2] != 4 or vectors.dtype != torch.float32:
        return torch.stack([v @ v.mT for v in widened(vectors)]).sum(0)
    sums = torch.ops.undrift.four_products(vectors.reshape(-1, 4, vectors.shape[-1])).sum(1)  # [n, 10]
    every: Tensor = sums[:, places(vectors.device)]
    return every.view(*vectors.shape[:-2], 4, 4)


def combination(share: Tensor, vectors: Tensor) -> Tensor:
    """share [..., 3] times the first three of the vectors [..., 4, P], added to the last one, in the vectors' dtype."""
    if triton is None or vectors.device.type != "cuda" or vectors.dtype != torch.float32:
        parts = [(share.unsqueeze(-2) @ v[..., :3, :]).squeeze(-2) + v[..., 3, :] for v in widened(vectors)]
        return torch.cat(parts, -1).to(vectors.dtype)
    flat = vectors.reshape(-1, 4, vectors.shape[-1])
    made: Tensor = torch.ops.undrift.three_and_one(share.reshape(-1, 3).contiguous(), flat)
    return made.view(*vectors.shape[:-2], -1)


def widened(vectors: Tensor) -> Iterator[Tensor]:
    """The vectors [..., P] in float64, block after block on a CPU."""
    blocks = vectors.split(BLOCK, -1) if vectors.device.type == "cpu" else [vectors]
    return (block.double() for block in blocks)


PAIRS = list(itertools.combinations_with_replacement(range(4), 2))


@functools.cache
def places(device: torch.device) -> Tensor:
    """[16] where in PAIRS each entry of a symmetric 4 x 4 matrix stands; kept, because a CUDA graph cannot copy from the host."""
    return torch.tensor([PAIRS.index((min(i, j), max(i, j))) for i in range(4) for j in range(4)], device=device)


if triton is not None:
    WIDTH = 2048  # entries of each vector that one program reads

    @triton.jit  # type: ignore[untyped-decorator]
    def _four_products(vectors, out, length, blocks, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        row, block = tl.program_id(0), tl.program_id(1)
        at = block * WIDTH + tl.arange(0, WIDTH)
        here = at < length
        start = vectors + row.to(tl.int64) * 4 * length
        a = tl.load(start + at, mask=here, other=0.0).to(tl.float64)
        b = tl.load(start + length + at, mask=here, other=0.0).to(tl.float64)
        c = tl.load(start + 2 * length + at, mask=here, other=0.0).to(tl.float64)
        d = tl.load(start + 3 * length + at, mask=here, other=0.0).to(tl.float64)
        to = out + (row.to(tl.int64) * blocks + block) * 10
        tl.store(to, tl.sum(a * a))
        tl.store(to + 1, tl.sum(a * b))
        tl.store(to + 2, tl.sum(a * c))
        tl.store(to + 3, tl.sum(a * d))
        tl.store(to + 4, tl.sum(b * b))
        tl.store(to + 5, tl.sum(b * c))
        tl.store(to + 6, tl.sum(b * d))
        tl.store(to + 7, tl.sum(c * c))
        tl.store(to + 8, tl.sum(c * d))
        tl.store(to + 9, tl.sum(d * d))

    @triton_op("undrift::four_products", mutates_args={})
    def four_products(vectors: Tensor) -> Tensor:
        count, _, length = vectors.shape
        blocks = triton.cdiv(length, WIDTH)
        out = torch.empty((count, blocks, 10), dtype=torch.float64, device=vectors.device)
        wrap_triton(_four_products)[(count, blocks)](vectors.contiguous(), out, length, blocks, WIDTH=WIDTH)
        return out

    @triton.jit  # type: ignore[untyped-decorator]
    def _three_and_one(share, vectors, out, length, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        row, block = tl.program_id(0), tl.program_id(1)
        at = block * WIDTH + tl.arange(0, WIDTH)
        here = at < length
        start = vectors + row.to(tl.int64) * 4 * length
        made = tl.load(start + 3 * length + at, mask=here, other=0.0).to(tl.float64)
        for i in tl.static_range(3):
            made += tl.load(share + row * 3 + i) * tl.load(start + i * length + at, mask=here, other=0.0).to(tl.float64)
        tl.store(out + row.to(tl.int64) * length + at, made.to(tl.float32), mask=here)

    @triton_op("undrift::three_and_one", mutates_args={})
    def three_and_one(share: Tensor, vectors: Tensor) -> Tensor:
        count, _, length = vectors.shape
        out = torch.empty((count, length), dtype=vectors.dtype, device=vectors.device)
        grid = (count, triton.cdiv(length, WIDTH))
        wrap_triton(_three_and_one)[grid](share, vectors.contiguous(), out, length, WIDTH=WIDTH)
        return out
