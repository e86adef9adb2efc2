"""Projection on the cone {u : <u, M_i> >= 0 for all i}: GradMA's quadratic programme (spec II.1).

    primal   u* = argmin |u - p|^2 / 2   subject to <u, M_i> >= rho |p| |M_i|
    dual     z* = argmin_{z >= 0} z'Gz / 2 + b'z ,   G = M'M ,  b = M'p - rho |p| |M_i|
    recover  u* = p + M z*

The dual is solved by Lawson and Hanson's active-set method on the normalised problem (unit columns, unit p), which ends
at an exact KKT point. A Gram matrix of float32 columns carries about 1e-7 of noise: where the solution leans on digits
that it does not have, the Gram matrix is computed again in float64, and where even that is too ill-conditioned
(near-antipodal columns) the active columns themselves are factorised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


class Projection(NamedTuple):
    """The projected vector, its multipliers, and how well it was found."""

    u: Tensor  # [P]
    z: Tensor  # [m] float64, the multipliers of the columns as given
    solved: bool  # False: non-finite input or no convergence; then u is p, or the best point found


def gram(rows: Tensor, others: Tensor) -> Tensor:
    """Inner products [a, b] of rows [a, P] with others [b, P]."""
    return rows @ others.T


def project(p: Tensor, rows: Tensor, products: Tensor | None = None, rho: float = 0.0) -> Projection:
    """The nearest u to p [P] with <u, row> >= rho |p| |row| for every row of [m, P].

    `products` [m, m] is the rows' Gram matrix where the caller already has it. Rows that are exactly zero do not count.

    >>> project(torch.tensor([1.0, -1.0]), torch.tensor([[0.0, 1.0]])).u
    tensor([1., 0.])
    """
    still = torch.zeros(len(rows), dtype=torch.float64, device=p.device)
    G, b, size = normalised(p, rows, gram(rows, rows) if products is None else products, rho)
    if not (np.isfinite(G).all() and np.isfinite(b).all()):
        return Projection(p, still, False)
    if (b >= 0).all():  # feasible already: p itself, bit for bit
        return Projection(p, still, True)
    single = p.dtype != torch.float64
    z, solved = solve(G, b, tolerance=1e-6 if single else 1e-12)
    if single and (not solved or digits_lost(G, z > 0) > 4):
        G, b, size = normalised(p.double(), rows.double(), gram(rows.double(), rows.double()), rho)
        z, solved = solve(G, b, tolerance=1e-12)
    straight = None
    if not solved or digits_lost(G, z > 0) > 8:
        z, straight, solved = by_columns(p, rows, size, rho)
    active = z > 0
    index = torch.from_numpy(np.flatnonzero(active)).to(p.device)
    multiplier = still.index_copy(
        0, index, torch.from_numpy(z[active] * float(p.double().norm()) / size[active]).to(p.device)
    )
    u = p + (multiplier[index] @ rows[index].double()).to(p.dtype) if straight is None else straight
    return Projection(u, multiplier, solved)


def normalised(p: Tensor, rows: Tensor, products: Tensor, rho: float) -> tuple[Array, Array, Array]:
    """G and b for unit columns and unit p, and the columns' lengths. A zero column (or p = 0) constrains nothing."""
    size = products.diagonal().double().clamp(min=0).sqrt()
    if bool(
        (rows[size == 0] != 0).any()
    ):  # so short that its square is zero: its length counts for nothing, so stretch it
        scale = rows.abs().amax(1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny).double()
        even = rows.double() / scale
        stretched = normalised(p.double(), even, gram(even, even), rho)
        return stretched[0], stretched[1], stretched[2] * scale.squeeze(1).cpu().numpy()
    length = p.double().norm()
    inverse = torch.where(size > 0, 1 / size, 0.0)
    G = (products.double() * inverse * inverse[:, None]).cpu().numpy()
    b = (rows @ p).double() * inverse * torch.where(length > 0, 1 / length, 0.0) - rho * (size > 0).double()
    return G, torch.where((size > 0) & (length > 0), b, b.clamp(min=0)).cpu().numpy(), size.cpu().numpy()


def solve(G: Array, b: Array, tolerance: float) -> tuple[Array, bool]:
    """z >= 0 with w = Gz + b >= -tolerance and zw = 0, from the Gram matrix; and whether it was found.

    >>> solve(np.eye(2), np.array([-1.0, 2.0]), 1e-12)[0]
    array([1., 0.])
    """

    def multipliers(passive: NDArray[np.bool_]) -> Array | None:
        try:
            return np.linalg.solve(G[np.ix_(passive, passive)], -b[passive]).astype(np.float64)
        except np.linalg.LinAlgError:
            return None

    return lawson_hanson(len(b), lambda z: G @ z + b, multipliers, tolerance)


def lawson_hanson(
    count: int,
    slack: Callable[[Array], Array],
    multipliers: Callable[[NDArray[np.bool_]], Array | None],
    tolerance: float,
) -> tuple[Array, bool]:
    """The active-set method (Lawson & Hanson 1974, ch. 23): z >= 0, slack(z) >= -tolerance, z slack(z) = 0.

    `multipliers` gives the z of the passive columns for which their slack is zero, None where they are dependent.
    """
    z = np.zeros(count)
    passive = np.zeros(count, dtype=bool)  # the columns whose multiplier may be positive
    refused = np.zeros(count, dtype=bool)  # columns that round-off would let in and out for ever
    for _ in range(10 * count + 10):
        w = slack(z)
        w[passive | refused] = 0.0
        j = int(w.argmin())
        if w[j] >= -tolerance - 2e-15 * z.max():  # the second term is the round-off of w itself
            return z, bool(slack(z).min() >= -max(tolerance, 1e-9))
        passive[j] = True
        while passive.any():
            found = multipliers(passive)
            if found is None:  # column j lies in the span of the others
                passive[j], refused[j] = False, True
                break
            s = np.zeros(count)
            s[passive] = found
            falling = passive & (s <= 0)
            if not falling.any():
                if (s != z).any():
                    refused[:] = False
                z = s
                break
            if falling[j] and z[j] == 0:  # by w[j] < 0 it should rise: round-off, leave it out
                passive[j], refused[j] = False, True
                continue
            room = z[falling] / (z[falling] - s[falling])
            z = np.where(passive, z + room.min() * (s - z), 0.0)
            out = falling & (z <= 1e-15 * (1 + z.max()))
            out[np.flatnonzero(falling)[room.argmin()]] = True
            passive &= ~out
            z[~passive] = 0.0
    return z, False


def by_columns(p: Tensor, rows: Tensor, size: Array, rho: float) -> tuple[Array, Tensor, bool]:
    """Multipliers and projection from the unit columns themselves, where their Gram matrix has lost too many digits.

    The columns and p are first turned into a small triangle (QR), which keeps all angles; then every solve is a least
    squares problem on it, without directions that are round-off: for M = USV', a = rho S^-1 V'1 - U'p gives z = V S^-1 a and
    u = p + Ua. u is taken from U, not from Mz, because z may be as large as the columns are alike.
    """
    wide, there = p.double().cpu().numpy(), size > 0
    length = np.linalg.norm(wide)
    M = rows.double().cpu().numpy()[there].T / size[there]
    Q, R = np.linalg.qr(np.column_stack([M, wide / length]))
    A, q = R[:, :-1], R[:, -1]

    def parts(passive: NDArray[np.bool_]) -> tuple[Array, Array]:
        """z of the passive columns, and how p moves."""
        U, S, Vt = np.linalg.svd(A[:, passive], full_matrices=False)
        real = S / S[0] > 1e-14 * max(A.shape)
        U, S, Vt = U[:, real], S[real], Vt[real]
        a = rho * Vt.sum(1) / S - U.T @ q
        return Vt.T @ (a / S), U @ a

    def slack(z: Array) -> Array:
        moved = parts(z > 0)[1] if (z > 0).any() else 0.0
        w: Array = A.T @ (q + moved) - rho
        w[z > 0] = 0.0
        return w

    z, solved = lawson_hanson(A.shape[1], slack, lambda passive: parts(passive)[0], 1e-12)
    moved = parts(z > 0)[1] if (z > 0).any() else np.zeros(len(q))
    found = np.zeros(len(size))
    found[there] = z
    return found, torch.from_numpy(wide + length * (Q @ moved)).to(p), solved


def digits_lost(G: Array, active: NDArray[np.bool_]) -> float:
    """How many decimal digits a solve on the active columns loses: log10 of the condition number."""
    if not active.any():
        return 0.0
    eigenvalues = np.linalg.eigvalsh(G[np.ix_(active, active)])
    return float(np.log10(eigenvalues[-1] / max(eigenvalues[0], 1e-300)))
