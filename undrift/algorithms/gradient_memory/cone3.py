"""Projection on a cone of at most three constraints, for all clients at once and without a branch on data.

All eight sets of active constraints are tried; the solution is the smallest that meets the Karush-Kuhn-Tucker conditions.
Sets of dependent rows are skipped: a subset gives the same solution. The work is done in float64 on coordinates of the three
rows and p in an orthonormal basis of their span, so that squaring nearly antipodal rows loses nothing. `cone.project` does the
same for one client.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from undrift.algorithms.gradient_memory.wide import rescale, wide_combination, wide_products
from undrift.core.forms import plain
from undrift.core.vec import constant

SETS = tuple(tuple(i in s for i in range(3)) for size in range(4) for s in itertools.combinations(range(3), size))


@plain
def project_three_parts(
    p: Tensor, rows: Sequence[Tensor], segments: list[slice], rho: float | Tensor = 0.0
) -> tuple[Tensor, Tensor]:
    """`project_three` for each segment of p [..., P] and the rows; also the active ones [..., T, 3]."""
    each = [project_three(p[..., s], [row[..., s] for row in rows], rho) for s in segments]
    return torch.cat([u for u, _ in each], -1), torch.stack([active for _, active in each], -2)


def project_three(p: Tensor, rows: Sequence[Tensor], rho: float | Tensor = 0.0) -> tuple[Tensor, Tensor]:
    """The nearest u to p [..., P] with <u, M_i> >= rho |p| |M_i| for three rows M_i [..., P]; also the active ones [..., 3].

    rho is a number or [..., 1]. Zero rows do not count. If nothing is active, or the input is not finite, u is p bit for bit.
    """
    vectors, wide = torch.stack([*rows, p], -2), p.dtype == torch.float64
    if wide:  # float32 vectors of any length can be squared in float64
        vectors, power = rescale(vectors)
    R, size, finite = coordinates(vectors)  # [..., 4, 4], its columns are the unit rows and p; [..., 4]; [..., 1]
    nonzero = (size[..., :3] > 0) & (size[..., 3:] > 0)
    margin = rho.unsqueeze(-1) if isinstance(rho, Tensor) else rho  # against the eight sets [..., 8, 3]
    z = multipliers(R[..., :3], R[..., 3], nonzero, margin, 1e-9 if wide else 1e-6)
    active = (z > 0) & finite
    share = torch.where(active, z / torch.where(nonzero, size[..., :3], 1.0), 0.0) * size[..., 3:]
    moved = wide_combination(share, vectors)
    moved = moved * power[..., 3, :] if wide else moved
    return torch.where(active.any(-1, keepdim=True), moved, p), active


def multipliers(A: Tensor, q: Tensor, nonzero: Tensor, rho: float | Tensor, tolerance: float) -> Tensor:
    """z [..., 3] >= 0 with w = A'(q + A z) - rho >= 0 and z w = 0, for columns A [..., 4, 3] of length one or zero."""
    on = constant(SETS, A)  # [8, 3]
    possible = (nonzero.unsqueeze(-2) | ~on).all(-1)  # [..., 8]
    # A_on = E T with orthonormal E and triangular T, for the eight sets at once; then T'T z = rho - A_on' q.
    columns = torch.where(on.unsqueeze(-2), A.unsqueeze(-3), 0.0)  # [..., 8, 4, 3]
    E: list[Tensor] = []
    T: dict[tuple[int, int], Tensor] = {}
    for j in range(3):
        v = columns[..., j]
        for i, e in enumerate(E):
            T[i, j] = (v * e).sum(-1)
            v = v - T[i, j].unsqueeze(-1) * e
        left = v.norm(dim=-1)
        independent = left > 1e-12
        possible = possible & (independent | ~on[:, j])
        T[j, j] = torch.where(independent, left, 1.0)
        E.append(v / T[j, j].unsqueeze(-1))
    right = torch.where(on, rho - (columns.mT @ q[..., None, :, None]).squeeze(-1), 0.0)  # [..., 8, 3]
    y0 = right[..., 0] / T[0, 0]
    y1 = (right[..., 1] - T[0, 1] * y0) / T[1, 1]
    y2 = (right[..., 2] - T[0, 2] * y0 - T[1, 2] * y1) / T[2, 2]
    z2 = y2 / T[2, 2]
    z1 = (y1 - T[1, 2] * z2) / T[1, 1]
    z0 = (y0 - T[0, 1] * z1 - T[0, 2] * z2) / T[0, 0]
    z = torch.where(on & possible.unsqueeze(-1), torch.stack([z0, z1, z2], -1), 0.0)
    moved = q.unsqueeze(-2) + (columns @ z.unsqueeze(-1)).squeeze(-1)
    w = (A.mT.unsqueeze(-3) @ moved.unsqueeze(-1)).squeeze(-1) - rho
    broken = torch.where(nonzero.unsqueeze(-2), torch.where(on, w.abs(), -w), 0.0)  # on: w = 0; off: w >= 0
    gap = torch.maximum((-z).amax(-1), broken.amax(-1)).clamp(min=0)
    gap = torch.where(possible & gap.isfinite(), gap, torch.inf)
    # The first set within the tolerance, else the best one.
    order = constant(tuple(range(-len(SETS), 0)), A, A.dtype)
    best = torch.where(gap <= tolerance, order, gap).argmin(-1, keepdim=True)
    return z.gather(-2, best.unsqueeze(-1).expand(*best.shape, 3)).squeeze(-2).clamp(min=0)


def coordinates(vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R [..., k, k]: coordinates of unit (or zero) vectors in an orthonormal basis of their span, for vectors [..., k, P].

    Also their lengths [..., k] and whether all is finite [..., 1]; vectors that are not finite count as zero.
    """
    products = wide_products(vectors)  # [..., k, k]
    finite = products.isfinite().all(-1).all(-1, keepdim=True)
    size = torch.where(finite, products.diagonal(dim1=-2, dim2=-1), 0.0).sqrt()
    inverse = torch.where(size > 0, 1 / torch.where(size > 0, size, 1.0), 0.0)
    if vectors.dtype == torch.float64:
        scaled = torch.where(finite.unsqueeze(-1), vectors, 0.0) * inverse.unsqueeze(-1)
        return orthogonalise(scaled), size, finite
    # For float32 vectors, products in float64 are exact enough: R is their Cholesky factor.
    G = torch.where(finite.unsqueeze(-1), products, 0.0) * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    return cholesky(G), size, finite


def orthogonalise(vectors: Tensor) -> Tensor:
    """R by Gram-Schmidt, each vector twice."""
    count = vectors.shape[-2]
    basis: list[Tensor] = []
    columns = []
    for j in range(count):
        v = vectors[..., j, :]
        column = [torch.zeros_like(v[..., 0]) for _ in range(count)]
        for i, e in [*enumerate(basis), *enumerate(basis)]:
            along = (v * e).sum(-1)
            v = v - along.unsqueeze(-1) * e
            column[i] = column[i] + along
        left = v.norm(dim=-1)
        left = torch.where(left > 1e-14, left, 0.0)  # less is round-off: the vector lies in the others' span
        column[j] = left
        basis.append(torch.where(left.unsqueeze(-1) > 0, v / torch.where(left > 0, left, 1.0).unsqueeze(-1), 0.0))
        columns.append(torch.stack(column, -1))
    return torch.stack(columns, -1)


def cholesky(G: Tensor) -> Tensor:
    """R [..., k, k], upper triangular, with R'R = G for unit vectors; dependent vectors add nothing."""
    count = G.shape[-1]
    R: list[list[Tensor]] = []  # rows
    for i in range(count):
        row = [torch.zeros_like(G[..., 0, 0])] * i
        left = G[..., i, i] - sum((R[h][i] ** 2 for h in range(i)), torch.zeros_like(G[..., 0, 0]))
        pivot = torch.where(left > 1e-14, left, 0.0).sqrt()
        for j in range(i, count):
            rest = G[..., i, j] - sum((R[h][i] * R[h][j] for h in range(i)), torch.zeros_like(pivot))
            row.append(torch.where(pivot > 0, rest / torch.where(pivot > 0, pivot, 1.0), 0.0))
        R.append(row)
    return torch.stack([torch.stack(row, -1) for row in R], -2)
