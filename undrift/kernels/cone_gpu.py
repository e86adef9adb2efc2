"""Projection on cones of up to 128 constraints on a GPU, one for each segment of a vector, without waiting for the host.

One program solves one dual problem as `cone.lawson_hanson` does, on a table in the cache: w = Gz + b with unit columns and unit
p, where an exchange of w_k and z_k lets column k in or out. Products are float64, so that columns down to 1e-6 apart can be
told from dependent ones. Such nearly dependent columns cost the table digits, which come back from the columns themselves if
the segment is short (biases); in a long segment they are left to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.algorithms.gradient_memory.cone import Projection, grams, project_parts, usual_lengths
from undrift.core.forms import doubt, faster
from undrift.kernels import devices
from undrift.kernels.gram_gpu import grams_gpu
from undrift.kernels.launch import allocate, launch, tl, triton
from undrift.kernels.segments import blocks, bounds

MOST = 128  # constraints: their table fits the cache of one multiprocessor
SHORT = 4096  # entries of a segment whose columns may be read again by one program


def serves(
    p: Tensor, rows: Tensor, segments: list[slice], products: Tensor, along: Tensor, counts: Tensor, start: Tensor,
    rho: float = 0.0,
) -> bool:  # fmt: skip
    """Whether the mask of the counted rows is on a GPU, so that the plain form would wait for it."""
    return devices.gpu(counts.device) and len(counts) <= MOST


@faster(project_parts, when=serves)
def project_parts_gpu(
    p: Tensor, rows: Tensor, segments: list[slice], products: Tensor, along: Tensor, counts: Tensor, start: Tensor,
    rho: float = 0.0,
) -> Projection:  # fmt: skip
    """Reports a `doubt` where a programme needs more digits, also because a float64 vector is too short or too long."""
    square = (grams_gpu if p.dtype == torch.float32 else grams)(p[None], p[None], segments)
    length = square.flatten().sqrt()
    edges = bounds(segments)
    z, solved = torch.ops.undrift.pivots(products, along, length, counts, start, rho, p, rows, edges)
    if p.dtype == torch.float64:  # float32 vectors of any length can be squared in float64
        size = products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        solved = solved & ~(counts & odd(rows, size, segments)).any(1) & ~odd(p[None], length[:, None], segments)[:, 0]
    doubt(~solved)
    return Projection(torch.ops.undrift.add_rows(p, z, rows, edges), z, solved)


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
    def _correction(table, line, w, inside, i, SIZE: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
        """How far the z inside are off if w of these columns is not zero; their part of the table is symmetric."""
        tl.debug_barrier()
        tl.store(line + i, tl.where(inside > 0, w, 0.0))
        tl.debug_barrier()
        change = tl.zeros([SIZE], tl.float64)
        for first in range(0, SIZE, ROWS):
            r = first + tl.arange(0, ROWS)
            change += tl.sum(tl.load(table + r[:, None] * SIZE + i[None, :]) * tl.load(line + r)[:, None], 0)
        return change

    @triton.jit  # type: ignore[untyped-decorator]
    def _pivots(  # type: ignore[no-untyped-def]
        products, along, length, counts, guess, rho, p, rows, apart, edges, table, z, solved, m,
        tolerance, allowed, smallest, smallest_long,
        SIZE: tl.constexpr, SHORT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """One segment's multipliers. The table [SIZE + 1, SIZE] is read ROWS at a time; its last line is for vectors."""
        part = tl.program_id(0).to(tl.int64)
        products, along, guess, z = products + part * m * m, along + part * m, guess + part * m, z + part * m
        table += part * (SIZE + 1) * SIZE
        line = table + SIZE * SIZE
        begin, end = tl.load(edges + part * 3), tl.load(edges + part * 3 + 1)
        i = tl.arange(0, SIZE)
        real = i < m
        long, margin = tl.load(length + part + i * 0), tl.load(rho + i * 0)
        diagonal = tl.load(products + i * (m + 1), mask=real, other=0.0)
        counted = (tl.load(counts + i, mask=real, other=0) != 0) & (diagonal > 0.0) & (long > 0.0)
        inverse = tl.where(counted, 1.0 / tl.sqrt(tl.where(counted, diagonal, 1.0)), 0.0)
        with_p = tl.load(along + i, mask=real, other=0.0)
        b = tl.where(counted, with_p * inverse / tl.where(long > 0.0, long, 1.0) - margin, 0.0)
        total = diagonal + with_p + long
        for first in range(0, SIZE, ROWS):
            r = first + tl.arange(0, ROWS)
            unit = _unit(products, counts, inverse, r, i, m)
            total += tl.sum(unit, 0)
            tl.store(table + r[:, None] * SIZE + i[None, :], unit)
        tl.debug_barrier()
        finite = (tl.sum(total * 0.0, 0) == 0.0).to(tl.int32)

        value = b  # w of the columns outside, the z of those inside that makes their w zero
        point = tl.zeros([SIZE], tl.float64)  # a feasible z
        inside, refused = tl.zeros([SIZE], tl.int32), tl.zeros([SIZE], tl.int32)
        hoped = tl.where(counted, tl.load(guess + i, mask=real, other=0).to(tl.int32), 0)
        settled, turns, least = 0, 0, tl.max(tl.zeros([SIZE], tl.float64) + 1.0, 0)  # the smallest pivot
        short = end - begin <= SHORT
        smallest = tl.where(short, smallest, smallest_long)
        going = finite
        while going > 0:
            # First the columns of the guess come in. Then those whose z is not positive leave: the most negative first, and
            # once there is a feasible point, the first to become zero on the way from it. Then the most broken comes in.
            first = tl.min(tl.where(hoped > 0, i, SIZE), 0)
            falling = (inside > 0) & (value <= 0.0)
            way = tl.where(falling & (point > value), point - value, 1.0)
            room = tl.where(falling, tl.where(settled > 0, point / way, value), float("inf"))
            tightest = tl.min(room, 0)
            leaving = tl.min(tl.where(falling & (room == tightest), i, SIZE), 0)
            open_w = tl.where(counted & (inside == 0) & (refused == 0), value, 0.0)
            worst = tl.min(open_w, 0)
            bound = -tolerance - 2e-15 * tl.max(tl.where(inside > 0, value, 0.0), 0)
            coming = tl.min(tl.where((open_w == worst) & (open_w < bound), i, SIZE), 0)
            if first == SIZE:
                if leaving < SIZE:
                    ahead = tl.where(inside > 0, point + tightest * (value - point), 0.0)
                    point = tl.where(settled > 0, tl.where(i == leaving, 0.0, ahead), point)
                else:
                    point = tl.where(inside > 0, value, 0.0)
                    settled = 1
            k = tl.where(first < SIZE, first, tl.where(leaving < SIZE, leaving, coming))
            hoped = tl.where(i == k, 0, hoped)

            at = tl.minimum(k, SIZE - 1)
            row, pivot = tl.load(table + at * SIZE + i), tl.load(table + at * SIZE + at)
            goes = tl.sum(tl.where(i == k, inside, 0), 0)
            enough = tl.where(first < SIZE, 1e-6, smallest)
            if (k < SIZE) & ((goes > 0) | (pivot > enough)):
                column = tl.where(inside == goes, row, -row)  # the table is symmetric but for signs
                share = tl.where(i == k, 1.0, row) / pivot
                tl.debug_barrier()  # no thread may read the row or the line after they are written
                tl.store(line + i, column)
                tl.debug_barrier()
                for start in range(0, SIZE, ROWS):
                    r = start + tl.arange(0, ROWS)
                    cells, across = table + r[:, None] * SIZE + i[None, :], tl.load(line + r)
                    moved = tl.load(cells) - across[:, None] * share[None, :]
                    moved = tl.where((i == k)[None, :], (across / pivot)[:, None], moved)
                    tl.store(cells, tl.where((r == k)[:, None], tl.where(i == k, share, -share)[None, :], moved))
                tl.debug_barrier()
                at_k = tl.sum(tl.where(i == k, value, 0.0), 0) / pivot
                value = tl.where(i == k, -at_k, value - column * at_k)
                inside = tl.where(i == k, 1 - inside, inside)
                least = tl.where(goes > 0, least, tl.minimum(least, pivot))
                refused = tl.zeros([SIZE], tl.int32)
            else:  # it depends on the columns inside; an unlucky guess is no matter
                refused = tl.where((i == k) & (first == SIZE), 1, refused)
            turns += 1
            going = ((k < SIZE) & (turns < 12 * SIZE)).to(tl.int32)

        # The table carries the round-off of all exchanges, but corrects z nearly as well as the exact inverse.
        w = b
        for turn in range(0, 3):
            tl.debug_barrier()
            tl.store(line + i, point)
            tl.debug_barrier()
            w = b
            for first in range(0, SIZE, ROWS):
                r = first + tl.arange(0, ROWS)
                w += tl.sum(_unit(products, counts, inverse, r, i, m) * tl.load(line + r)[:, None], 0)
            if turn < 2:
                change = _correction(table, line, w, inside, i, SIZE, ROWS)
                point = tl.where(inside > 0, tl.maximum(point - change, 0.0), 0.0)
        if short & (least < 1e-8):
            for turn in range(0, 4):
                w = tl.where(counted, -margin, 0.0)
                for entry in range(begin, end, WIDTH):
                    at = entry + tl.arange(0, WIDTH)
                    valid = real[:, None] & (at < end)[None, :]
                    some = tl.load(rows + i.to(tl.int64)[:, None] * apart + at[None, :], mask=valid, other=0.0)
                    some = some.to(tl.float64) * inverse[:, None]
                    u = tl.load(p + at, mask=at < end, other=0.0).to(tl.float64) / tl.max(long, 0)
                    u += tl.sum(some * point[:, None], 0)
                    w += tl.sum(some * u[None, :], 1)
                if turn < 3:
                    change = _correction(table, line, w, inside, i, SIZE, ROWS)
                    point = tl.where(inside > 0, tl.maximum(point - change, 0.0), 0.0)
        off = tl.where(counted, tl.where(inside > 0, tl.abs(w), -w), 0.0)
        sure = tl.where((turns < 12 * SIZE) & (tl.max(off, 0) <= allowed), finite, 0)
        tl.store(z + i, tl.where(finite > 0, point * inverse * long, 0.0), mask=real)
        tl.store(solved + part, sure.to(tl.int8))

    @torch.library.custom_op("undrift::pivots", mutates_args=())
    def pivots(
        products: Tensor, along: Tensor, length: Tensor, counts: Tensor, guess: Tensor, rho: float, p: Tensor, rows: Tensor,
        edges: list[int],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """z [T, m] and whether it is exact [T], from products [T, m, m] and along [T, m]."""
        parts, m = along.shape
        z, solved = allocate(along, parts, m, dtype=torch.float64), allocate(along, parts, dtype=torch.int8)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        size, single = triton.next_power_of_2(max(m, 16)), p.dtype != torch.float64
        whole, _ = blocks(edges, edges[-1], p)  # one block is one segment
        table = z.new_empty(parts, size + 1, size)
        launch(
            _pivots, (parts,), products.double().contiguous(), along.double().contiguous(), length, counts.to(torch.int8),
            guess.to(torch.int8).contiguous(), z.new_full((1,), rho), p, rows, rows.stride(0), whole, table, z, solved, m,
            *((1e-9, 1e-6, 1e-12, 1e-10) if single else (1e-12, 1e-9, 1e-9, 1e-9)),
            SIZE=size, SHORT=SHORT, WIDTH=16, ROWS=16, num_warps=4 if size < MOST else 8,
        )  # fmt: skip
        return z, solved.bool()

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
