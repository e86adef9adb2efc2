"""GroupNorm and BatchNorm over stacked clients on a GPU, with channels last in memory as `conv_stacked_gpu` leaves them.

Each reads its inputs once from memory for the statistics, and once more to normalise; sums are in float32. A variance is taken
around the mean, not as a difference of squares. BatchNorm's statistics cover the real samples only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undrift.core.forms import faster
from undrift.kernels import devices
from undrift.kernels.conv_stacked_gpu import first, last
from undrift.kernels.launch import allocate, clients_first, current, launch, only_stacked, take_part, tl, triton
from undrift.oracle.layers import MaskedBatchNorm, StackedGroupNorm, batch_norm, group_norm, normalise

BLOCK = 8192  # entries that a program holds at once
PARTS, CHANNELS = 32, 32  # parts and channels at a time, where parts are joined


def serves(layer: StackedGroupNorm | MaskedBatchNorm, x: Tensor) -> bool:
    """Whether the kernels serve a layer of stacked clients and inputs x [B, C, H, W] of one of them, with channels last."""
    if not (layer.current.stacked and x.dim() == 4 and devices.gpu(x.device)):
        return False
    known = x.dtype in (torch.float32, torch.bfloat16)
    known = known and layer.weight is not None and layer.weight.dtype == torch.float32
    return known and x.stride(1) == 1 and layer.bias is not None and x.shape[1] % 16 == 0 and only_stacked()


def serves_groups(layer: StackedGroupNorm, x: Tensor) -> bool:
    wide = layer.num_channels // layer.num_groups
    return serves(layer, x) and wide & (wide - 1) == 0 and wide <= BLOCK


@faster(group_norm, when=serves_groups)
def group_norm_stacked(layer: StackedGroupNorm, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.undrift.group_norm(x, layer.weight, layer.bias, layer.num_groups, layer.eps)
    return out


@faster(batch_norm, when=lambda layer, x, real: serves(layer, x) and (real is None or len(real) == len(x)))
def batch_norm_stacked(layer: MaskedBatchNorm, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.undrift.batch_norm(
        x, real, layer.weight, layer.bias, layer.eps
    )
    return found


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _over_groups(v, GROUPS: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Each channel's sum over its group, for channels [GROUPS * WIDE]."""
        sums = tl.sum(tl.reshape(v, [GROUPS, WIDE]), 1)
        return tl.reshape(tl.broadcast_to(sums[:, None], [GROUPS, WIDE]), [GROUPS * WIDE])

    @triton.jit(do_not_specialize=["w_apart", "b_apart"], do_not_specialize_on_alignment=["w", "b"])  # type: ignore[untyped-decorator]
    def _group_norm(  # type: ignore[no-untyped-def]
        x, w, b, out, means, scales, w_apart, b_apart, samples, EPS: tl.constexpr, PLACES: tl.constexpr, C: tl.constexpr,
        GROUPS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """GROUPS groups of WIDE channels of one sample."""
        n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * (GROUPS * WIDE) + tl.arange(0, GROUPS * WIDE)
        client = n // samples
        x, out, row = x + n * (PLACES * C), out + n * (PLACES * C), tl.arange(0, ROWS)
        total = tl.zeros([ROWS, GROUPS * WIDE], tl.float32)
        for begin in range(0, PLACES, ROWS):
            at = (begin + row)[:, None] * C + c[None, :]
            total += tl.load(x + at, mask=(begin + row < PLACES)[:, None], other=0.0).to(tl.float32)
        mean = _over_groups(tl.sum(total, 0), GROUPS, WIDE) / (PLACES * WIDE)
        total = tl.zeros([ROWS, GROUPS * WIDE], tl.float32)
        for begin in range(0, PLACES, ROWS):
            at = (begin + row)[:, None] * C + c[None, :]
            h = tl.load(x + at, mask=(begin + row < PLACES)[:, None], other=0.0).to(tl.float32) - mean[None, :]
            total += tl.where((begin + row < PLACES)[:, None], h * h, 0.0)
        scale = 1.0 / tl.sqrt(_over_groups(tl.sum(total, 0), GROUPS, WIDE) / (PLACES * WIDE) + EPS)
        tl.store(means + n * C + c, mean)
        tl.store(scales + n * C + c, scale)
        times, plus = tl.load(w + client * w_apart + c), tl.load(b + client * b_apart + c)
        for begin in range(0, PLACES, ROWS):
            at, inside = (begin + row)[:, None] * C + c[None, :], (begin + row < PLACES)[:, None]
            h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]
            tl.store(out + at, (h * (scale * times)[None, :] + plus[None, :]).to(out.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["apart"], do_not_specialize_on_alignment=["w"])  # type: ignore[untyped-decorator]
    def _group_norm_back(  # type: ignore[no-untyped-def]
        x, d, w, means, scales, out, dw, db, apart, samples, PLACES: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr,
        WIDE: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """The gradients of the inputs, and of each sample's share of w and b."""
        n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * (GROUPS * WIDE) + tl.arange(0, GROUPS * WIDE)
        x, d, out, row = x + n * (PLACES * C), d + n * (PLACES * C), out + n * (PLACES * C), tl.arange(0, ROWS)
        mean, scale = tl.load(means + n * C + c), tl.load(scales + n * C + c)
        times = tl.load(w + n // samples * apart + c)
        plain, turned = tl.zeros([ROWS, GROUPS * WIDE], tl.float32), tl.zeros([ROWS, GROUPS * WIDE], tl.float32)
        for begin in range(0, PLACES, ROWS):
            at, inside = (begin + row)[:, None] * C + c[None, :], (begin + row < PLACES)[:, None]
            back = tl.load(d + at, mask=inside, other=0.0).to(tl.float32)
            h = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
            plain, turned = plain + back, turned + back * h
        by_plain, by_turned = tl.sum(plain, 0), tl.sum(turned, 0)
        tl.store(db + n * C + c, by_plain)
        tl.store(dw + n * C + c, by_turned)
        level = _over_groups(by_plain * times, GROUPS, WIDE) / (PLACES * WIDE)
        slope = _over_groups(by_turned * times, GROUPS, WIDE) / (PLACES * WIDE)
        for begin in range(0, PLACES, ROWS):
            at, inside = (begin + row)[:, None] * C + c[None, :], (begin + row < PLACES)[:, None]
            back = tl.load(d + at, mask=inside, other=0.0).to(tl.float32)
            h = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
            new = scale[None, :] * (back * times[None, :] - level[None, :] - h * slope[None, :])
            tl.store(out + at, new.to(out.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _add_up(each_w, each_b, dw, db, parts, C: tl.constexpr, PARTS: tl.constexpr, SOME: tl.constexpr):  # type: ignore[no-untyped-def]
        """Two sums over the parts of one client."""
        client, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * SOME + tl.arange(0, SOME)
        of_w, of_b = tl.zeros([PARTS, SOME], tl.float32), tl.zeros([PARTS, SOME], tl.float32)
        for begin in range(0, parts, PARTS):
            part = begin + tl.arange(0, PARTS)
            at, valid = (client * parts + part)[:, None] * C + c[None, :], (part < parts)[:, None] & (c < C)[None, :]
            of_w += tl.load(each_w + at, mask=valid, other=0.0)
            of_b += tl.load(each_b + at, mask=valid, other=0.0)
        tl.store(dw + client * C + c, tl.sum(of_w, 0), mask=c < C)
        tl.store(db + client * C + c, tl.sum(of_b, 0), mask=c < C)

    @triton.jit  # type: ignore[untyped-decorator]
    def _moments(  # type: ignore[no-untyped-def]
        x, real, counts, means, squares, samples, share, PLACES: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr,
        ROWS: tl.constexpr, SOME: tl.constexpr,
    ):  # fmt: skip
        """Over a share of one client's rows (places of all samples): their number, mean, and squares around that mean."""
        client, part, c = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * SOME + tl.arange(0, SOME)
        x, real, row = x + client * (samples * PLACES * C), real + client * samples, tl.arange(0, ROWS)
        end = min((part + 1) * share, samples * PLACES)
        total, number = tl.zeros([ROWS, SOME], tl.float32), tl.zeros([ROWS], tl.float32)
        for begin in range(part * share, end, ROWS):
            counted = (begin + row < end).to(tl.float32)
            if MASKED:
                counted *= tl.load(real + (begin + row) // PLACES, mask=begin + row < end, other=0.0)
            valid = (counted > 0)[:, None] & (c < C)[None, :]
            total += tl.load(x + (begin + row)[:, None] * C + c[None, :], mask=valid, other=0.0).to(tl.float32)
            number += counted
        n = tl.sum(number, 0)
        mean = tl.sum(total, 0) / tl.maximum(n, 1.0)
        total = tl.zeros([ROWS, SOME], tl.float32)
        for begin in range(part * share, end, ROWS):
            counted = (begin + row < end).to(tl.float32)
            if MASKED:
                counted *= tl.load(real + (begin + row) // PLACES, mask=begin + row < end, other=0.0)
            valid = (counted > 0)[:, None] & (c < C)[None, :]
            h = (
                tl.load(x + (begin + row)[:, None] * C + c[None, :], mask=valid, other=0.0).to(tl.float32)
                - mean[None, :]
            )
            total += tl.where(valid, h * h, 0.0)
        at = client * tl.num_programs(1) + part
        tl.store(counts + at, n)
        tl.store(means + at * C + c, mean, mask=c < C)
        tl.store(squares + at * C + c, tl.sum(total, 0), mask=c < C)

    @triton.jit(do_not_specialize=["w_apart"], do_not_specialize_on_alignment=["w"])  # type: ignore[untyped-decorator]
    def _join_moments(  # type: ignore[no-untyped-def]
        counts, means, squares, w, w_apart, number, mean, var, scale, parts, EPS: tl.constexpr, C: tl.constexpr,
        PARTS: tl.constexpr, SOME: tl.constexpr,
    ):  # fmt: skip
        """One client's number of rows, its mean and variance over all parts, and what its centred inputs are multiplied by."""
        client, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * SOME + tl.arange(0, SOME)
        n, total = tl.zeros([PARTS], tl.float32), tl.zeros([PARTS, SOME], tl.float32)
        for begin in range(0, parts, PARTS):
            part = begin + tl.arange(0, PARTS)
            at, valid = (client * parts + part)[:, None] * C + c[None, :], (part < parts)[:, None] & (c < C)[None, :]
            counted = tl.load(counts + client * parts + part, mask=part < parts, other=0.0)
            n += counted
            total += tl.load(means + at, mask=valid, other=0.0) * counted[:, None]
        rows = tl.sum(n, 0)
        middle = tl.sum(total, 0) / tl.maximum(rows, 1.0)
        total = tl.zeros([PARTS, SOME], tl.float32)
        for begin in range(0, parts, PARTS):
            part = begin + tl.arange(0, PARTS)
            at, valid = (client * parts + part)[:, None] * C + c[None, :], (part < parts)[:, None] & (c < C)[None, :]
            counted = tl.load(counts + client * parts + part, mask=part < parts, other=0.0)
            away = tl.load(means + at, mask=valid, other=0.0) - middle[None, :]
            total += tl.load(squares + at, mask=valid, other=0.0) + away * away * counted[:, None]
        spread = tl.sum(total, 0) / tl.maximum(rows, 1.0)
        times = tl.load(w + client * w_apart + c, mask=c < C, other=0.0)
        tl.store(number + client, rows)
        tl.store(mean + client * C + c, middle, mask=c < C)
        tl.store(var + client * C + c, spread, mask=c < C)
        tl.store(scale + client * C + c, times / tl.sqrt(spread + EPS), mask=c < C)

    @triton.jit(do_not_specialize=["b_apart"], do_not_specialize_on_alignment=["shifts"])  # type: ignore[untyped-decorator]
    def _scale(x, out, means, scales, shifts, b_apart, rows, C: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr):  # type: ignore[no-untyped-def]
        """(x - mean) * scale + shift for some rows of one client."""
        client, c = tl.program_id(0).to(tl.int64), tl.program_id(2) * SOME + tl.arange(0, SOME)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        at, valid = client * rows * C + row[:, None] * C + c[None, :], (row < rows)[:, None] & (c < C)[None, :]
        mean = tl.load(means + client * C + c, mask=c < C, other=0.0)
        scale, shift = (
            tl.load(scales + client * C + c, mask=c < C, other=0.0),
            tl.load(shifts + client * b_apart + c, mask=c < C, other=0.0),
        )
        h = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
        new = (h - mean[None, :]) * scale[None, :] + shift[None, :]
        tl.store(out + at, new.to(out.dtype.element_ty), mask=valid)

    @triton.jit  # type: ignore[untyped-decorator]
    def _sums(  # type: ignore[no-untyped-def]
        x, d, means, spreads, plain, turned, rows, share, EPS: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
        SOME: tl.constexpr,
    ):  # fmt: skip
        """Over a share of one client's rows: the sums of d and of d * (x - mean) * scale."""
        client, part, c = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * SOME + tl.arange(0, SOME)
        x, d, row, end = x + client * rows * C, d + client * rows * C, tl.arange(0, ROWS), min((part + 1) * share, rows)
        mean = tl.load(means + client * C + c, mask=c < C, other=0.0)
        scale = 1.0 / tl.sqrt(tl.load(spreads + client * C + c, mask=c < C, other=1.0) + EPS)
        one, other = tl.zeros([ROWS, SOME], tl.float32), tl.zeros([ROWS, SOME], tl.float32)
        for begin in range(part * share, end, ROWS):
            at, valid = (begin + row)[:, None] * C + c[None, :], (begin + row < end)[:, None] & (c < C)[None, :]
            back = tl.load(d + at, mask=valid, other=0.0).to(tl.float32)
            h = (tl.load(x + at, mask=valid, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
            one, other = one + back, other + back * h
        at = (client * tl.num_programs(1) + part) * C + c
        tl.store(plain + at, tl.sum(one, 0), mask=c < C)
        tl.store(turned + at, tl.sum(other, 0), mask=c < C)

    @triton.jit(do_not_specialize=["w_apart"], do_not_specialize_on_alignment=["w"])  # type: ignore[untyped-decorator]
    def _join_sums(  # type: ignore[no-untyped-def]
        plain, turned, spreads, number, w, w_apart, dw, db, slopes, levels, factors, parts, EPS: tl.constexpr,
        C: tl.constexpr, PARTS: tl.constexpr, SOME: tl.constexpr,
    ):  # fmt: skip
        """One client's gradients of w and b, and what `_scale_back` needs of them."""
        client, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * SOME + tl.arange(0, SOME)
        one, other = tl.zeros([PARTS, SOME], tl.float32), tl.zeros([PARTS, SOME], tl.float32)
        for begin in range(0, parts, PARTS):
            part = begin + tl.arange(0, PARTS)
            at, valid = (client * parts + part)[:, None] * C + c[None, :], (part < parts)[:, None] & (c < C)[None, :]
            one += tl.load(plain + at, mask=valid, other=0.0)
            other += tl.load(turned + at, mask=valid, other=0.0)
        of_b, of_w, at = tl.sum(one, 0), tl.sum(other, 0), client * C + c
        scale = 1.0 / tl.sqrt(tl.load(spreads + at, mask=c < C, other=1.0) + EPS)
        factor = scale * tl.load(w + client * w_apart + c, mask=c < C, other=0.0)
        rows = tl.maximum(tl.load(number + client), 1.0)
        tl.store(db + at, of_b, mask=c < C)
        tl.store(dw + at, of_w, mask=c < C)
        tl.store(factors + at, factor, mask=c < C)
        tl.store(levels + at, factor * of_b / rows, mask=c < C)
        tl.store(slopes + at, factor * scale * of_w / rows, mask=c < C)

    @triton.jit  # type: ignore[untyped-decorator]
    def _scale_back(  # type: ignore[no-untyped-def]
        x, d, real, out, means, slopes, levels, factors, rows, samples, PLACES: tl.constexpr, C: tl.constexpr,
        MASKED: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr,
    ):  # fmt: skip
        """d * factor - real * (level + (x - mean) * slope) for some rows of one client."""
        client, c = tl.program_id(0).to(tl.int64), tl.program_id(2) * SOME + tl.arange(0, SOME)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        at, valid = client * rows * C + row[:, None] * C + c[None, :], (row < rows)[:, None] & (c < C)[None, :]
        mean = tl.load(means + client * C + c, mask=c < C, other=0.0)
        slope = tl.load(slopes + client * C + c, mask=c < C, other=0.0)
        level = tl.load(levels + client * C + c, mask=c < C, other=0.0)
        factor = tl.load(factors + client * C + c, mask=c < C, other=0.0)
        back = tl.load(d + at, mask=valid, other=0.0).to(tl.float32)
        by_mean = (
            level[None, :] + (tl.load(x + at, mask=valid, other=0.0).to(tl.float32) - mean[None, :]) * slope[None, :]
        )
        if MASKED:
            counted = tl.load(real + client * samples + row // PLACES, mask=row < rows, other=0.0)
            by_mean = tl.where((counted > 0)[:, None], by_mean, 0.0)
        tl.store(out + at, (back * factor[None, :] - by_mean).to(out.dtype.element_ty), mask=valid)

    def tile(C: int) -> tuple[int, int]:
        """Rows and channels of a block."""
        some = min(128, max(16, triton.next_power_of_2(C)))
        return BLOCK // 2 // some, some

    def group_tile(places: int, C: int, groups: int) -> dict[str, int]:
        """A program takes as many groups as make 32 channels, and as many places as it can hold."""
        wide = C // groups
        many = min(groups, max(1, 32 // wide))
        while groups % many:
            many //= 2
        rows = min(triton.next_power_of_2(places), max(1, BLOCK // (many * wide)))
        return dict(
            PLACES=places, C=C, GROUPS=many, WIDE=wide, ROWS=rows, num_warps=8 if rows * many * wide > 2048 else 4
        )

    @torch.library.custom_op("undrift::stacked_group_norm", mutates_args=())
    def to_groups(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """GroupNorm of x [S, B, C, H, W] with w and b [S, C]; and the mean and the scale of each channel [S, B, C]."""
        x, (w, b) = last(x), (t if t.stride(1) == 1 else t.contiguous() for t in (w, b))
        S, B, high, wide, C = x.shape
        n = group_tile(high * wide, C, groups)
        out = allocate(x, *x.shape)
        means, scales = (allocate(x, S, B, C, dtype=torch.float32) for _ in range(2))
        grid = S * B, C // (n["GROUPS"] * n["WIDE"])
        launch(_group_norm, grid, x, w, b, out, means, scales, w.stride(0), b.stride(0), B, EPS=eps, **n)
        return first(out), means, scales

    @torch.library.custom_op("undrift::stacked_group_norm_back", mutates_args=())
    def from_groups(
        x: Tensor, d: Tensor, w: Tensor, means: Tensor, scales: Tensor, groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of x, w and b for the outputs' gradient d."""
        x, d, w = last(x), last(d), w if w.stride(1) == 1 else w.contiguous()
        S, B, high, wide, C = x.shape
        n = group_tile(high * wide, C, groups)
        out = allocate(x, *x.shape)
        each = [allocate(x, S, B, C, dtype=torch.float32) for _ in range(2)]
        grid = S * B, C // (n["GROUPS"] * n["WIDE"])
        launch(_group_norm_back, grid, x, d, w, means, scales, out, *each, w.stride(0), B, **n)
        dw, db = (allocate(x, S, C, dtype=torch.float32) for _ in range(2))
        launch(_add_up, (S, triton.cdiv(C, CHANNELS)), *each, dw, db, B, C=C, PARTS=PARTS, SOME=CHANNELS)
        return first(out), dw, db

    def cut(rows: int, clients: int, pieces: int, step: int) -> tuple[int, int]:
        """Into how many parts the rows of a client are cut, and how long a part is: enough programs for a GPU."""
        parts = max(1, min(1024 // max(1, clients * pieces), rows // (4 * step)))
        share = triton.cdiv(triton.cdiv(rows, parts), step) * step
        return triton.cdiv(rows, share), share

    @torch.library.custom_op("undrift::stacked_batch_norm", mutates_args=())
    def to_batch(
        x: Tensor, real: Tensor | None, w: Tensor, b: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """BatchNorm of x [S, B, C, H, W] by its real samples [S, B]; and their mean, variance [S, C] and number [S, 1]."""
        x, real = last(x), None if real is None else real.float().contiguous()
        (S, B, H, W, C), (rows, some) = x.shape, tile(x.shape[4])
        places, pieces = B * H * W, triton.cdiv(C, some)
        parts, share = cut(places, S, pieces, rows)
        means, squares = (allocate(x, S, parts, C, dtype=torch.float32) for _ in range(2))
        counts = allocate(x, S, parts, 1, dtype=torch.float32)
        n = dict(PLACES=H * W, C=C, MASKED=real is not None, ROWS=rows, SOME=some)
        launch(_moments, (S, parts, pieces), x, x if real is None else real, counts, means, squares, B, share, **n)
        w, b = (t if t.stride(1) == 1 else t.contiguous() for t in (w, b))
        number, (mean, var, scale) = allocate(counts, S, 1), (allocate(counts, S, C) for _ in range(3))
        launch(
            _join_moments, (S, triton.cdiv(C, CHANNELS)), counts, means, squares, w, w.stride(0), number, mean, var, scale,
            parts, EPS=eps, C=C, PARTS=PARTS, SOME=CHANNELS,
        )  # fmt: skip
        out = allocate(x, *x.shape)
        n = dict(C=C, ROWS=rows, SOME=some)
        launch(_scale, (S, triton.cdiv(places, rows), pieces), x, out, mean, scale, b, b.stride(0), places, **n)
        return first(out), mean, var, number

    @torch.library.custom_op("undrift::stacked_batch_norm_back", mutates_args=())
    def from_batch(
        x: Tensor, d: Tensor, real: Tensor | None, w: Tensor, mean: Tensor, var: Tensor, number: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of x, w and b for the outputs' gradient d."""
        x, d, real = last(x), last(d), None if real is None else real.float().contiguous()
        (S, B, H, W, C), (rows, some) = x.shape, tile(x.shape[4])
        places, pieces, w = B * H * W, triton.cdiv(C, some), w if w.stride(1) == 1 else w.contiguous()
        parts, share = cut(places, S, pieces, rows)
        plain, turned = (allocate(x, S, parts, C, dtype=torch.float32) for _ in range(2))
        n = dict(C=C, ROWS=rows, SOME=some)
        launch(_sums, (S, parts, pieces), x, d, mean, var, plain, turned, places, share, EPS=eps, **n)
        dw, db, slope, level, factor = (allocate(x, S, C, dtype=torch.float32) for _ in range(5))
        launch(
            _join_sums, (S, triton.cdiv(C, CHANNELS)), plain, turned, var, number, w, w.stride(0), dw, db, slope, level, factor,
            parts, EPS=eps, C=C, PARTS=PARTS, SOME=CHANNELS,
        )  # fmt: skip
        out = allocate(x, *x.shape)
        launch(
            _scale_back, (S, triton.cdiv(places, rows), pieces),
            x, d, x if real is None else real, out, mean, slope, level, factor, places, B,
            PLACES=H * W, MASKED=real is not None, **n,
        )  # fmt: skip
        return first(out), dw, db

    def _like(x: Tensor) -> Tensor:
        return first(x.new_empty(*x.shape[:2], *x.shape[3:], x.shape[2]))

    def _floats(x: Tensor, *shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    to_groups.register_fake(lambda x, *_: (_like(x), _floats(x, *x.shape[:3]), _floats(x, *x.shape[:3])))
    to_batch.register_fake(
        lambda x, *_: (_like(x), _floats(x, len(x), x.shape[2]), _floats(x, len(x), x.shape[2]), _floats(x, len(x), 1))
    )
    for op in (from_groups, from_batch):
        op.register_fake(lambda x, *_: (_like(x), _floats(x, len(x), x.shape[2]), _floats(x, len(x), x.shape[2])))

    def _keep_groups(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, b, ctx.groups, ctx.eps = inputs
        ctx.rehearsal = current.get()
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros for those
        ctx.save_for_backward(x, w, b, *output[1:])

    def _groups_backward(ctx: Any, d: Tensor, *_: Any) -> Any:
        x, w, b, means, scales = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated again
            plain = torch.vmap(lambda x, w, b: torch.nn.functional.group_norm(x, ctx.groups, w, b, ctx.eps))
            return *torch.autograd.grad(plain(x, w, b), (x, w, b), d, create_graph=True), None, None
        with take_part(ctx.rehearsal):
            return *from_groups(x, d, w, means, scales, ctx.groups), None, None

    to_groups.register_autograd(_groups_backward, setup_context=_keep_groups)

    def _keep_batch(ctx: Any, inputs: Any, output: Any) -> None:
        x, real, w, b, ctx.eps = inputs
        ctx.rehearsal = current.get()
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros for those
        ctx.save_for_backward(x, real, w, b, *output[1:])

    def _batch_backward(ctx: Any, d: Tensor, *_: Any) -> Any:
        x, real, w, b, mean, var, number = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = torch.vmap(
                lambda x, real, w, b: normalise(x, real, w, b, ctx.eps)[0], (0, None if real is None else 0, 0, 0)
            )
            dx, dw, db = torch.autograd.grad(plain(x, real, w, b), (x, w, b), d, create_graph=True)
        else:
            with take_part(ctx.rehearsal):
                dx, dw, db = from_batch(x, d, real, w, mean, var, number, ctx.eps)
        return dx, None, dw, db, None

    to_batch.register_autograd(_batch_backward, setup_context=_keep_batch)

    @torch.library.custom_op("undrift::group_norm", mutates_args=())
    def _group_norm_op(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Tensor:
        return torch.nn.functional.group_norm(x, groups, w.to(x.dtype), b.to(x.dtype), eps)

    _group_norm_op.register_fake(lambda x, w, b, groups, eps: torch.empty_like(x))

    @_group_norm_op.register_vmap
    def _(info: Any, dims: Any, x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, int]:
        return to_groups(*clients_first(info, dims, x, w, b), groups, eps)[0], 0

    @torch.library.custom_op("undrift::batch_norm", mutates_args=())
    def _batch_norm_op(
        x: Tensor, real: Tensor | None, w: Tensor, b: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return normalise(x, real, w, b, eps)

    _batch_norm_op.register_fake(
        lambda x, real, w, b, eps: (
            torch.empty_like(x),
            *(x.new_empty(n, dtype=torch.float32) for n in (len(w), len(w), 1)),
        )
    )

    @_batch_norm_op.register_vmap
    def _(info: Any, dims: Any, x: Tensor, real: Tensor | None, w: Tensor, b: Tensor, eps: float) -> Any:
        return to_batch(*clients_first(info, dims, x, real, w, b), eps), (0, 0, 0, 0)
