"""Selects and normalises pictures on a GPU in one kernel: a table holds the result for each of a byte's 256 values.

A rehearsal (`launch`) runs these kernels too, because a user's model may depend on the values of its inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.core.forms import faster
from undrift.data.augment import lookup
from undrift.data.federation import Federation
from undrift.kernels import devices
from undrift.kernels.chain import chain_of
from undrift.kernels.launch import tl, triton
from undrift.oracle.net import Net
from undrift.oracle.samples import samples


def pictures(data: Federation, draw: Tensor | None, owner: Tensor | None) -> Tensor | None:
    """The pictures [N, C, H, W] as bytes on a GPU, if they are only normalised."""
    held = data.train.held
    if held is None or draw is not None or owner is not None or not devices.gpu(held.device):
        return None
    return held if held.dim() == 4 and held.dtype == torch.uint8 and held.is_contiguous() else None


def turns(net: Net, rows: Tensor, held: Tensor) -> bool:
    """Whether the model's steps need transposed pictures."""
    chain, lead = chain_of(net), rows.shape[:-1]
    return chain is not None and bool(lead) and chain.turns(lead.numel(), net.dtype, held.device)


def serves(net: Net, data: Federation, rows: Tensor, draw: Tensor | None = None, owner: Tensor | None = None) -> bool:
    """Whether the kernels serve; torch.compile fuses the plain form by itself, but does not transpose."""
    held = pictures(data, draw, owner)
    return held is not None and (turns(net, rows, held) or not devices.is_tracing())


@faster(samples, when=serves)
def samples_gpu(
    net: Net, data: Federation, rows: Tensor, draw: Tensor | None = None, owner: Tensor | None = None
) -> Tensor:
    held = data.train.held
    assert held is not None
    table = lookup(data.transform, held.shape[1], net.dtype, held.device)
    if turns(net, rows, held):
        return turn(held, rows, table)
    return look_up(held, rows.flatten(), table).view(*rows.shape, *held.shape[1:])


def look_up(held: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """table[arange(C).view(-1, 1, 1), held[index].long()], for held [N, C, H, W], index [n] and table [C, 256]."""
    out: Tensor = torch.ops.undrift.looked_up(held, index, table)
    return out


def turn(held: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """`look_up` for index [..., B] as [..., B, C, H, W], stored pixel by pixel: the samples are the fastest dimension."""
    out: Tensor = torch.ops.undrift.turned(held, index.flatten(0, -2), table)
    return out.mT.view(*index.shape, *held.shape[1:])


if triton is not None:
    WIDTH = 1024  # bytes of a picture in one program
    PIXELS, SIDE = 64, 64  # pixels and pictures that one program transposes

    @triton.jit  # type: ignore[untyped-decorator]
    def _look_up(held, index, table, out, size, plane, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        n, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = at < size
        byte = tl.load(held + tl.load(index + n) * size + at, mask=inside, other=0).to(tl.int32)
        tl.store(out + n * size + at, tl.load(table + (at // plane) * 256 + byte, mask=inside), mask=inside)

    @torch.library.custom_op("undrift::looked_up", mutates_args=())
    def _op(held: Tensor, index: Tensor, table: Tensor) -> Tensor:
        _, *shape = held.shape
        out = table.new_empty(len(index), *shape)
        size, plane = out[:1].numel() if len(out) else 0, shape[1] * shape[2]
        if len(out):
            _look_up[(len(index), triton.cdiv(size, WIDTH))](held, index, table, out, size, plane, WIDTH=WIDTH)
        return out

    _op.register_fake(lambda held, index, table: table.new_empty(len(index), *held.shape[1:]))

    @triton.jit  # type: ignore[untyped-decorator]
    def _transpose(held, index, table, out, batch, size, plane, PIXELS: tl.constexpr, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
        client = tl.program_id(0).to(tl.int64)
        at, b = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS), tl.program_id(2) * SIDE + tl.arange(0, SIDE)
        inside = (b < batch)[:, None] & (at < size)[None, :]
        row = tl.load(index + client * batch + b, mask=b < batch, other=0)
        byte = tl.load(held + row[:, None] * size + at[None, :], mask=inside, other=0).to(tl.int32)
        values = tl.load(table + (at // plane)[None, :] * 256 + byte, mask=inside)
        tl.store(out + (client * size + at)[None, :] * batch + b[:, None], values, mask=inside)

    @torch.library.custom_op("undrift::turned", mutates_args=())
    def _transpose_op(held: Tensor, index: Tensor, table: Tensor) -> Tensor:
        (clients, batch), index = index.shape, index.contiguous()
        size, plane = held[:1].numel(), held.shape[2] * held.shape[3]
        out = table.new_empty(clients, size, batch)
        grid = clients, triton.cdiv(size, PIXELS), triton.cdiv(batch, SIDE)
        _transpose[grid](held, index, table, out, batch, size, plane, PIXELS=PIXELS, SIDE=SIDE, num_warps=4)
        return out

    _transpose_op.register_fake(
        lambda held, index, table: table.new_empty(len(index), held[:1].numel(), index.shape[1])
    )
