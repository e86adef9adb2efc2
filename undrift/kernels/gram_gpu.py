"""Inner products of a few long float32 rows with many rows, on a GPU, summed in float64 over stretches of the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.algorithms.gradient_memory.cone import gram
from undrift.core.forms import faster
from undrift.kernels import devices
from undrift.kernels.launch import allocate, launch, tl, triton


@faster(gram, when=lambda rows, others: devices.gpu(rows.device) and rows.dtype == torch.float32)
def gram_gpu(rows: Tensor, others: Tensor) -> Tensor:
    """Three TF32 products have the precision of float32, and stretches are short: the error is about 1e-8."""
    products: Tensor = torch.ops.undrift.gram(rows, others).sum(0, dtype=torch.float64)
    return products


if triton is not None:
    STRETCH = 1024

    @triton.jit  # type: ignore[untyped-decorator]
    def _gram(  # type: ignore[no-untyped-def]
        a, b, out, a_apart, b_apart, a_count, b_count, length,
        STRETCH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        part = tl.program_id(0).to(tl.int64)
        i, j = tl.program_id(1) * A + tl.arange(0, A), tl.program_id(2) * B + tl.arange(0, B)
        total = tl.zeros([A, B], tl.float32)
        for first in range(0, STRETCH, DEPTH):
            k = part * STRETCH + first + tl.arange(0, DEPTH)
            valid = (k < length)[None, :]
            x = tl.load(a + i[:, None] * a_apart + k[None, :], mask=(i < a_count)[:, None] & valid, other=0.0)
            y = tl.load(b + j[:, None] * b_apart + k[None, :], mask=(j < b_count)[:, None] & valid, other=0.0)
            total = tl.dot(x, tl.trans(y), total, input_precision="tf32x3")
        out += part * a_count * b_count
        inside = (i < a_count)[:, None] & (j < b_count)[None, :]
        tl.store(out + i[:, None] * b_count + j[None, :], total, mask=inside)

    @torch.library.custom_op("undrift::gram", mutates_args=())
    def _op(rows: Tensor, others: Tensor) -> Tensor:
        rows, others = (t if t.stride(1) == 1 else t.contiguous() for t in (rows, others))
        (a, length), b = rows.shape, len(others)
        parts = triton.cdiv(length, STRETCH)
        out = allocate(rows, parts, a, b)
        grid, apart = (parts, triton.cdiv(a, 16), triton.cdiv(b, 128)), (rows.stride(0), others.stride(0))
        launch(_gram, grid, rows, others, out, *apart, a, b, length, STRETCH=STRETCH, A=16, B=128, DEPTH=32)
        return out

    _op.register_fake(lambda rows, others: rows.new_empty(-(-rows.shape[1] // STRETCH), len(rows), len(others)))
