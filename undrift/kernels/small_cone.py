"""Projection on a cone of at most three constraints, for all clients at once and without a branch on data.

The eight sets of active constraints are tried together, in the order of their size; the first that meets the
Karush-Kuhn-Tucker conditions is the solution (spec II.2). Everything is worked out in float64 on the coordinates of the
three rows and p in an orthonormal basis of their span, so that nothing is lost by squaring nearly antipodal rows.
`undrift.cone.project`, one client at a time, is its plain form.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

SETS = [s for size in range(4) for s in itertools.combinations(range(3), size)]


def project_three(p: Tensor, M: Tensor, rho: float = 0.0) -> tuple[Tensor, Tensor]:
    """The nearest u to p [..., P] with <u, M_i> >= rho |p| |M_i| for the rows of M [..., 3, P]; also who is active [..., 3].

    Rows that are exactly zero do not count. Where nothing is active, or the input is not finite, u is p bit for bit.
    """
    size, length = M.double().norm(dim=-1), p.double().norm(dim=-1, keepdim=True)
    finite = (size.sum(-1, keepdim=True) + length).isfinite()
    there = (size > 0) & (length > 0) & finite
    inverse = torch.where(there, 1 / torch.where(there, size, 1.0), 0.0)
    unit = torch.where(finite & (length > 0), p.double() / torch.where(length > 0, length, 1.0), 0.0)
    rows = torch.where(finite.unsqueeze(-1), M.double(), 0.0) * inverse.unsqueeze(-1)
    R = coordinates(torch.cat([rows, unit.unsqueeze(-2)], -2))  # [..., 4, 4], its columns are the rows and p
    A, q = R[..., :3], R[..., 3]

    tolerance = 1e-9 if p.dtype == torch.float64 else 1e-6
    best, best_gap = torch.zeros_like(inverse), torch.full_like(length, torch.inf)
    done = torch.zeros_like(finite)
    for chosen in SETS:
        on = torch.zeros(3, dtype=torch.bool, device=p.device)
        on[list(chosen)] = True
        inverted = torch.linalg.pinv(torch.where(on, A, 0.0), rtol=1e-13)  # [..., 3, 4]
        right = rho * (inverted * on.unsqueeze(-1)).sum(-2) - q
        z = torch.where(on, (inverted @ right.unsqueeze(-1)).squeeze(-1), 0.0)
        moved = q + (A @ z.unsqueeze(-1)).squeeze(-1)
        w = (A.mT @ moved.unsqueeze(-1)).squeeze(-1) - rho
        broken = torch.where(there, torch.where(on, w.abs(), -w), 0.0)  # on: w = 0; off: w >= 0
        gap = torch.maximum((-z).amax(-1, keepdim=True), broken.amax(-1, keepdim=True)).clamp(min=0)
        gap = torch.where((there | ~on).all(-1, keepdim=True), gap, torch.inf)
        take = ~done & ((gap <= tolerance) | (gap < best_gap))
        best, best_gap = torch.where(take, z, best), torch.where(take, gap, best_gap)
        done = done | (gap <= tolerance)
    z = best.clamp(min=0)
    active = (z > 0) & finite
    moved = length * (z.unsqueeze(-2) @ rows).squeeze(-2)
    return torch.where(active.any(-1, keepdim=True), (p.double() + moved).to(p.dtype), p), active


def coordinates(vectors: Tensor) -> Tensor:
    """R [..., k, k] with unit (or zero) vectors [..., k, P] = R' Q for orthonormal Q: Gram-Schmidt, each vector twice."""
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
        left = torch.where(left > 1e-14, left, 0.0)  # unit vectors: less is round-off of a vector in the others' span
        column[j] = left
        basis.append(torch.where(left.unsqueeze(-1) > 0, v / torch.where(left > 0, left, 1.0).unsqueeze(-1), 0.0))
        columns.append(torch.stack(column, -1))
    return torch.stack(columns, -1)
