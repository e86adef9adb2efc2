"""Projection on a cone of at most three constraints, for all clients at once and without a branch on data.

The eight sets of active constraints are tried together, in the order of their size; the first that meets the
Karush-Kuhn-Tucker conditions is the solution (spec II.2). `undrift.cone.project`, one client at a time, is its plain form.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

SETS = [s for size in range(4) for s in itertools.combinations(range(3), size)]


def project_three(p: Tensor, M: Tensor, rho: float = 0.0) -> tuple[Tensor, Tensor]:
    """The nearest u to p [..., P] with <u, M_i> >= rho |p| |M_i| for the rows of M [..., 3, P]; also who is active [..., 3].

    Rows that are exactly zero do not count. Where nothing is active, u is p bit for bit.
    """
    products = (M @ M.mT).double()  # [..., 3, 3]
    size = products.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    length = p.double().norm(dim=-1, keepdim=True)
    inverse = torch.where(size > 0, 1 / size, 0.0)
    there = (size > 0) & (length > 0)
    G = products * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    b = (M @ p.unsqueeze(-1)).squeeze(-1).double() * inverse / torch.where(length > 0, length, 1.0) - rho
    b = torch.where(there, b, b.clamp(min=0) + 1.0)  # a row that is not there is met with room to spare

    tolerance = 1e-9 if p.dtype == torch.float64 else 1e-6
    eye = torch.eye(3, dtype=torch.float64, device=p.device)
    best_z, best_gap = torch.zeros_like(b), torch.full_like(b[..., :1], torch.inf)
    done = torch.zeros_like(best_gap, dtype=torch.bool)
    for chosen in SETS:
        on = torch.zeros(3, dtype=torch.bool, device=p.device)
        on[list(chosen)] = True
        both = on.unsqueeze(-1) & on
        system = torch.where(both, G, eye)  # the constraints that are off solve z = 0
        regular = torch.linalg.eigvalsh(system)[..., :1] > 1e-12
        z = torch.linalg.solve_ex(torch.where(regular.unsqueeze(-1), system, eye), torch.where(on, -b, 0.0)).result
        w = (G @ z.unsqueeze(-1)).squeeze(-1) + b
        gap = torch.maximum((-z).amax(-1, keepdim=True), torch.where(on, 0.0, -w).amax(-1, keepdim=True)).clamp(min=0)
        gap = torch.where(regular & (there | ~on).all(-1, keepdim=True), gap, torch.inf)
        take = ~done & ((gap <= tolerance) | (gap < best_gap))
        best_z, best_gap = torch.where(take, z, best_z), torch.where(take, gap, best_gap)
        done = done | (gap <= tolerance)
    z = best_z.clamp(min=0) * length * inverse
    moved = (z.unsqueeze(-2) @ M.double()).squeeze(-2).to(p.dtype)
    active = z > 0
    return torch.where(active.any(-1, keepdim=True), p + moved, p), active
