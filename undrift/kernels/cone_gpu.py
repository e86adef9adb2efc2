"""Projection on a cone of up to 128 constraints on a GPU, without waiting for the host.

Solves the linear complementarity problem of `cone.solve`: w = Gz + b with w, z >= 0 and zw = 0, for unit columns and unit p.
One program exchanges w_k with z_k where one is negative (principal pivoting): first the most negative one, later the first one,
with which it terminates (Murty 1974). A warm start would gain nothing. Nearly dependent columns are left to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.algorithms.gradient_memory.cone import Projection, gram, project, usual_lengths
from undrift.core.forms import doubt, faster
from undrift.kernels import devices
from undrift.kernels.launch import allocate, launch, tl, triton

MOST = 128  # constraints: the table fits the cache of one multiprocessor


def serves(
    p: Tensor, rows: Tensor, products: Tensor | None = None, rho: float = 0.0, along: Tensor | None = None,
    counts: Tensor | None = None, start: Tensor | None = None,
) -> bool:  # fmt: skip
    """Whether the mask of the counted rows is on a GPU, so that the plain form would wait for it."""
    return counts is not None and devices.gpu(counts.device) and len(counts) <= MOST


@faster(project, when=serves)
def project_gpu(
    p: Tensor, rows: Tensor, products: Tensor | None = None, rho: float = 0.0, along: Tensor | None = None,
    counts: Tensor | None = None, start: Tensor | None = None,
) -> Projection:  # fmt: skip
    """Reports a `doubt` if the products are not precise enough, also because a column or p is too short or too long for them."""
    assert counts is not None
    products = gram(rows, rows) if products is None else products
    along = gram(p.unsqueeze(0), rows).squeeze(0) if along is None else along
    length = torch.linalg.vector_norm(p, dtype=torch.float64)
    z, solved = torch.ops.undrift.pivots(products, along, length, counts, float(rho), p.dtype != torch.float64)
    (least, most), size = usual_lengths(rows), products.diagonal().double().clamp(min=0).sqrt()
    odd = counts & rows.any(1) & ~((size >= least) & (size <= most))
    solved = solved & ~odd.any() & (~p.any() | ((length >= least) & (length <= most)))
    doubt(~solved)
    return Projection(torch.ops.undrift.add_rows(p, z, rows), z, solved)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _pivots(  # type: ignore[no-untyped-def]
        products, along, length, counts, rho, table, z, solved, m, tolerance, smallest,
        SIZE: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        i = tl.arange(0, SIZE)
        real = i < m
        size = tl.sqrt(tl.maximum(tl.load(products + i * (m + 1), mask=real, other=0.0), 0.0))
        long = tl.load(length + i * 0)
        named = tl.load(counts + i, mask=real, other=0) != 0
        counted = named & (size > 0.0) & (long > 0.0)  # a column of zeros, or p = 0, constrains nothing
        inverse = tl.where(counted, 1.0 / tl.where(counted, size, 1.0), 0.0)
        value = tl.load(along + i, mask=real, other=0.0) * inverse / tl.where(long > 0.0, long, 1.0)
        value = tl.where(counted, value - tl.load(rho + i * 0), 0.0)  # w of the columns outside, z of those inside
        total = tl.sum(value, 0)
        for first in range(0, SIZE, ROWS):
            r = first + tl.arange(0, ROWS)
            diagonal = tl.load(products + r * (m + 1), mask=r < m, other=0.0)
            also = (tl.load(counts + r, mask=r < m, other=0) != 0) & (diagonal > 0.0)
            own = tl.where(also, 1.0 / tl.sqrt(tl.where(also, diagonal, 1.0)), 0.0)
            some = tl.load(products + r[:, None] * m + i[None, :], mask=(r < m)[:, None] & real[None, :], other=0.0)
            some = tl.where(r[:, None] == i[None, :], 1.0, some * own[:, None] * inverse[None, :])
            total += tl.sum(tl.sum(some, 1), 0)
            tl.store(table + r[:, None] * SIZE + i[None, :], some)
        tl.debug_barrier()
        sure = (total - total == 0.0).to(tl.int32)  # finite

        inside = tl.zeros([SIZE], tl.int32)
        turns = 0
        worst = tl.min(value, 0)
        k = tl.min(tl.where(value == worst, i, SIZE), 0)
        k = tl.where(worst < -tolerance, tl.where(sure > 0, k, SIZE), SIZE)
        while k < SIZE:
            hit = (i == k).to(tl.int32)
            row, column = tl.load(table + k * SIZE + i), tl.load(table + i * SIZE + k)
            pivot = tl.load(table + k * SIZE + k)
            at_k = tl.sum(tl.where(i == k, value, 0.0), 0)
            leaves = tl.sum(hit * inside, 0)
            sure = tl.where(
                pivot < smallest, tl.where(leaves > 0, sure, 0), sure
            )  # too small: it depends on the columns inside
            share = tl.where(i == k, 1.0, row) / pivot
            tl.debug_barrier()
            for first in range(0, SIZE, ROWS):
                r = first + tl.arange(0, ROWS)
                at = table + r[:, None] * SIZE + i[None, :]
                across = tl.load(table + r * SIZE + k)
                old = tl.load(at)
                moved = old - across[:, None] * share[None, :]
                moved = tl.where(i[None, :] == k, (across / pivot)[:, None], moved)
                moved = tl.where(r[:, None] == k, tl.where(i == k, share, -share)[None, :], moved)
                tl.debug_barrier()  # no thread may read column k after it is written
                tl.store(at, moved)
            tl.debug_barrier()
            value = tl.where(i == k, -at_k / pivot, value - column * (at_k / pivot))
            inside = inside + hit - 2 * inside * hit
            turns += 1
            # The next k: z must not be negative at all, w only within the round-off of its products.
            short = tl.where(counted & (value < tl.where(inside > 0, -1e-13, -tolerance)), value, 0.0)
            worst = tl.min(short, 0)
            most = tl.min(tl.where(short == worst, i, SIZE), 0)
            if turns > 4 * SIZE:
                most = tl.min(tl.where(short < 0.0, i, SIZE), 0)
            sure = tl.where(turns < 12 * SIZE, sure, 0)
            k = tl.where(worst < 0.0, tl.where(sure > 0, most, SIZE), SIZE)
        multiplier = tl.where(inside > 0, tl.maximum(value, 0.0) * inverse * long, 0.0)
        tl.store(z + i, multiplier, mask=real)
        tl.store(solved, sure.to(tl.int8))

    @torch.library.custom_op("undrift::pivots", mutates_args=())
    def pivots(
        products: Tensor, along: Tensor, length: Tensor, counts: Tensor, rho: float, single: bool
    ) -> tuple[Tensor, Tensor]:
        m = len(along)
        z, solved = allocate(along, m, dtype=torch.float64), allocate(along, dtype=torch.int8)
        table = z.new_empty(MOST, MOST)
        # Products of float32 rows have an error of about 1e-8, which must be small beside a pivot.
        launch(
            _pivots, (1,), products.double().contiguous(), along.double().contiguous(), length, counts.to(torch.int8),
            z.new_full((1,), rho), table, z, solved, m, 1e-6 if single else 1e-12, 1e-5 if single else 1e-9,
            SIZE=MOST, ROWS=16, num_warps=8,
        )  # fmt: skip
        return z, solved.bool()

    @pivots.register_fake
    def _(products: Tensor, along: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return along.new_empty(along.shape, dtype=torch.float64), along.new_empty((), dtype=torch.bool)

    @triton.jit  # type: ignore[untyped-decorator]
    def _add_rows(p, z, rows, u, length, apart, m, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        valid = at < length
        total = tl.load(p + at, mask=valid, other=0.0).to(tl.float64)
        for row in range(0, m):
            share = tl.load(z + row)
            if share != 0.0:
                total += share * tl.load(rows + at, mask=valid, other=0.0).to(tl.float64)
            rows += apart
        tl.store(u + at, total.to(u.dtype.element_ty), mask=valid)

    @torch.library.custom_op("undrift::add_rows", mutates_args=())
    def add_rows(p: Tensor, z: Tensor, rows: Tensor) -> Tensor:
        """p + z rows in float64; only rows with non-zero z are read."""
        u, grid = allocate(p, len(p)), (triton.cdiv(len(p), 512),)
        launch(_add_rows, grid, p, z, rows, u, len(p), rows.stride(0), len(rows), WIDTH=512)
        return u

    add_rows.register_fake(lambda p, z, rows: torch.empty_like(p))
