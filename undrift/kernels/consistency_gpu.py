"""The spread of the local models, on a GPU in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.core.forms import faster
from undrift.kernels import devices
from undrift.kernels.launch import allocate, launch, tl, triton
from undrift.round.clients import Answers
from undrift.round.numbers import consistency

MOST = 64  # vectors in a group: a program holds a block of all of them


def serves(answers: Answers, share: Tensor) -> bool:
    x = answers.x
    return devices.gpu(x.device) and x.dtype == torch.float32 and x.shape[-2] <= MOST


@faster(consistency, when=serves)
def consistency_gpu(answers: Answers, share: Tensor) -> Tensor:
    return spread(answers.x, share)


def spread(x: Tensor, share: Tensor) -> Tensor:
    """[...] sum_i share_i |x_i - m|^2 with m = sum_i share_i x_i, for groups x [..., S, P] and share [..., S, 1]."""
    groups = x.reshape(-1, *x.shape[-2:])
    sums: Tensor = torch.ops.undrift.spread(groups, share.expand(*x.shape[:-1], 1).reshape(groups.shape[:2]))
    return sums.view(x.shape[:-2])


if triton is not None:
    ENTRIES = 8192  # entries of all vectors of a group in one program

    @triton.jit  # type: ignore[untyped-decorator]
    def _spread(  # type: ignore[no-untyped-def]
        x, share, out, apart, row_apart, count, length, blocks, S: tl.constexpr, WIDTH: tl.constexpr
    ):
        block, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
        i, at = tl.arange(0, S), block * WIDTH + tl.arange(0, WIDTH)
        rows = i.to(tl.int64)[:, None] * row_apart
        valid = i < count
        weight = tl.load(share + group * count + i, mask=valid, other=0.0)
        inside = valid[:, None] & (at < length)[None, :]
        vectors = tl.load(x + group * apart + rows + at[None, :], mask=inside, other=0.0)
        mean = tl.sum(weight[:, None] * vectors, 0)
        away = vectors - mean[None, :]
        squares = tl.sum(weight[:, None] * away * away, 0)
        tl.store(out + group * blocks + block, tl.sum(tl.where(at < length, squares, 0.0)))

    @torch.library.custom_op("undrift::spread", mutates_args=())
    def _op(x: Tensor, share: Tensor) -> Tensor:
        x, share = x if x.stride(2) == 1 else x.contiguous(), share.contiguous()
        groups, count, length = x.shape
        S = triton.next_power_of_2(count)
        width = ENTRIES // S
        blocks = triton.cdiv(length, width)
        out = allocate(x, groups, blocks)
        sizes = *x.stride()[:2], count, length, blocks
        launch(_spread, (blocks, groups), x, share, out, *sizes, S=S, WIDTH=width)
        return out.sum(1)

    _op.register_fake(lambda x, share: x.new_empty(len(x)))
