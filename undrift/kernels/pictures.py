"""Pictures taken out of a data set and normalised, on a GPU in one kernel: a byte has only 256 values, which a table holds."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton here: the plain form serves
    triton = None


def available(held: Tensor) -> bool:
    """Whether these are pictures [N, C, H, W] of bytes on a GPU."""
    pictures = held.dim() == 4 and held.dtype == torch.uint8 and held.is_contiguous()
    return triton is not None and held.device.type == "cuda" and pictures


def looked_up(held: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """[n, C, H, W] with table[c, byte] for the bytes of channel c, for held [N, C, H, W], index [n] and table [C, 256].

    The plain form is `table[arange(C).view(-1, 1, 1), held[index].long()]`.
    """
    found: Tensor = torch.ops.undrift.looked_up(held, index, table)
    return found


if triton is not None:
    WIDTH = 1024  # bytes of a picture that one program takes

    @triton.jit  # type: ignore[untyped-decorator]
    def _looked_up(held, index, table, out, size, plane, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        n, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        here = at < size
        byte = tl.load(held + tl.load(index + n) * size + at, mask=here, other=0).to(tl.int32)
        tl.store(out + n * size + at, tl.load(table + (at // plane) * 256 + byte, mask=here), mask=here)

    @torch.library.custom_op("undrift::looked_up", mutates_args=())
    def _op(held: Tensor, index: Tensor, table: Tensor) -> Tensor:
        _, *shape = held.shape
        out = table.new_empty(len(index), *shape)
        size, plane = out[:1].numel() if len(out) else 0, shape[1] * shape[2]
        if len(out):
            _looked_up[(len(index), triton.cdiv(size, WIDTH))](held, index, table, out, size, plane, WIDTH=WIDTH)
        return out

    @_op.register_fake
    def _(held: Tensor, index: Tensor, table: Tensor) -> Tensor:
        return table.new_empty(len(index), *held.shape[1:])
