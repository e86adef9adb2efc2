"""Projection on cones of up to 128 constraints on a GPU, one for each segment of a vector, without waiting for the host.

One program solves one dual problem as `cone.lawson_hanson` does, on a table in registers: w = Gz + b with unit columns and unit
p, where an exchange of w_k and z_k lets column k in or out. Products are float64. For float32 vectors a little is added to the
diagonal of G, so that every exchange is possible, however close the columns are to dependence. z is then corrected with G itself,
as long as that helps; where that is not enough, the ridge grows. In float64, columns less than 1e-3 apart from a span that matter
are left to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.algorithms.gradient_memory.cone import Projection, grams, project, project_parts, usual_lengths
from undrift.core.forms import doubt, faster
from undrift.kernels import devices
from undrift.kernels.gram_gpu import grams_gpu
from undrift.kernels.launch import allocate, launch, tl, triton
from undrift.kernels.segments import blocks, bounds

MOST = 128  # constraints: their table fits the cache of one multiprocessor
RIDGE = 1e-12  # on the diagonal of G
TRIES = 3


def serves(
    p: Tensor, rows: Tensor, segments: list[slice], products: Tensor, along: Tensor, counts: Tensor, start: Tensor,
    rho: float = 0.0,
) -> bool:  # fmt: skip
    return devices.gpu(p.device) and len(counts) <= MOST


@faster(project_parts, when=serves)
def project_parts_gpu(
    p: Tensor, rows: Tensor, segments: list[slice], products: Tensor, along: Tensor, counts: Tensor, start: Tensor,
    rho: float = 0.0,
) -> Projection:  # fmt: skip
    """Reports a `doubt` where a programme needs more digits, also because a float64 vector is too short or too long.

    Where nobody watches, the host solves such a programme now.
    """
    home, counts = counts.device, counts.to(p.device)
    products, along, start = (t.to(p.device) for t in (products, along, start))
    square = (grams_gpu if p.dtype == torch.float32 else grams)(p[None], p[None], segments)
    length = square.flatten().sqrt()
    edges = bounds(segments)
    z, solved = torch.ops.undrift.pivots(products, along, length, counts, start, rho, p.dtype != torch.float64)
    if p.dtype == torch.float64:  # float32 vectors of any length can be squared in float64
        size = products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        solved = solved & ~(counts & odd(rows, size, segments)).any(1) & ~odd(p[None], length[:, None], segments)[:, 0]
    u = torch.ops.undrift.add_rows(p, z, rows, edges)
    if not doubt(~solved):
        for n in (~solved).nonzero().flatten().tolist():
            s = segments[n]
            u[s], z[n], solved[n] = project(p[s], rows[:, s], products[n], rho, along[n], counts, start[n])
    return Projection(u, z.to(home), solved.to(home))


def odd(vectors: Tensor, size: Tensor, segments: list[slice]) -> Tensor:
    """Which vectors [n, P] are not zero in a segment, but too short or too long for the products that gave their size [T, n]."""
    least, most = usual_lengths(vectors)
    return torch.stack([vectors[:, s].any(1) for s in segments]) & ~((size >= least) & (size <= most))


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _unit(products, counts, own, r, i, m):  # type: ignore[no-untyped-def]
        """The products [R, I] of unit columns r and i; `own` [I] is one over the length of i, 0 where it does not count."""
        diagonal = tl.load(products + r * (m + 1), mask=r < m, other=0.0)
        counted = (tl.load(counts + r, mask=r < m, other=0) != 0) & (diagonal > 0.0)
        other = tl.where(counted, 1.0 / tl.sqrt(tl.where(counted, diagonal, 1.0)), 0.0)
        valid = (r < m)[:, None] & (i < m)[None, :]
        some = tl.load(products + r[:, None] * m + i[None, :], mask=valid, other=0.0) * other[:, None] * own[None, :]
        return tl.where(r[:, None] == i[None, :], 1.0, some)

    @triton.jit  # type: ignore[untyped-decorator]
    def _exchange(table, value, inside, line, i, k, coming, pivot, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        """The table and its values after column k came in or, where `coming` is 0, left; `line` holds its row and the values."""
        row, share = tl.load(line + i), 1.0 / pivot
        at_k = tl.load(line + SIZE + k) * share
        column = tl.where(
            i == k, 1.0, tl.where(inside == 1 - coming, row, -row)
        )  # the table is symmetric but for signs
        value = tl.where(i == k, -at_k, value - column * at_k)
        across = tl.where(i == k, -share, row * share)
        other = (i != k)[:, None] & (i != k)[None, :]
        table = tl.where(other, table, 0.0) - column[:, None] * across[None, :]
        return table, value, tl.where(i == k, coming, inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _store_row(table, value, line, i, k, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Write row k of the table and the values where all threads can read them; gives the pivot."""
        tl.debug_barrier()  # no thread may still read what stood there
        tl.store(line + i[None, :] + 0 * i[:, None], table, mask=(i == k)[:, None] & (i < SIZE)[None, :])
        tl.store(line + SIZE + i, value)
        tl.debug_barrier()
        return tl.load(line + k)

    @triton.jit  # type: ignore[untyped-decorator]
    def _pivots(  # type: ignore[no-untyped-def]
        products, along, length, counts, guess, rho, line, z, error, m, ridge, tolerance, allowed, smallest,
        SIZE: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """One segment's multipliers z, unless those that are there are good enough: `error` says how far they are off.

        The table lies in registers; `line` [2 SIZE] is memory for two vectors.
        """
        part = tl.program_id(0).to(tl.int64)
        products, along, guess, z = products + part * m * m, along + part * m, guess + part * m, z + part * m
        line += part * 2 * SIZE
        i = tl.arange(0, SIZE)
        real = i < m
        long, margin = tl.load(length + part + i * 0), tl.load(rho + i * 0)
        diagonal = tl.load(products + i * (m + 1), mask=real, other=0.0)
        counted = (tl.load(counts + i, mask=real, other=0) != 0) & (diagonal > 0.0) & (long > 0.0)
        inverse = tl.where(counted, 1.0 / tl.sqrt(tl.where(counted, diagonal, 1.0)), 0.0)
        with_p = tl.load(along + i, mask=real, other=0.0)
        b = tl.where(counted, with_p * inverse / tl.where(long > 0.0, long, 1.0) - margin, 0.0)
        table = _unit(products, counts, inverse, i, i, m)
        finite = tl.sum((diagonal + with_p + long + tl.sum(table, 0)) * 0.0, 0) == 0.0
        table = tl.where(i[:, None] == i[None, :], table + ridge, table)  # not 1 + ridge: numbers come as float32
        hoped = tl.where(counted, tl.load(guess + i, mask=real, other=0).to(tl.int32), 0)

        best, off = tl.zeros([SIZE], tl.float64), tl.max(tl.zeros([SIZE], tl.float64) + float("inf"), 0)
        before = tl.load(error + part)
        if finite & (before > allowed):
            value = b  # w of the columns outside, the z of those inside that makes their w zero
            inside = tl.zeros([SIZE], tl.int32)
            # First the columns of the guess come in, but for those that depend on others: an unlucky guess is no matter.
            k = tl.min(tl.where(hoped > 0, i, SIZE), 0)
            while k < SIZE:
                pivot = _store_row(table, value, line, i, k, SIZE)
                if pivot > 1e-6:
                    table, value, inside = _exchange(table, value, inside, line, i, k, 1, pivot, SIZE)
                hoped = tl.where(i == k, 0, hoped)
                k = tl.min(tl.where(hoped > 0, i, SIZE), 0)

            # Then those whose z is not positive leave: the most negative first, and once there is a feasible point, the first to
            # become zero on the way from it. Then the most broken comes in.
            point = tl.zeros([SIZE], tl.float64)  # a feasible z
            refused = tl.zeros([SIZE], tl.int32)
            settled, turns = 0, 0
            going = 1
            while going > 0:
                falling = (inside > 0) & (value <= 0.0)
                way = tl.where(falling & (point > value), point - value, 1.0)
                room = tl.where(falling, tl.where(settled > 0, point / way, value), float("inf"))
                tightest = tl.min(room, 0)
                k = tl.min(tl.where(falling & (room == tightest), i, SIZE), 0)
                coming = (k == SIZE).to(tl.int32)
                if k < SIZE:
                    ahead = tl.where(inside > 0, point + tightest * (value - point), 0.0)
                    point = tl.where(settled > 0, tl.where(i == k, 0.0, ahead), point)
                else:
                    point = tl.where(inside > 0, value, 0.0)
                    settled = 1
                    open_w = tl.where(counted & (inside == 0) & (refused == 0), value, 0.0)
                    worst = tl.min(open_w, 0)
                    bound = -tolerance - 2e-15 * tl.max(point, 0)
                    k = tl.min(tl.where((open_w == worst) & (open_w < bound), i, SIZE), 0)
                going = ((k < SIZE) & (turns < 12 * SIZE)).to(tl.int32)
                turns += 1
                if going > 0:
                    pivot = _store_row(table, value, line, i, k, SIZE)
                    if (coming == 0) | (pivot > smallest):
                        table, value, inside = _exchange(table, value, inside, line, i, k, coming, pivot, SIZE)
                        refused = tl.zeros([SIZE], tl.int32)
                    else:  # it depends on the columns inside
                        refused = tl.where(i == k, 1, refused)

            # The table carries the round-off of all exchanges and the ridge, but corrects z nearly as well as the exact inverse:
            # the part of the table of the columns inside is symmetric.
            for _ in range(0, tl.where(tl.max(inside, 0) > 0, 4, 1)):
                tl.debug_barrier()
                tl.store(line + i, point * inverse)
                tl.debug_barrier()
                w = tl.zeros([SIZE], tl.float64)
                for first in range(0, SIZE, ROWS):
                    r = first + tl.arange(0, ROWS)
                    some = tl.load(
                        products + r[:, None] * m + i[None, :], mask=(r < m)[:, None] & real[None, :], other=0.0
                    )
                    w += tl.sum(some * tl.load(line + r)[:, None], 0)
                w = b + w * inverse
                now = tl.max(tl.where(counted, tl.where(point > 0.0, tl.abs(w), -w), 0.0), 0)
                best, off = tl.where(now < off, point, best), tl.minimum(now, off)
                change = tl.sum(table * tl.where(inside > 0, w, 0.0)[:, None], 0)  # how far z is off, if w is not zero
                point = tl.where(inside > 0, tl.maximum(point - change, 0.0), 0.0)
        tl.store(z + i, best * inverse * long, mask=real & (off + i * 0.0 < before))
        tl.store(error + part, tl.minimum(off, before))

    @torch.library.custom_op("undrift::pivots", mutates_args=())
    def pivots(
        products: Tensor, along: Tensor, length: Tensor, counts: Tensor, guess: Tensor, rho: float, single: bool
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """z [T, m] and whether it is exact [T], from products [T, m, m] and along [T, m]; `single`: of float32 vectors."""
        parts, m = along.shape
        z, size = allocate(along, parts, m, dtype=torch.float64).zero_(), triton.next_power_of_2(max(m, 16))
        products, along, counts = products.double().contiguous(), along.double().contiguous(), counts.to(torch.int8)
        error, line, margin = z.new_full((parts,), torch.inf), z.new_empty(parts, 2, size), z.new_full((1,), rho)
        ridge, tolerance, allowed, smallest = (RIDGE, 1e-9, 1e-6, 1e-12) if single else (0.0, 1e-12, 1e-9, 1e-6)
        guess = guess.to(torch.int8).contiguous()
        for _ in range(
            TRIES if single else 1
        ):  # again where z is not good enough, without a guess and with a larger ridge
            launch(
                _pivots, (parts,), products, along, length, counts, guess, margin, line, z, error, m,
                ridge, tolerance, allowed, smallest, SIZE=size, ROWS=16, num_warps=4 if size < MOST else 8,
            )  # fmt: skip
            guess, ridge = torch.zeros_like(guess), 10 * ridge
        return z, error <= allowed

    @pivots.register_fake
    def _(products: Tensor, along: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return along.new_empty(along.shape, dtype=torch.float64), along.new_empty(len(along), dtype=torch.bool)

    @triton.jit  # type: ignore[untyped-decorator]
    def _add_rows(p, z, rows, u, blocks, apart, m, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        block = tl.program_id(0)
        begin, end, part = tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
        at = begin + tl.arange(0, WIDTH)
        valid = at < end
        total = tl.load(p + at, mask=valid, other=0.0).to(tl.float64)
        for row in range(0, m):
            share = tl.load(z + part * m + row)
            if share != 0.0:
                total += share * tl.load(rows + at, mask=valid, other=0.0).to(tl.float64)
            rows += apart
        tl.store(u + at, total.to(u.dtype.element_ty), mask=valid)

    @torch.library.custom_op("undrift::add_rows", mutates_args=())
    def add_rows(p: Tensor, z: Tensor, rows: Tensor, edges: list[int]) -> Tensor:
        """p + z rows in float64, segment by segment; only rows with non-zero z are read."""
        table, _ = blocks(edges, 512, p)
        u = allocate(p, len(p))
        launch(_add_rows, (len(table),), p, z, rows, u, table, rows.stride(0), len(rows), WIDTH=512)
        return u

    add_rows.register_fake(lambda p, z, rows, edges: torch.empty_like(p))
