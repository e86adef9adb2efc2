"""Projection on cones of at most three constraints on a GPU, for float32 vectors: three kernels that read each vector twice.

The first sums the inner products of the rows and p in float64, the second tries the eight sets of active constraints of every
client and segment, the third adds the rows to p. In PyTorch this takes
float64 copies of the vectors and some two hundred kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undrift.algorithms.gradient_memory.cone3 import project_three_parts
from undrift.core.forms import faster
from undrift.kernels import devices
from undrift.kernels.launch import allocate, launch, tl, triton
from undrift.kernels.segments import blocks, bounds


def serves(p: Tensor, rows: Sequence[Tensor], segments: list[slice], rho: float | Tensor = 0.0) -> bool:
    return devices.gpu(p.device) and p.dtype == torch.float32


@faster(project_three_parts, when=serves)
def project_three_parts_gpu(
    p: Tensor, rows: Sequence[Tensor], segments: list[slice], rho: float | Tensor = 0.0
) -> tuple[Tensor, Tensor]:
    flat = [v.expand(p.shape).reshape(-1, p.shape[-1]) for v in (p, *rows)]
    each = rho.expand(*p.shape[:-1], 1).reshape(-1) if isinstance(rho, Tensor) else p.new_full((len(flat[0]),), rho)
    u, active = torch.ops.undrift.project_three(*flat, each, bounds(segments))
    return u.view(p.shape), active.view(*p.shape[:-1], len(segments), 3)


if triton is not None:
    WIDTH = 2048  # entries of each vector that one program reads

    @triton.jit  # type: ignore[untyped-decorator]
    def _products(  # type: ignore[no-untyped-def]
        a, b, c, d, a_apart, b_apart, c_apart, d_apart, out, blocks, count, WIDTH: tl.constexpr
    ):
        block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
        at = tl.load(blocks + block * 3) + tl.arange(0, WIDTH)
        inside = at < tl.load(blocks + block * 3 + 1)
        a = tl.load(a + row * a_apart + at, mask=inside, other=0.0).to(tl.float64)
        b = tl.load(b + row * b_apart + at, mask=inside, other=0.0).to(tl.float64)
        c = tl.load(c + row * c_apart + at, mask=inside, other=0.0).to(tl.float64)
        d = tl.load(d + row * d_apart + at, mask=inside, other=0.0).to(tl.float64)
        to = out + (row * count + block) * 10
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

    @triton.jit  # type: ignore[untyped-decorator]
    def _remainder(square):  # type: ignore[no-untyped-def]
        """The square root of a remainder of a unit vector; less than round-off counts as zero."""
        return tl.sqrt(tl.where(square > 1e-14, square, 0.0))

    @triton.jit  # type: ignore[untyped-decorator]
    def _over(x, y):  # type: ignore[no-untyped-def]
        return tl.where(y > 0.0, x / tl.where(y > 0.0, y, 1.0), 0.0)

    @triton.jit  # type: ignore[untyped-decorator]
    def _multipliers(  # type: ignore[no-untyped-def]
        sums, rho, share, active, firsts, count, parts, tolerance, BLOCKS: tl.constexpr
    ):
        client, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        row = client * parts + part
        begin, end = tl.load(firsts + part), tl.load(firsts + part + 1)
        # [16]: the ten products of one client, summed over the blocks of one segment
        lane = tl.arange(0, 16)
        total = tl.zeros([16], tl.float64)
        for first in range(begin, end, BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            inside = (block < end)[:, None] & (lane < 10)[None, :]
            total += tl.sum(
                tl.load(sums + (client * count + block)[:, None] * 10 + lane[None, :], mask=inside, other=0.0), 0
            )
        # All vectors below have an entry for each of the eight sets of active constraints, in the order of `cone3.SETS`.
        which = tl.arange(0, 8)
        nought = tl.zeros([8], tl.float64)
        p00 = tl.sum(tl.where(lane == 0, total, 0.0), 0) + nought
        p01 = tl.sum(tl.where(lane == 1, total, 0.0), 0) + nought
        p02 = tl.sum(tl.where(lane == 2, total, 0.0), 0) + nought
        p03 = tl.sum(tl.where(lane == 3, total, 0.0), 0) + nought
        p11 = tl.sum(tl.where(lane == 4, total, 0.0), 0) + nought
        p12 = tl.sum(tl.where(lane == 5, total, 0.0), 0) + nought
        p13 = tl.sum(tl.where(lane == 6, total, 0.0), 0) + nought
        p22 = tl.sum(tl.where(lane == 7, total, 0.0), 0) + nought
        p23 = tl.sum(tl.where(lane == 8, total, 0.0), 0) + nought
        p33 = tl.sum(tl.where(lane == 9, total, 0.0), 0) + nought
        everything = p00 + p01 + p02 + p03 + p11 + p12 + p13 + p22 + p23 + p33
        finite = everything - everything == 0.0
        s0, s1 = tl.sqrt(tl.where(finite, p00, 0.0)), tl.sqrt(tl.where(finite, p11, 0.0))
        s2, s3 = tl.sqrt(tl.where(finite, p22, 0.0)), tl.sqrt(tl.where(finite, p33, 0.0))
        there0, there1, there2 = (s0 > 0.0) & (s3 > 0.0), (s1 > 0.0) & (s3 > 0.0), (s2 > 0.0) & (s3 > 0.0)
        # The Cholesky factor of the unit vectors' products holds their coordinates: the columns of A are (r00, 0, 0),
        # (r01, r11, 0) and (r02, r12, r22).
        g01, g02, g03 = _over(_over(p01, s0), s1), _over(_over(p02, s0), s2), _over(_over(p03, s0), s3)
        g12, g13, g23 = _over(_over(p12, s1), s2), _over(_over(p13, s1), s3), _over(_over(p23, s2), s3)
        r00 = _remainder(_over(_over(p00, s0), s0))
        r01, r02, q0 = _over(g01, r00), _over(g02, r00), _over(g03, r00)
        r11 = _remainder(_over(_over(p11, s1), s1) - r01 * r01)
        r12, q1 = _over(g12 - r01 * r02, r11), _over(g13 - r01 * q0, r11)
        r22 = _remainder(_over(_over(p22, s2), s2) - r02 * r02 - r12 * r12)
        q2 = _over(g23 - r02 * q0 - r12 * q1, r22)
        margin = tl.load(rho + client)
        # The sets {} 0 1 2 01 02 12 012.
        on0, on1, on2 = (0b10110010 >> which) % 2 == 1, (0b11010100 >> which) % 2 == 1, (0b11101000 >> which) % 2 == 1
        a00, a01, a02 = tl.where(on0, r00, 0.0), tl.where(on1, r01, 0.0), tl.where(on2, r02, 0.0)
        a11, a12, a22 = tl.where(on1, r11, 0.0), tl.where(on2, r12, 0.0), tl.where(on2, r22, 0.0)
        # A_on = E T with orthonormal E and triangular T; then T'T z = rho - A_on' q.
        t00 = tl.abs(a00)
        big0 = t00 > 1e-12
        t00 = tl.where(big0, t00, 1.0)
        e00 = tl.where(big0, a00 / t00, 0.0)
        t01 = a01 * e00
        v0, v1 = a01 - t01 * e00, a11
        t11 = tl.sqrt(v0 * v0 + v1 * v1)
        big1 = t11 > 1e-12
        t11 = tl.where(big1, t11, 1.0)
        e10, e11 = tl.where(big1, v0 / t11, 0.0), tl.where(big1, v1 / t11, 0.0)
        t02 = a02 * e00
        v0, v1, v2 = a02 - t02 * e00, a12, a22
        t12 = v0 * e10 + v1 * e11
        v0, v1 = v0 - t12 * e10, v1 - t12 * e11
        t22 = tl.sqrt(v0 * v0 + v1 * v1 + v2 * v2)
        big2 = t22 > 1e-12
        t22 = tl.where(big2, t22, 1.0)
        possible = ((there0 & big0) | (on0 == 0)) & ((there1 & big1) | (on1 == 0)) & ((there2 & big2) | (on2 == 0))
        y0 = tl.where(on0, margin - a00 * q0, 0.0) / t00
        y1 = (tl.where(on1, margin - a01 * q0 - a11 * q1, 0.0) - t01 * y0) / t11
        y2 = (tl.where(on2, margin - a02 * q0 - a12 * q1 - a22 * q2, 0.0) - t02 * y0 - t12 * y1) / t22
        z2 = tl.where(possible & on2, y2 / t22, 0.0)
        z1 = tl.where(possible & on1, (y1 - t12 * z2) / t11, 0.0)
        z0 = tl.where(possible & on0, (y0 - t01 * z1 - t02 * z2) / t00, 0.0)
        m0 = q0 + a00 * z0 + a01 * z1 + a02 * z2
        m1 = q1 + a11 * z1 + a12 * z2
        m2 = q2 + a22 * z2
        w0 = r00 * m0 - margin
        w1 = r01 * m0 + r11 * m1 - margin
        w2 = r02 * m0 + r12 * m1 + r22 * m2 - margin
        # The violation of z >= 0, w = 0 where active and w >= 0 elsewhere.
        gap = tl.maximum(tl.maximum(-z0, -z1), tl.maximum(-z2, 0.0))
        gap = tl.maximum(gap, tl.where(there0, tl.where(on0, tl.abs(w0), -w0), 0.0))
        gap = tl.maximum(gap, tl.where(there1, tl.where(on1, tl.abs(w1), -w1), 0.0))
        gap = tl.maximum(gap, tl.where(there2, tl.where(on2, tl.abs(w2), -w2), 0.0))
        gap = tl.where(possible & (gap < 1e300), gap, 1e300)
        # The first set within the tolerance, or else the best one.
        best = which == tl.argmin(tl.where(gap <= tolerance, which - 8.0, gap), 0)
        z0 = tl.where(best & (z0 > 0.0), z0, 0.0)
        z1 = tl.where(best & (z1 > 0.0), z1, 0.0)
        z2 = tl.where(best & (z2 > 0.0), z2, 0.0)
        tl.store(share + row * 3, tl.sum(_over(z0, s0) * s3, 0))
        tl.store(share + row * 3 + 1, tl.sum(_over(z1, s1) * s3, 0))
        tl.store(share + row * 3 + 2, tl.sum(_over(z2, s2) * s3, 0))
        tl.store(active + row * 3, (tl.max(z0, 0) > 0.0).to(tl.int8))
        tl.store(active + row * 3 + 1, (tl.max(z1, 0) > 0.0).to(tl.int8))
        tl.store(active + row * 3 + 2, (tl.max(z2, 0) > 0.0).to(tl.int8))

    @triton.jit  # type: ignore[untyped-decorator]
    def _combination(  # type: ignore[no-untyped-def]
        share, a, b, c, d, a_apart, b_apart, c_apart, d_apart, out, length, blocks, parts, WIDTH: tl.constexpr
    ):
        block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
        at = tl.load(blocks + block * 3) + tl.arange(0, WIDTH)
        inside = at < tl.load(blocks + block * 3 + 1)
        share += (row * parts + tl.load(blocks + block * 3 + 2)) * 3
        total = tl.load(d + row * d_apart + at, mask=inside, other=0.0).to(tl.float64)
        z0, z1, z2 = tl.load(share), tl.load(share + 1), tl.load(share + 2)
        if z0 != 0.0:
            total += z0 * tl.load(a + row * a_apart + at, mask=inside, other=0.0).to(tl.float64)
        if z1 != 0.0:
            total += z1 * tl.load(b + row * b_apart + at, mask=inside, other=0.0).to(tl.float64)
        if z2 != 0.0:
            total += z2 * tl.load(c + row * c_apart + at, mask=inside, other=0.0).to(tl.float64)
        tl.store(out + row * length + at, total.to(tl.float32), mask=inside)

    @torch.library.custom_op("undrift::project_three", mutates_args=())
    def _op(p: Tensor, a: Tensor, b: Tensor, c: Tensor, rho: Tensor, edges: list[int]) -> tuple[Tensor, Tensor]:
        vectors = [v if v.stride(1) == 1 else v.contiguous() for v in (a, b, c, p)]
        apart = [v.stride(0) for v in vectors]
        (count, length), parts = p.shape, len(edges) - 1
        table, firsts = blocks(edges, WIDTH, p)
        n, sums = len(table), p.new_empty((count, len(table), 10), dtype=torch.float64)
        share, active = sums.new_empty((count, parts, 3)), allocate(p, count, parts, 3, dtype=torch.int8)
        u, rho = allocate(p, *p.shape), rho.double().contiguous()
        launch(_products, (n, count), *vectors, *apart, sums, table, n, WIDTH=WIDTH)
        launch(_multipliers, (count, parts), sums, rho, share, active, firsts, n, parts, 1e-6, BLOCKS=64, num_warps=1)
        launch(_combination, (n, count), share, *vectors, *apart, u, length, table, parts, WIDTH=WIDTH)
        return u, active.bool()

    @_op.register_fake
    def _(p: Tensor, a: Tensor, b: Tensor, c: Tensor, rho: Tensor, edges: list[int]) -> tuple[Tensor, Tensor]:
        u = torch.empty_like(p, memory_format=torch.contiguous_format)
        return u, p.new_empty((len(p), len(edges) - 1, 3), dtype=torch.bool)
