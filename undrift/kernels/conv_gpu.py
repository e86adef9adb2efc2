"""A convolution with few channels over stacked clients on a GPU: `vmap(F.conv2d)` without a kernel for each client.

cuDNN runs a stacked convolution as a grouped one, client by client and without tensor cores: LeNet-5's first layer took half of a
step. Here the output places of all samples of a client form one matrix product, whose rows are the taps (entries) of a filter.
The inputs under a tap are read in place. cuDNN computes the gradient of the inputs, which a first layer does not need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undrift.core.device import half_precision
from undrift.core.forms import faster
from undrift.kernels import devices
from undrift.kernels.launch import allocate, clients_first, current, launch, only_stacked, take_part, tl, triton
from undrift.oracle.layers import StackedConv2d, conv2d

CHANNELS, OUTPUTS, TAPS = 8, 64, 256  # limits: channels of the inputs, filters, and entries of a filter
BLOCK = 128  # output places of a program
aten: Any = torch.ops.aten


def serves(layer: StackedConv2d, x: Tensor) -> bool:
    """Whether the kernels serve a layer of stacked clients and inputs x [B, C, H, W] of one of them."""
    if not (layer.current.stacked and x.dim() == 4 and devices.gpu(x.device)) or half_precision(x.device):
        return False
    w, padding = layer.weight, layer.padding
    simple = (layer.stride, layer.dilation, layer.groups, layer.padding_mode) == ((1, 1), (1, 1), 1, "zeros")
    simple = simple and padding in ((0, 0), (1, 1), (2, 2), (3, 3)) and x.dtype == w.dtype == torch.float32
    return simple and suits(x.shape, w.shape, int(padding[0])) and only_stacked() and devices.tensor_cores(x.device)


@faster(conv2d, when=serves)
def conv2d_gpu(layer: StackedConv2d, x: Tensor) -> Tensor:
    return convolution(x, layer.weight, layer.bias, int(layer.padding[0]))


def suits(x: torch.Size, w: torch.Size, padding: int) -> bool:
    """Whether inputs and filters have few channels and fit each other."""
    (B, C, H, W), (filters, channels, k, across) = x, w
    OH, OW = H + 2 * padding - k + 1, W + 2 * padding - k + 1
    narrow = C == channels <= CHANNELS and filters <= OUTPUTS and C * k * k <= TAPS and k == across
    return narrow and min(OH, OW) > 0 and B * OH * OW <= 65535 * BLOCK  # the largest grid of a GPU


def convolution(x: Tensor, w: Tensor, b: Tensor | None, padding: int) -> Tensor:
    """F.conv2d(x, w, b, padding=padding), for use under vmap."""
    out: Tensor = torch.ops.undrift.few_channels(x, w, b, padding)
    return out


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _load_inputs(  # type: ignore[no-untyped-def]
        x, place, inside, first, TAPS: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, k: tl.constexpr,
        PAD: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, SOME: tl.constexpr,
    ):  # fmt: skip
        """[SOME, PLACES]: the inputs under the taps from `first` on, at the output places of one client."""
        tap = first + tl.arange(0, SOME)
        channel, down, right = tap // (k * k), tap // k % k - PAD, tap % k - PAD
        sample, row, column = place // (OH * OW), place // OW % OH, place % OW
        valid = (tap < TAPS)[:, None] & inside[None, :]
        if PAD > 0:
            y, z = row[None, :] + down[:, None], column[None, :] + right[:, None]
            valid = valid & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        at = (channel * (H * W) + down * W + right)[:, None] + (sample * (C * H * W) + row * W + column)[None, :]
        return tl.load(x + at, mask=valid, other=0.0)

    # One compilation serves the first step, in which all clients share their filters, and the later ones.
    @triton.jit(do_not_specialize=["apart", "b_apart"], do_not_specialize_on_alignment=["w", "b"])  # type: ignore[untyped-decorator]
    def _forward(  # type: ignore[no-untyped-def]
        x, w, b, out, apart, b_apart, places, FILTERS: tl.constexpr, M: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
        H: tl.constexpr, W: tl.constexpr, k: tl.constexpr, PAD: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
        BIASED: tl.constexpr, PRECISION: tl.constexpr, PLACES: tl.constexpr, SOME: tl.constexpr,
    ):  # fmt: skip
        """PLACES output places of one client."""
        client = tl.program_id(0).to(tl.int64)
        place, o = tl.program_id(1) * PLACES + tl.arange(0, PLACES), tl.arange(0, M)
        inside, samples = place < places, places // (OH * OW)
        x += client * (samples * C * H * W)
        total = tl.zeros([M, PLACES], tl.float32)
        for first in tl.static_range(0, TAPS, SOME):
            tap = first + tl.arange(0, SOME)
            filters = tl.load(
                w + client * apart + o[:, None] * TAPS + tap[None, :],
                mask=(o < FILTERS)[:, None] & (tap < TAPS)[None, :], other=0.0,
            )  # fmt: skip
            h = _load_inputs(x, place, inside, first, TAPS, C, H, W, k, PAD, OH, OW, SOME)
            total = tl.dot(filters, h, total, input_precision=PRECISION)
        if BIASED:
            total += tl.load(b + client * b_apart + o, mask=o < FILTERS, other=0.0)[:, None]
        at = place // (OH * OW) * (FILTERS * OH * OW) + place % (OH * OW)
        out += client * (samples * FILTERS * OH * OW)
        tl.store(out + o[:, None] * (OH * OW) + at[None, :], total, mask=(o < FILTERS)[:, None] & inside[None, :])

    @triton.jit  # type: ignore[untyped-decorator]
    def _filters(  # type: ignore[no-untyped-def]
        x, d, out, places, share, FILTERS: tl.constexpr, M: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
        W: tl.constexpr, k: tl.constexpr, PAD: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
        PRECISION: tl.constexpr, PLACES: tl.constexpr, SOME: tl.constexpr,
    ):  # fmt: skip
        """The gradient of SOME taps of one client's filters over a share of its places."""
        client, part, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * SOME
        o, samples = tl.arange(0, M), places // (OH * OW)
        x += client * (samples * C * H * W)
        d += client * (samples * FILTERS * OH * OW)
        g = tl.zeros([M, SOME], tl.float32)
        for begin in range(part * share, min((part + 1) * share, places), PLACES):
            place = begin + tl.arange(0, PLACES)
            inside = place < places
            at = place // (OH * OW) * (FILTERS * OH * OW) + place % (OH * OW)
            back = tl.load(
                d + o[:, None] * (OH * OW) + at[None, :], mask=(o < FILTERS)[:, None] & inside[None, :], other=0.0
            )
            h = _load_inputs(x, place, inside, first, TAPS, C, H, W, k, PAD, OH, OW, SOME)
            g = tl.dot(back, tl.trans(h), g, input_precision=PRECISION)
        tap = first + tl.arange(0, SOME)
        out += (client * tl.num_programs(1) + part) * (FILTERS * TAPS)
        tl.store(out + o[:, None] * TAPS + tap[None, :], g, mask=(o < FILTERS)[:, None] & (tap < TAPS)[None, :])

    def sizes(x: Tensor, w: Tensor, padding: int) -> dict[str, int]:
        (*_, C, H, W), (_, FILTERS, _, k, _) = x.shape, w.shape
        OH, OW = H + 2 * padding - k + 1, W + 2 * padding - k + 1
        M = max(16, triton.next_power_of_2(FILTERS))
        return dict(FILTERS=FILTERS, M=M, TAPS=C * k * k, C=C, H=H, W=W, k=k, PAD=padding, OH=OH, OW=OW)

    @torch.library.custom_op("undrift::stacked_few_channels", mutates_args=())
    def _convolve(x: Tensor, w: Tensor, b: Tensor | None, padding: int) -> Tensor:
        """x [S, B, C, H, W], w [S, FILTERS, C, k, k] and b [S, FILTERS] to [S, B, FILTERS, H', W']."""
        x, w = x.contiguous(), w if w[0].is_contiguous() else w.contiguous()
        b = b if b is None or b.stride(1) == 1 else b.contiguous()
        n = sizes(x, w, padding)
        out = allocate(x, *x.shape[:2], n["FILTERS"], n["OH"], n["OW"])
        places = x.shape[1] * n["OH"] * n["OW"]
        launch(
            _forward, (len(x), triton.cdiv(places, BLOCK)),
            x, w, b, out, w.stride(0), 0 if b is None else b.stride(0), places, **n, BIASED=b is not None,
            PRECISION=devices.precision(), PLACES=BLOCK, SOME=32 if n["M"] == 16 else 16, num_warps=2,
        )  # fmt: skip
        return out

    @torch.library.custom_op("undrift::few_channels_gradient", mutates_args=())
    def _gradient(x: Tensor, d: Tensor, w: Tensor, padding: int) -> Tensor:
        """The gradient of w [S, FILTERS, C, k, k] from the outputs' gradient d [S, B, FILTERS, H', W']."""
        x, d, n = x.contiguous(), d.contiguous(), sizes(x, w, padding)
        some = 32 if n["M"] == 16 else 64
        places, blocks = x.shape[1] * n["OH"] * n["OW"], triton.cdiv(n["TAPS"], some)
        parts = max(1, min(2048 // (len(x) * blocks), places // 512))  # enough programs for a GPU
        share = triton.cdiv(triton.cdiv(places, parts), 64) * 64
        out = allocate(x, len(x), parts, *w.shape[1:])
        launch(
            _filters, (len(x), parts, blocks),
            x, d, out, places, share, **n, PRECISION=devices.precision(), PLACES=64, SOME=some, num_warps=2,
        )  # fmt: skip
        return out.sum(1)

    @_convolve.register_fake
    def _(x: Tensor, w: Tensor, b: Tensor | None, padding: int) -> Tensor:
        edge = 2 * padding - w.shape[-1] + 1
        return x.new_empty(*x.shape[:2], w.shape[1], x.shape[3] + edge, x.shape[4] + edge)

    _gradient.register_fake(lambda x, d, w, padding: x.new_empty(w.shape))

    def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, w, b, ctx.padding = inputs
        ctx.biased, ctx.rehearsal = b is not None, current.get()
        ctx.save_for_backward(x, w)

    def _backward(ctx: Any, d: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with take_part(ctx.rehearsal):
            g = torch.ops.undrift.few_channels_gradient(x, d, w, ctx.padding)
        before = torch.vmap(_before, (0, 0, 0, None))(d, x, w, ctx.padding) if ctx.needs_input_grad[0] else None
        return before, g, d.sum((1, 3, 4)) if ctx.biased else None, None

    def _keep_gradient(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, d, _, ctx.padding = inputs
        ctx.save_for_backward(x, d)

    def _backward_gradient(ctx: Any, dw: Tensor) -> Any:
        """The filters' gradient is linear in x and in d, so its derivatives are convolutions with dw."""
        x, d = ctx.saved_tensors
        of_x = torch.vmap(_before, (0, 0, 0, None))(d, x, dw, ctx.padding) if ctx.needs_input_grad[0] else None
        of_d = torch.ops.undrift.stacked_few_channels(x, dw, None, ctx.padding) if ctx.needs_input_grad[1] else None
        return of_x, of_d, None, None

    def _before(d: Tensor, x: Tensor, w: Tensor, padding: int) -> Tensor:
        how = ((1, 1), (padding, padding), (1, 1), False, (0, 0), 1, (True, False, False))
        before: Tensor = aten.convolution_backward.default(d, x, w, None, *how)[0]
        return before

    _convolve.register_autograd(_backward, setup_context=_keep)
    _gradient.register_autograd(_backward_gradient, setup_context=_keep_gradient)

    @torch.library.custom_op("undrift::few_channels", mutates_args=())
    def _op(x: Tensor, w: Tensor, b: Tensor | None, padding: int) -> Tensor:
        return torch.conv2d(x, w, b, padding=padding)

    _op.register_fake(lambda x, w, b, padding: torch.conv2d(x, w, b, padding=padding))

    @_op.register_vmap
    def _(info: Any, dims: Any, x: Tensor, w: Tensor, b: Tensor | None, padding: int) -> tuple[Tensor, int]:
        return torch.ops.undrift.stacked_few_channels(*clients_first(info, dims, x, w, b), padding), 0
