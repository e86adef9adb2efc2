"""Fused SGD update of stacked dense layers on a GPU: x - rate g, without storing g.

Vectors that exceed the cache make a step memory-bound: PyTorch writes g, reads it again and writes x - rate g. Here each layer's
gradient is subtracted from the weights as it is computed, so x is read once and written once.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from undrift.core.forms import faster
from undrift.kernels import devices
from undrift.kernels.chain import dense_step, overflows
from undrift.kernels.launch import allocate, launch, tl, triton


@faster(dense_step, when=lambda x, rate, outs, back, biased: overflows(x.numel(), x.dtype, x.device))
def dense_step_gpu(
    x: Tensor, rate: float | Tensor, outs: list[Tensor], back: list[Tensor], biased: list[bool]
) -> Tensor:
    """Inputs and gradients are transposed, because tensor cores read the samples contiguously."""
    rates, number = (rate, 0.0) if isinstance(rate, Tensor) else (None, rate)
    result: Tensor = torch.ops.undrift.stepped(x, rates, number, outs, back, biased)
    return result


if triton is not None:
    M, N, K = 64, 64, 32  # rows and columns of a tile of the weights, samples in one product

    @triton.jit  # type: ignore[untyped-decorator]
    def _step(  # type: ignore[no-untyped-def]
        x, new, outs, back, rates, rate, x_apart, apart, batch, length,
        SIZES: tl.constexpr, BIASED: tl.constexpr, PLACES: tl.constexpr, TILES: tl.constexpr, RATES: tl.constexpr,
        PRECISION: tl.constexpr, ALIGNED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """One tile of one client's weights; layer k has the tiles TILES[k] to TILES[k + 1] - 1."""
        tile, client = tl.program_id(0) % TILES[len(BIASED)], (tl.program_id(0) // TILES[len(BIASED)]).to(tl.int64)
        x += client * (x_apart * ALIGNED)  # tells the compiler the alignment, so that it moves four entries at once
        new += client * (apart * ALIGNED)
        if RATES:
            rate = tl.load(rates + client)
        for k in tl.static_range(len(BIASED)):
            if (tile >= TILES[k]) & (tile < TILES[k + 1]):
                out, d = outs[k] + client * SIZES[k] * batch, back[k] + client * SIZES[k + 1] * batch
                _layer(
                    x + PLACES[k], new + PLACES[k], out, d, rate, batch, tile - TILES[k],
                    SIZES[k], SIZES[k + 1], BIASED[k], PRECISION, M, N, K,
                )  # fmt: skip
        if tile == 0:  # copy the padding after the last layer
            for first in range(PLACES[len(BIASED)], length, 32):
                rest = first + tl.arange(0, 32)
                tl.store(new + rest, tl.load(x + rest, mask=rest < length, other=0.0), mask=rest < length)

    @triton.jit  # type: ignore[untyped-decorator]
    def _layer(  # type: ignore[no-untyped-def]
        x, new, out, back, rate, batch, tile,
        n: tl.constexpr, m: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
        M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """M x N weights of one layer; the first column of tiles also updates the bias."""
        across: tl.constexpr = (n + N - 1) // N
        row, column = tile // across * M + tl.arange(0, M), tile % across * N + tl.arange(0, N)
        places, inside = row[:, None] * n + column[None, :], (row < m)[:, None] & (column < n)[None, :]
        weights = tl.load(x + places, mask=inside, other=0.0)  # loaded early, because memory is slow
        g = tl.zeros([M, N], tl.float32)
        for first in range(0, batch, K):
            b = first + tl.arange(0, K)
            valid = (b < batch)[None, :]
            d = tl.load(back + row[:, None] * batch + b[None, :], mask=(row < m)[:, None] & valid, other=0.0)
            h = tl.load(out + column[:, None] * batch + b[None, :], mask=(column < n)[:, None] & valid, other=0.0)
            g = tl.dot(d, tl.trans(h), g, input_precision=PRECISION)
        tl.store(new + places, weights - rate * g, mask=inside)
        if BIASED and tile % across == 0:
            sums = tl.zeros([M], tl.float32)
            for first in range(0, batch, K):
                b = first + tl.arange(0, K)
                used = (row < m)[:, None] & (b < batch)[None, :]
                sums += tl.sum(tl.load(back + row[:, None] * batch + b[None, :], mask=used, other=0.0), 1)
            bias = m * n + row
            tl.store(new + bias, tl.load(x + bias, mask=row < m, other=0.0) - rate * sums, mask=row < m)

    @torch.library.custom_op("undrift::stepped", mutates_args=())
    def _op(
        x: Tensor, rates: Tensor | None, rate: float, outs: list[Tensor], back: list[Tensor], biased: list[bool]
    ) -> Tensor:
        x, rates = x if x.stride(1) == 1 else x.contiguous(), None if rates is None else rates.contiguous()
        new, (S, P), B = allocate(x, *x.shape), x.shape, outs[0].shape[2]
        sizes = outs[0].shape[1], *(d.shape[1] for d in back)
        layers = list(zip(sizes, sizes[1:], biased, strict=False))
        places = itertools.accumulate(((n + bias) * m for n, m, bias in layers), initial=0)
        aligned = math.gcd(x.stride(0), P, 4)
        tiles = list(itertools.accumulate((triton.cdiv(m, M) * triton.cdiv(n, N) for n, m, _ in layers), initial=0))
        launch(
            _step, (S * tiles[-1],),
            x, new, tuple(t.contiguous() for t in outs), tuple(t.contiguous() for t in back), rates, rate,
            x.stride(0) // aligned, P // aligned, B, P,
            SIZES=tuple(sizes), BIASED=tuple(biased), PLACES=tuple(places), TILES=tuple(tiles), RATES=rates is not None,
            PRECISION=devices.precision(), ALIGNED=aligned, M=M, N=N, K=K, num_warps=4, num_stages=3,
        )  # fmt: skip
        return new

    _op.register_fake(lambda x, rates, rate, outs, back, biased: x.new_empty(x.shape))
