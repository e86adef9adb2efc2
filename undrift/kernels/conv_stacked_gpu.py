"""Convolutions over stacked clients on a GPU, each client with its own filters: `vmap(F.conv2d)`.

cuDNN runs a stacked convolution as a grouped one, far below the speed of the card. Here channels are last in memory. Where there
are many of them each client is a convolution of its own, several side by side (`Apart`). Where there are few, all clients are in
one launch, which reads the inputs under a filter in place (`Blocks`). Three products belong together, and the derivatives of
each are the other two:

    to_outputs(x, w)     y[place, o] = sum over taps and channels of x[place under tap, c] w[o, tap, c]
    to_inputs(d, w)      the gradient of x for the gradient d of y
    to_filters(x, d)     the gradient of w

Products are in the precision of x (float32, as TF32 where that is allowed, or bfloat16), sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.device import half_precision
from undrift.core.forms import faster
from undrift.kernels import conv_each_gpu, devices
from undrift.kernels.choices import choose
from undrift.kernels.launch import allocate, clients_first, current, launch, only_stacked, take_part, tl, triton
from undrift.oracle.layers import StackedConv2d, conv2d

HALF = torch.bfloat16
FEW = 8  # channels of an input that are taken together with the taps
WIDE = 64  # channels from which on clients apart are the fastest: 2 to 3 times as fast as all in one launch, on an H200
BRANCHES = 8


class Shape(NamedTuple):
    """The sizes of a convolution that a kernel is compiled for."""

    N: int  # filters
    C: int  # channels of the inputs
    H: int
    W: int
    k: int
    STRIDE: int
    PAD: int
    OH: int
    OW: int

    @classmethod
    def of(cls, x: torch.Size, w: torch.Size, stride: int, padding: int) -> Shape:
        """For inputs [S, B, C, H, W] and filters [S, N, C, k, k]."""
        (C, H, W), (N, k) = x[-3:], w[-4::2]
        return cls(N, C, H, W, k, stride, padding, *((side + 2 * padding - k) // stride + 1 for side in (H, W)))


class Apart(NamedTuple):
    """Each client is a convolution of cuDNN's."""

    branches: int  # how many run side by side


class Blocks(NamedTuple):
    """All clients in one launch: the block of the output that a program computes, and how much it takes in a step."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


def serves(layer: StackedConv2d, x: Tensor) -> bool:
    """Whether the kernels serve a layer of stacked clients and inputs x [B, C, H, W] of one of them."""
    if not (layer.current.stacked and x.dim() == 4 and devices.gpu(x.device)):
        return False
    (N, C, k, across), stride, padding = layer.weight.shape, layer.stride, layer.padding
    simple = (layer.dilation, layer.groups, layer.padding_mode) == ((1, 1), 1, "zeros") and k == across
    simple = simple and stride[0] == stride[1] and padding in tuple((n, n) for n in range(k))
    known = layer.weight.dtype == torch.float32 and x.dtype in (torch.float32, HALF)
    wide = N % 16 == 0 and (C % 16 == 0 or C <= FEW) and x.shape[1] == C
    large = min(x.shape[-2:]) + 2 * int(padding[0]) >= k
    suits = half_precision(x.device) or (
        k <= 3 and C > FEW
    )  # in float32 wide filters are faster as grouped convolutions
    return simple and known and wide and large and suits and only_stacked() and devices.tensor_cores(x.device)


@faster(conv2d, when=serves)
def conv2d_stacked(layer: StackedConv2d, x: Tensor) -> Tensor:
    x = x.to(HALF) if half_precision(x.device) else x
    return convolution(x, layer.weight, layer.bias, layer.stride[0], int(layer.padding[0]))


def last(x: Tensor) -> Tensor:
    """[S, B, C, H, W] as [S, B, H, W, C] in one piece of memory; without a copy if channels are last already."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def first(x: Tensor) -> Tensor:
    """The reverse, as a view."""
    return x.permute(0, 1, 4, 2, 3)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _under(  # type: ignore[no-untyped-def]
        x, place, inside, first, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, k: tl.constexpr, STRIDE: tl.constexpr,
        PAD: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, SOME: tl.constexpr,
    ):  # fmt: skip
        """[PLACES, SOME]: the inputs under the entries (tap, channel) of a filter from `first` on, at some output places."""
        y, z = place // OW % OH * STRIDE - PAD, place % OW * STRIDE - PAD
        corner = (place // (OH * OW) * H + y) * W + z
        if C % SOME == 0:  # all of one tap
            down, right = first // C // k, first // C % k
            valid = inside & (y + down >= 0) & (y + down < H) & (z + right >= 0) & (z + right < W)
            at = ((corner + down * W + right) * C)[:, None] + (first % C + tl.arange(0, SOME))[None, :]
            h = tl.load(x + at, mask=valid[:, None], other=0.0)
        else:
            entry = first + tl.arange(0, SOME)
            down, right = entry // C // k, entry // C % k
            row, column = y[:, None] + down[None, :], z[:, None] + right[None, :]
            valid = inside[:, None] & (entry < k * k * C)[None, :]
            valid = valid & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            at = (corner * C)[:, None] + ((down * W + right) * C + entry % C)[None, :]
            h = tl.load(x + at, mask=valid, other=0.0)
        return h

    # One compilation serves the first step, in which all clients share their filters, and the later ones.
    @triton.jit(do_not_specialize=["apart"])  # type: ignore[untyped-decorator]
    def _outputs(  # type: ignore[no-untyped-def]
        x, w, out, apart, places, N: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
        k: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
        PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        """ROWS output places and COLUMNS filters of one client."""
        client = tl.program_id(0).to(tl.int64)
        place, o = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside, samples = place < places, places // (OH * OW)
        x += client * (samples * H * W * C)
        w += client * apart
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, k * k * C, STEP):
            h = _under(x, place, inside, first, C, H, W, k, STRIDE, PAD, OH, OW, STEP)
            entry = first + tl.arange(0, STEP)
            valid = (o < N)[None, :] & (entry < k * k * C)[:, None]
            f = tl.load(w + o[None, :] * (k * k * C) + entry[:, None], mask=valid, other=0.0)
            total = tl.dot(h, f, total, input_precision=PRECISION)
        out += client * (samples * OH * OW * N)
        at = place[:, None] * N + o[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside[:, None] & (o < N)[None, :])

    @triton.jit(do_not_specialize=["apart"])  # type: ignore[untyped-decorator]
    def _inputs(  # type: ignore[no-untyped-def]
        d, w, out, apart, samples, N: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, k: tl.constexpr,
        STRIDE: tl.constexpr, PAD: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, PRECISION: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        """ROWS input places and COLUMNS channels of one client.

        An input meets every STRIDE-th tap; which ones depends on the remainders of its row and column, so that the places of a
        program have the same remainders.
        """
        client, c = tl.program_id(0).to(tl.int64), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        kind, block = tl.program_id(1) % (STRIDE * STRIDE), tl.program_id(1) // (STRIDE * STRIDE)
        top, left = kind // STRIDE, kind % STRIDE
        high, wide = (H - top + STRIDE - 1) // STRIDE, (W - left + STRIDE - 1) // STRIDE
        place = block * ROWS + tl.arange(0, ROWS)
        sample, row, column = place // (high * wide), place // wide % high, place % wide
        inside = sample < samples
        down, right = (top + PAD) % STRIDE, (left + PAD) % STRIDE  # the first tap
        y, z = row + (top + PAD - down) // STRIDE, column + (left + PAD - right) // STRIDE  # the output under it
        taps, across = (k - down + STRIDE - 1) // STRIDE, (k - right + STRIDE - 1) // STRIDE
        d += client * (samples * OH * OW * N)
        w += client * apart
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, taps * across * N, STEP):
            tap, o = first // N, first % N + tl.arange(0, STEP)
            i, j = tap // across, tap % across
            valid = inside & (y >= i) & (y - i < OH) & (z >= j) & (z - j < OW)
            at = ((sample * OH + y - i) * OW + z - j) * N
            h = tl.load(d + at[:, None] + o[None, :], mask=valid[:, None], other=0.0)
            entry = ((down + STRIDE * i) * k + right + STRIDE * j) * C
            f = tl.load(w + o[:, None] * (k * k * C) + (entry + c)[None, :], mask=(c < C)[None, :], other=0.0)
            total = tl.dot(h, f, total, input_precision=PRECISION)
        out += client * (samples * H * W * C)
        at = ((sample * H + top + STRIDE * row) * W + left + STRIDE * column) * C
        tl.store(
            out + at[:, None] + c[None, :], total.to(out.dtype.element_ty), mask=inside[:, None] & (c < C)[None, :]
        )

    @triton.jit  # type: ignore[untyped-decorator]
    def _entries(  # type: ignore[no-untyped-def]
        x, d, out, places, share, N: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, k: tl.constexpr,
        STRIDE: tl.constexpr, PAD: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
        PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        """The gradient of COLUMNS entries of ROWS filters of one client, over a share of its places."""
        client, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
        across: tl.constexpr = (k * k * C + COLUMNS - 1) // COLUMNS
        first, o = tl.program_id(2) % across * COLUMNS, tl.program_id(2) // across * ROWS + tl.arange(0, ROWS)
        samples = places // (OH * OW)
        x += client * (samples * H * W * C)
        d += client * (samples * OH * OW * N)
        g = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(part * share, min((part + 1) * share, places), STEP):
            place = begin + tl.arange(0, STEP)
            inside = place < places
            back = tl.load(d + place[:, None] * N + o[None, :], mask=inside[:, None] & (o < N)[None, :], other=0.0)
            h = _under(x, place, inside, first, C, H, W, k, STRIDE, PAD, OH, OW, COLUMNS)
            g = tl.dot(tl.trans(back), h, g, input_precision=PRECISION)
        entry = first + tl.arange(0, COLUMNS)
        out += (client * parts + part) * (N * k * k * C)
        tl.store(
            out + o[:, None] * (k * k * C) + entry[None, :], g, mask=(o < N)[:, None] & (entry < k * k * C)[None, :]
        )

    @triton.jit(do_not_specialize=["apart"], do_not_specialize_on_alignment=["w"])  # type: ignore[untyped-decorator]
    def _turn(w, out, apart, N, C, TAPS: tl.constexpr, ALL: tl.constexpr, SOME: tl.constexpr):  # type: ignore[no-untyped-def]
        """One filter [C, taps] of one client as [taps, C], in the precision of `out`."""
        client, o, tap = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ALL)
        c = tl.program_id(2) * SOME + tl.arange(0, SOME)
        valid = (tap < TAPS)[:, None] & (c < C)[None, :]
        f = tl.load(w + client * apart + o * C * TAPS + c[None, :] * TAPS + tap[:, None], mask=valid)
        out += (client * N + o) * C * TAPS
        tl.store(out + tap[:, None] * C + c[None, :], f.to(out.dtype.element_ty), mask=valid)

    @triton.jit  # type: ignore[untyped-decorator]
    def _gather(g, out, parts, N, C, TAPS: tl.constexpr, SOME: tl.constexpr):  # type: ignore[no-untyped-def]
        """The sum over parts of one filter's gradient [taps, C] of one client, as [C, taps], which is written in order."""
        client, o, entry = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * SOME + tl.arange(0, SOME)
        valid, c, tap = entry < C * TAPS, entry // TAPS, entry % TAPS
        g += (client * parts * N + o) * C * TAPS
        total = tl.zeros([SOME], tl.float32)
        for _ in range(0, parts):
            total += tl.load(g + tap * C + c, mask=valid, other=0.0)
            g += N * C * TAPS
        tl.store(out + (client * N + o) * C * TAPS + entry, total, mask=valid)

    def channels_last(w: Tensor, dtype: torch.dtype) -> Tensor:
        """Filters [S, N, C, k, k] as [S, N, k, k, C]; one set of them if all clients share it."""
        N, C, k, _ = w.shape[1:]
        apart, w = w.stride(0), w if w[0].is_contiguous() else w.contiguous()
        clients = len(w) if apart else 1
        out = allocate(w, clients, N, k, k, C, dtype=dtype)
        some = min(128, triton.next_power_of_2(C))
        sizes = dict(TAPS=k * k, ALL=triton.next_power_of_2(k * k), SOME=some, num_warps=1 if some < 64 else 4)
        launch(_turn, (clients, N, triton.cdiv(C, some)), w, out, w.stride(0), N, C, **sizes)
        return out

    def up(n: int, most: int) -> int:
        """The next power of two, at least 16, which is the least of a product, and at most `most`."""
        return min(most, max(16, int(triton.next_power_of_2(n))))

    def forms(kind: str, shape: Shape, dtype: torch.dtype) -> list[Apart | Blocks]:
        """The forms worth trying."""
        if min(shape.N, shape.C) >= WIDE:
            return [Apart(BRANCHES)]
        return [blocks(kind, shape, dtype), Apart(BRANCHES)]

    def blocks(kind: str, shape: Shape, dtype: torch.dtype) -> Blocks:
        """The fastest of some hundred on an H200."""
        half = dtype != torch.float32
        if kind == "filters":
            rows, columns = up(shape.N, 64), 16 if shape.C % 32 and shape.C > FEW else 32
            return Blocks(rows, columns, 128 if rows == columns == 16 else 64, 4 if half and rows == 64 else 2, 2)
        wide, deep = (shape.N, shape.C) if kind == "outputs" else (shape.C, shape.N)
        step = next(
            (n for n in (64, 32, 16) if n <= (64 if half else 32) and deep % n == 0), 32
        )  # a block holds one tap, if possible
        return Blocks(256 if wide == 16 else 128, up(wide, 64), step, 4 if half else 8, 2)

    def sizes(shape: Shape, blocks: Blocks) -> dict[str, Any]:
        rows, columns, step, warps, stages = blocks
        block = dict(ROWS=rows, COLUMNS=columns, STEP=step, num_warps=warps, num_stages=stages)
        return shape._asdict() | dict(PRECISION=devices.precision()) | block

    def fastest(kind: str, shape: Shape, x: Tensor, run: Callable[[Any], Any]) -> Any:
        """What the fastest form gives, for so many clients and samples."""
        key = f"{kind} {'x'.join(map(str, (*x.shape[:2], *shape)))} {str(x.dtype).removeprefix('torch.')} {devices.precision()}"
        return run(choose(key, forms(kind, shape, x.dtype), run, x.device))

    @torch.library.custom_op("undrift::stacked_outputs", mutates_args=())
    def to_outputs(x: Tensor, w: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
        """x [S, B, C, H, W] and w [S, N, C, k, k] to [S, B, N, H', W']; and the filters as `inputs` takes them."""
        shape, x, f = Shape.of(x.shape, w.shape, stride, padding), last(x), channels_last(w, x.dtype)
        places, out = x.shape[1] * shape.OH * shape.OW, allocate(x, *x.shape[:2], shape.OH, shape.OW, shape.N)

        def run(form: Apart | Blocks) -> None:
            if isinstance(form, Apart):
                given, made, own = first(x), first(out), own_filters(f, len(x))
                conv_each_gpu.each(
                    len(x), form.branches, x.device,
                    lambda i: conv_each_gpu.outputs(given[i], own[i], made[i], stride, padding),
                )  # fmt: skip
                return
            launch(
                _outputs, (len(x), triton.cdiv(places, form.rows), triton.cdiv(shape.N, form.columns)),
                x, f, out, f.stride(0) if len(f) > 1 else 0, places, **sizes(shape, form),
            )  # fmt: skip

        fastest("outputs", shape, x, run)
        return first(out), f

    @torch.library.custom_op("undrift::stacked_inputs", mutates_args=())
    def to_inputs(d: Tensor, w: Tensor, f: Tensor, high: int, wide: int, stride: int, padding: int) -> Tensor:
        """The gradient of x [S, B, C, high, wide] for the outputs' gradient d [S, B, N, H', W']."""
        shape, d = Shape.of(torch.Size((w.shape[2], high, wide)), w.shape, stride, padding), last(d)
        out = allocate(d, *d.shape[:2], high, wide, shape.C)
        places = d.shape[1] * triton.cdiv(high, stride) * triton.cdiv(wide, stride)

        def run(form: Apart | Blocks) -> None:
            if isinstance(form, Apart):
                back, made, own = first(d), first(out), own_filters(f, len(d))
                conv_each_gpu.each(
                    len(d), form.branches, d.device,
                    lambda i: conv_each_gpu.inputs(back[i], own[i], made[i], stride, padding),
                )  # fmt: skip
                return
            launch(
                _inputs, (len(d), triton.cdiv(places, form.rows) * stride**2, triton.cdiv(shape.C, form.columns)),
                d, f, out, f.stride(0) if len(f) > 1 else 0, d.shape[1], **sizes(shape, form),
            )  # fmt: skip

        fastest("inputs", shape, d, run)
        return first(out)

    @torch.library.custom_op("undrift::stacked_filters", mutates_args=())
    def to_filters(x: Tensor, d: Tensor, k: int, stride: int, padding: int) -> Tensor:
        """The gradient of w [S, N, C, k, k]."""
        N, C = d.shape[2], x.shape[2]
        shape, x, d = Shape.of(x.shape, torch.Size((N, C, k, k)), stride, padding), last(x), last(d)
        S, places, some = len(x), x.shape[1] * shape.OH * shape.OW, up(k * k * C, 1024)
        out = allocate(x, S, N, C, k, k, dtype=torch.float32)

        def sum_parts(g: Tensor, out: Tensor, parts: int) -> None:
            grid = len(out), N, triton.cdiv(k * k * C, some)
            launch(_gather, grid, g, out, parts, N, C, TAPS=k * k, SOME=some, num_warps=4)

        def run(form: Apart | Blocks) -> None:
            if isinstance(form, Apart):
                seen, back = first(x), first(d)
                if current.get() is not None:
                    sum_parts(x, out[:1], 1)  # is compiled
                conv_each_gpu.each(
                    S, form.branches, x.device,
                    lambda i: sum_parts(conv_each_gpu.filters(seen[i], back[i], k, stride, padding), out[i : i + 1], 1),
                )  # fmt: skip
                return
            many = triton.cdiv(N, form.rows) * triton.cdiv(k * k * C, form.columns)
            parts = max(1, min(1024 // (S * many), places // (4 * form.step)))  # enough programs for a GPU
            share = triton.cdiv(triton.cdiv(places, parts), form.step) * form.step
            g = allocate(x, S, parts, N, k, k, C, dtype=torch.float32)
            launch(_entries, (S, parts, many), x, d, g, places, share, **sizes(shape, form))
            sum_parts(g, out, parts)

        fastest("filters", shape, x, run)
        return out

    def own_filters(f: Tensor, clients: int) -> list[Tensor]:
        """Every client's filters [N, C, k, k] of [S or 1, N, k, k, C]."""
        own = list(f.permute(0, 1, 4, 2, 3))
        return own if len(own) == clients else own * clients

    @to_outputs.register_fake
    def _(x: Tensor, w: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
        shape = Shape.of(x.shape, w.shape, stride, padding)
        out = first(x.new_empty(*x.shape[:2], shape.OH, shape.OW, shape.N))
        return out, x.new_empty(len(w) if w.stride(0) else 1, shape.N, shape.k, shape.k, shape.C)

    @to_inputs.register_fake
    def _(d: Tensor, w: Tensor, f: Tensor, high: int, wide: int, stride: int, padding: int) -> Tensor:
        return first(d.new_empty(*d.shape[:2], high, wide, w.shape[2]))

    @to_filters.register_fake
    def _(x: Tensor, d: Tensor, k: int, stride: int, padding: int) -> Tensor:
        return x.new_empty(len(x), d.shape[2], x.shape[2], k, k, dtype=torch.float32)

    def _keep_outputs(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.stride, ctx.padding = inputs
        ctx.rehearsal = current.get()
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for it
        ctx.save_for_backward(x, w, output[1])

    def _outputs_backward(ctx: Any, d: Tensor, _: Any) -> Any:
        x, w, f = ctx.saved_tensors
        how = ctx.stride, ctx.padding
        with take_part(ctx.rehearsal):
            dx = to_inputs(d, w, f, *x.shape[3:], *how) if ctx.needs_input_grad[0] else None
            return dx, to_filters(x, d, w.shape[-1], *how), None, None

    def _keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
        d, w, _, _, _, ctx.stride, ctx.padding = inputs
        ctx.rehearsal = current.get()
        ctx.save_for_backward(d, w)

    def _inputs_backward(ctx: Any, dx: Tensor) -> Any:
        d, w = ctx.saved_tensors
        how = ctx.stride, ctx.padding
        with take_part(ctx.rehearsal):
            of_d = to_outputs(dx, w, *how)[0] if ctx.needs_input_grad[0] else None
            of_w = to_filters(dx, d, w.shape[-1], *how) if ctx.needs_input_grad[1] else None
        return of_d, of_w, None, None, None, None, None

    def _keep_filters(ctx: Any, inputs: Any, output: Any) -> None:
        x, d, _, ctx.stride, ctx.padding = inputs
        ctx.rehearsal = current.get()
        ctx.save_for_backward(x, d)

    def _filters_backward(ctx: Any, dw: Tensor) -> Any:
        x, d = ctx.saved_tensors
        how = ctx.stride, ctx.padding
        with take_part(ctx.rehearsal):
            of_d, f = to_outputs(x, dw, *how)
            of_x = to_inputs(d, dw, f, *x.shape[3:], *how) if ctx.needs_input_grad[0] else None
        return of_x, of_d, None, None, None

    to_outputs.register_autograd(_outputs_backward, setup_context=_keep_outputs)
    to_inputs.register_autograd(_inputs_backward, setup_context=_keep_inputs)
    to_filters.register_autograd(_filters_backward, setup_context=_keep_filters)

    @torch.library.custom_op("undrift::conv2d", mutates_args=())
    def _conv2d(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
        return torch.conv2d(x, w.to(x.dtype), None, stride, padding)

    _conv2d.register_fake(_conv2d._init_fn)

    @_conv2d.register_vmap
    def _(info: Any, dims: Any, x: Tensor, w: Tensor, stride: int, padding: int) -> tuple[Tensor, int]:
        return to_outputs(*clients_first(info, dims, x, w), stride, padding)[0], 0


def convolution(x: Tensor, w: Tensor, b: Tensor | None, stride: int, padding: int) -> Tensor:
    """F.conv2d(x, w, b, stride, padding) with products in the precision of x, for use under vmap."""
    out: Tensor = torch.ops.undrift.conv2d(x, w, stride, padding)
    return out if b is None else out + b.to(out.dtype).view(-1, 1, 1)
