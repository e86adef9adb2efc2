"""Projection on the cone {u : <u, M_i> >= 0 for all i}: GradMA's quadratic programme.

    primal   u* = argmin |u - p|^2 / 2   subject to <u, M_i> >= rho |p| |M_i|
    dual     z* = argmin_{z >= 0} z'Gz / 2 + b'z ,   G = M'M ,  b = M'p - rho |p| |M_i|
    recover  u* = p + M z*

Lawson and Hanson's active-set method solves the dual on the normalised problem (unit columns, unit p) and ends at an exact KKT
point. A Gram matrix of float32 columns has about 1e-7 of noise. If the solution needs more digits, the Gram matrix is computed
again in float64; if that is too ill-conditioned (near-antipodal columns), the active columns themselves are factorised.
Columns, or p, whose products underflow or overflow are first divided by powers of two. Only columns of zeros are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.gradient_memory.wide import rescale
from undrift.core.forms import plain
from undrift.core.vec import place_with

Array = NDArray[np.float64]


class Projection(NamedTuple):
    """The projected vector, its multipliers, and whether they are a solution."""

    u: Tensor  # [P]
    z: Tensor  # [m] float64, the multipliers of the given columns, where `counts` lies
    solved: Tensor  # [] False: non-finite input or no convergence; then u is p, or the best point found


def gram(rows: Tensor, others: Tensor) -> Tensor:
    """Inner products [a, b] of rows [a, P] with others [b, P]."""
    return rows @ others.T


@plain
def grams(rows: Tensor, others: Tensor, segments: list[slice]) -> Tensor:
    """Inner products [T, a, b], segment by segment; a faster form may sum in float64."""
    return torch.stack([gram(rows[:, s], others[:, s]) for s in segments])


@plain
def project_parts(
    p: Tensor,
    rows: Tensor,
    segments: list[slice],
    products: Tensor,
    along: Tensor,
    counts: Tensor,
    start: Tensor,
    rho: float = 0.0,
) -> Projection:
    """`project` for each segment of p [P] and the rows: u [P], z [T, m] and solved [T]."""
    each = [
        project(p[s], rows[:, s], G, rho, a, counts, guess)
        for s, G, a, guess in zip(segments, products, along, start, strict=True)
    ]
    u, z, solved = zip(*each, strict=True)
    return Projection(torch.cat(u), torch.stack(z), torch.stack(solved))


@plain(by_value=True)
def project(
    p: Tensor,
    rows: Tensor,
    products: Tensor | None = None,
    rho: float = 0.0,
    along: Tensor | None = None,
    counts: Tensor | None = None,
    start: Tensor | None = None,
    allowed: float | None = None,
) -> Projection:
    """The nearest u to p [P] with <u, row> >= rho |p| |row| for every row of [m, P].

    `products` [m, m] is the rows' Gram matrix and `along` [m] their products with p, if the caller has them. Only the nonzero
    rows in `counts` [m] are constraints. `start` [m] is a guess of the active rows, such as those of a similar programme. If no
    exact solution is found, one that breaks constraints of unit rows by at most `allowed` |p| will do: 1e-6 for float32, or else
    1e-9.

    >>> project(torch.tensor([1.0, -1.0]), torch.tensor([[0.0, 1.0]])).u
    tensor([1., 0.])
    """
    products = gram(rows, rows) if products is None else products
    along = gram(p.unsqueeze(0), rows).squeeze(0) if along is None else along
    length, single = norm(p), p.dtype != torch.float64
    allowed = allowed or (1e-6 if single else 1e-9)
    flat = torch.cat([products.double().flatten(), along.double(), length.view(1)]).cpu().numpy()  # one trip
    m = len(rows)
    wanted = np.ones(m, dtype=bool) if counts is None else counts.cpu().numpy()
    guess = np.zeros(m, dtype=bool) if start is None else start.cpu().numpy() & wanted
    G, b, size = normalise(flat[: m * m].reshape(m, m), flat[m * m : -1], flat[-1], rho, wanted)
    if extreme(p, rows, flat[-1], np.where(wanted, size, 1.0)):
        return project_evened(p, rows, rho, counts, wanted, guess, allowed)
    zero = torch.zeros(m, dtype=torch.float64) if counts is None else counts.new_zeros(m, dtype=torch.float64)
    yes, no = torch.tensor(True), torch.tensor(False)
    if not (np.isfinite(G).all() and np.isfinite(b).all()):
        return Projection(p, zero, no)
    if (b >= 0).all():  # feasible already: p itself, bit for bit
        return Projection(p, zero, yes)
    z, solved = solve(G, b, 1e-6 if single else 1e-12, guess)
    if single and (not solved or digits_lost(G, z > 0) > 4):
        wide = rows.double()
        exact = gram(wide, wide).cpu().numpy(), (wide @ p.double()).cpu().numpy()
        G, b, size = normalise(*exact, flat[-1], rho, wanted)
        z, solved = solve(G, b, 1e-12, guess)
    straight = None
    if not solved or digits_lost(G, z > 0) > 8:
        z, straight, solved = by_columns(p, rows, np.where(wanted, size, 0.0), rho, allowed)
        if allowed >= 1e-6 and not solved:  # columns of last digits: an exact solution has no meaning, a good one has
            other, off = with_ridge(G, b)
            z, straight, solved = (other, None, True) if off <= allowed else (z, straight, solved)
    active = z > 0
    index, share = np.flatnonzero(active), z[active] * flat[-1] / size[active]
    chosen, weights = torch.from_numpy(index), torch.from_numpy(share)
    u = combine(p, rows, place_with(chosen, p), place_with(weights, p)) if straight is None else straight
    z_all = zero.index_copy(0, place_with(chosen, zero), place_with(weights, zero))
    return Projection(u, z_all, yes if solved else no)


@plain
def norm(p: Tensor) -> Tensor:
    """|p| in float64."""
    length: Tensor = torch.linalg.vector_norm(p, dtype=torch.float64)
    return length


@plain
def combine(p: Tensor, rows: Tensor, index: Tensor, share: Tensor) -> Tensor:
    """p [P] + share [n] rows[index] in float64, for rows [m, P]."""
    return (p.double() + share @ rows[index].double()).to(p.dtype)


def usual_lengths(rows: Tensor) -> tuple[float, float]:
    """The lengths between which products of vectors like rows [m, P] lose no digits: those of their entries do not underflow."""
    kind = torch.finfo(rows.dtype)
    return math.sqrt(rows.shape[1] * kind.tiny / kind.eps), math.sqrt(kind.max)


def extreme(p: Tensor, rows: Tensor, length: float, size: Array) -> bool:
    """Whether p or a row, finite and not zero, is too short or too long for the products that gave these lengths."""
    least, most = usual_lengths(rows)
    odd = torch.from_numpy(np.flatnonzero(~((size >= least) & (size <= most))))
    some = [rows[place_with(odd, rows)]] if len(odd) else []
    some += [] if least <= length <= most else [p.unsqueeze(0)]
    return any(bool((v.any(1) & v.isfinite().all(1)).any()) for v in some)


def project_evened(
    p: Tensor, rows: Tensor, rho: float, counts: Tensor | None, wanted: NDArray[np.bool_], guess: NDArray[np.bool_],
    allowed: float,
) -> Projection:  # fmt: skip
    """`project` of vectors divided by powers of two: the columns' lengths do not matter, and u is in proportion to p."""
    (even, power), (direction, scale) = rescale(rows), rescale(p)
    on_host = torch.from_numpy(wanted), torch.from_numpy(guess)
    found = project(direction, even, None, rho, None, *on_host, allowed)
    active, kind = found.z > 0, torch.finfo(torch.float64)
    u = (found.u * scale).to(p.dtype) if bool(active.any()) else p
    z = (found.z * scale.cpu() / power[:, 0].cpu()).clamp(kind.tiny, kind.max)  # active, whatever its size
    z = torch.where(active, z, 0.0)
    return Projection(u, z if counts is None else place_with(z, counts), found.solved)


def normalise(
    products: Array, along: Array, length: float, rho: float, wanted: NDArray[np.bool_]
) -> tuple[Array, Array, Array]:
    """G and b for unit columns and unit p, and the columns' lengths. A zero column (or p = 0) constrains nothing."""
    size = np.sqrt(np.clip(products.diagonal(), 0.0, None))
    counted = wanted & (size > 0)
    inverse = np.divide(1.0, size, out=np.zeros_like(size), where=counted)
    with np.errstate(invalid="ignore"):  # an infinite column times its inverse; the caller checks
        G: Array = products * inverse * inverse[:, None]
        b: Array = along * inverse * (1 / length if length > 0 else 0.0) - rho * counted
    return G, np.where(counted & (length > 0), b, np.maximum(np.where(wanted, b, 0.0), 0)), size


def solve(G: Array, b: Array, tolerance: float, guess: NDArray[np.bool_] | None = None) -> tuple[Array, bool]:
    """z >= 0 with w = Gz + b >= -tolerance and zw = 0, from the Gram matrix; and whether it was found.

    The search begins with the columns of `guess` whose multipliers are positive.

    >>> solve(np.eye(2), np.array([-1.0, 2.0]), 1e-12)[0]
    array([1., 0.])
    """

    def multipliers(passive: NDArray[np.bool_]) -> Array | None:
        try:
            return np.linalg.solve(G[np.ix_(passive, passive)], -b[passive]).astype(np.float64)
        except np.linalg.LinAlgError:
            return None

    return lawson_hanson(len(b), lambda z: G @ z + b, multipliers, tolerance, guess)


def lawson_hanson(
    count: int,
    slack: Callable[[Array], Array],
    multipliers: Callable[[NDArray[np.bool_]], Array | None],
    tolerance: float,
    guess: NDArray[np.bool_] | None = None,
    allowed: float = 1e-9,
) -> tuple[Array, bool]:
    """The active-set method (Lawson & Hanson 1974, ch. 23): z >= 0, slack(z) >= -tolerance, z slack(z) = 0.

    `multipliers` gives the z of the passive columns that makes their slack zero, None if they are dependent. The slack of columns
    that cannot enter for round-off may be as low as -allowed.
    """
    z, passive = find_start(count, multipliers, guess)  # passive columns may have a positive multiplier
    refused = np.zeros(count, dtype=bool)  # columns that would enter and leave forever by round-off
    for _ in range(10 * count + 10):
        w = slack(z)
        w[passive | refused] = 0.0
        j = int(w.argmin())
        if w[j] >= -tolerance - 2e-15 * z.max():  # the second term is the round-off of w itself
            return z, bool(slack(z).min() >= -max(tolerance, allowed))
        passive[j] = True
        while passive.any():
            candidate = multipliers(passive)
            if candidate is None:  # column j lies in the span of the others
                passive[j], refused[j] = False, True
                break
            s = np.zeros(count)
            s[passive] = candidate
            falling = passive & (s <= 0)
            if not falling.any():
                if (s != z).any():
                    refused[:] = False
                z = s
                break
            if falling[j] and z[j] == 0:  # w[j] < 0 says it should rise: round-off, refuse it
                passive[j], refused[j] = False, True
                continue
            room = z[falling] / (z[falling] - s[falling])
            z = np.where(passive, z + room.min() * (s - z), 0.0)
            out = falling & (z <= 1e-15 * (1 + z.max()))
            out[np.flatnonzero(falling)[room.argmin()]] = True
            passive &= ~out
            z[~passive] = 0.0
    return z, False


def find_start(
    count: int, multipliers: Callable[[NDArray[np.bool_]], Array | None], guess: NDArray[np.bool_] | None
) -> tuple[Array, NDArray[np.bool_]]:
    """A start for the active-set method: the guessed columns with positive multipliers."""
    passive = np.zeros(count, dtype=bool) if guess is None else guess.copy()
    while passive.any():
        candidate = multipliers(passive)
        if candidate is None:
            break
        if (candidate > 0).all():
            z = np.zeros(count)
            z[passive] = candidate
            return z, passive
        passive[np.flatnonzero(passive)[candidate <= 0]] = False
    return np.zeros(count), np.zeros(count, dtype=bool)


def by_columns(p: Tensor, rows: Tensor, size: Array, rho: float, allowed: float) -> tuple[Array, Tensor, bool]:
    """Multipliers and projection from the unit columns themselves, for Gram matrices that have lost too many digits.

    A QR factorisation turns the columns and p into a small triangle with the same angles. Every solve is a least squares problem
    on it, without directions that are round-off: for M = USV', a = rho S^-1 V'1 - U'p gives z = V S^-1 a and u = p + Ua. u comes
    from U, not from Mz, because z is huge if columns are nearly alike.
    """
    wide, used = p.double().cpu().numpy(), size > 0
    length = np.linalg.norm(wide)
    M = rows.double().cpu().numpy()[used].T / size[used]
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

    z, solved = lawson_hanson(A.shape[1], slack, lambda passive: parts(passive)[0], 1e-12, allowed=allowed)
    moved = parts(z > 0)[1] if (z > 0).any() else np.zeros(len(q))
    z_all = np.zeros(len(size))
    z_all[used] = z
    return z_all, torch.from_numpy(wide + length * (Q @ moved)).to(p), solved


def with_ridge(G: Array, b: Array) -> tuple[Array, float]:
    """Multipliers from G with a little more on its diagonal, corrected with G itself; and how far they are off."""
    best, least = np.zeros(len(b)), np.inf
    for ridge in (1e-12, 1e-11, 1e-10):
        firm = G + ridge * np.eye(len(b))
        z, _ = solve(firm, b, 1e-9)
        for _ in range(4):
            w = G @ z + b
            active = z > 0
            off = float(np.where(active, np.abs(w), -w).max())
            best, least = (z, off) if off < least else (best, least)
            change = np.linalg.solve(firm[np.ix_(active, active)], w[active])
            z = np.where(active, z, 0.0)
            z[active] = np.maximum(z[active] - change, 0.0)
        if least <= 1e-6:
            break
    return best, least


def digits_lost(G: Array, active: NDArray[np.bool_]) -> float:
    """The decimal digits that a solve on the active columns loses: log10 of the condition number."""
    if not active.any():
        return 0.0
    eigenvalues = np.linalg.eigvalsh(G[np.ix_(active, active)])
    return float(np.log10(eigenvalues[-1] / max(eigenvalues[0], 1e-300)))
