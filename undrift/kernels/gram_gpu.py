"""Inner products of a few long float32 rows with many rows, segment by segment, on a GPU, in float64.

One kernel multiplies blocks of the rows, a second sums the blocks of each segment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.algorithms.gradient_memory.cone import grams
from undrift.core.forms import faster
from undrift.kernels import devices
from undrift.kernels.launch import allocate, launch, tl, triton
from undrift.kernels.segments import blocks, bounds


@faster(grams, when=lambda rows, others, segments: devices.gpu(rows.device) and rows.dtype == torch.float32)
def grams_gpu(rows: Tensor, others: Tensor, segments: list[slice]) -> Tensor:
    products: Tensor = torch.ops.undrift.grams(rows, others, bounds(segments))
    return products


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _multiply(  # type: ignore[no-untyped-def]
        a, b, out, blocks, a_apart, b_apart, a_count, b_count,
        STRETCH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0).to(tl.int64)
        i, j = tl.program_id(1) * A + tl.arange(0, A), tl.program_id(2) * B + tl.arange(0, B)
        begin, end = tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 1)
        total = tl.zeros([A, B], tl.float64)
        for first in range(0, STRETCH, DEPTH):
            k = begin + first + tl.arange(0, DEPTH)
            valid = (k < end)[None, :]
            x = tl.load(a + i[:, None] * a_apart + k[None, :], mask=(i < a_count)[:, None] & valid, other=0.0)
            y = tl.load(b + j[:, None] * b_apart + k[None, :], mask=(j < b_count)[:, None] & valid, other=0.0)
            total = tl.dot(x.to(tl.float64), tl.trans(y.to(tl.float64)), total, out_dtype=tl.float64)
        out += block * a_count * b_count
        inside = (i < a_count)[:, None] & (j < b_count)[None, :]
        tl.store(out + i[:, None] * b_count + j[None, :], total, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _sum(sums, out, firsts, entries, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        segment = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        begin, end = tl.load(firsts + segment), tl.load(firsts + segment + 1)
        total = tl.zeros([WIDTH], tl.float64)
        for first in range(begin, end, BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            valid = (block < end)[:, None] & (at < entries)[None, :]
            total += tl.sum(tl.load(sums + block[:, None] * entries + at[None, :], mask=valid, other=0.0), 0)
        tl.store(out + segment * entries + at, total, mask=at < entries)

    @torch.library.custom_op("undrift::grams", mutates_args=())
    def _op(rows: Tensor, others: Tensor, bounds: list[int]) -> Tensor:
        rows, others = (t if t.stride(1) == 1 else t.contiguous() for t in (rows, others))
        (a, length), b = rows.shape, len(others)
        stretch = max(256, triton.next_power_of_2(length // 1024))  # some 1000 blocks: several for each multiprocessor
        table, firsts = blocks(bounds, stretch, rows)
        sums = allocate(rows, len(table), a, b, dtype=torch.float64)
        out = allocate(rows, len(bounds) - 1, a, b, dtype=torch.float64)
        wide, depth = (64, 32) if b > 16 else (16, 128)
        grid, apart = (len(table), triton.cdiv(a, 16), triton.cdiv(b, wide)), (rows.stride(0), others.stride(0))
        launch(_multiply, grid, rows, others, sums, table, *apart, a, b, STRETCH=stretch, A=16, B=wide, DEPTH=depth)
        launch(_sum, (len(out), triton.cdiv(a * b, 128)), sums, out, firsts, a * b, BLOCKS=16, WIDTH=128)
        return out

    @_op.register_fake
    def _(rows: Tensor, others: Tensor, bounds: list[int]) -> Tensor:
        return rows.new_empty(len(bounds) - 1, len(rows), len(others), dtype=torch.float64)
