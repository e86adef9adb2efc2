"""The batched projection on three constraints against the general solver and against scipy's nnls."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.reference import plain
from undrift.algorithms.gradient_memory import cone
from undrift.algorithms.gradient_memory.cone3 import project_three

KINDS = (
    "random", "collinear", "twins", "antipodal", "antipodal and against p", "one zero", "two zeros", "all zero",
    "zero p", "triplets", "spanning", "p in the cone", "p against all", "short and long",
)  # fmt: skip
LEADS: tuple[tuple[int, ...], ...] = ((), (5,), (2, 5))
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6}  # relative to |p|


def rows(kind: str, lead: tuple[int, ...], size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """p [*lead, size] and M [*lead, 3, size] in which factors are powers of two, so that they are exact."""
    generator = torch.Generator().manual_seed(KINDS.index(kind) + 100 * size)
    p = torch.randn(*lead, size, generator=generator, dtype=dtype)
    M = torch.randn(*lead, 3, size, generator=generator, dtype=dtype)
    if kind == "collinear":
        M[..., 1, :] = 4 * M[..., 0, :]
    elif kind == "twins":
        M[..., 2, :] = M[..., 0, :]
    elif kind == "antipodal":
        M[..., 2, :] = -M[..., 1, :] / 64
    elif kind == "antipodal and against p":
        M[..., 1, :], M[..., 2, :] = M[..., 0, :], -M[..., 0, :] / 64
        p = p - 2 * M[..., 0, :]
    elif kind == "one zero":
        M[..., 2, :] = 0
    elif kind == "two zeros":
        M[..., :2, :] = 0
    elif kind == "all zero":
        M = torch.zeros_like(M)
    elif kind == "zero p":
        p = torch.zeros_like(p)
    elif kind == "triplets":
        M[..., 1, :], M[..., 2, :] = M[..., 0, :], 2 * M[..., 0, :]
        p = p - M[..., 0, :]
    elif kind == "spanning":  # in the first two dimensions nothing is left
        M = torch.zeros_like(M)
        M[..., 0, 0], M[..., 1, 1], M[..., 2, 0], M[..., 2, 1] = 1, 2, -1, -1
    elif kind == "p in the cone":
        p = (M / M.norm(dim=-1, keepdim=True)).sum(-2) + 0.0 * p
        M = M + 4 * p.unsqueeze(-2)
    elif kind == "p against all":
        p = -M.sum(-2)
    elif kind == "short and long":
        M = M * torch.tensor([2.0**-20, 1.0, 2.0**12], dtype=dtype).unsqueeze(-1)
    return p, M


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_three_constraints_agree_with_the_general_solver_and_with_nnls(
    kind: str, dtype: torch.dtype, lead: tuple[int, ...]
) -> None:
    for size in (3, 40):
        p, M = rows(kind, lead, size, dtype)
        kept = p.clone(), M.clone()
        u, active = project_three(p, M.unbind(-2))
        assert (u.shape, u.dtype, active.shape, active.dtype) == (p.shape, dtype, M.shape[:-1], torch.bool)
        assert torch.equal(p, kept[0]) and torch.equal(M, kept[1])
        for place in itertools.product(*map(range, lead)):
            one, columns = p[place], M[place]
            length = max(float(one.norm()), 1e-30)
            general = cone.project(one, columns)
            exact, _ = plain.project(one.double().numpy(), [c.double().numpy() for c in columns], 0.0)
            assert general.solved
            assert float((u[place] - general.u).norm()) <= 2 * CLOSE[dtype] * length
            assert np.linalg.norm(u[place].double().numpy() - exact) <= CLOSE[dtype] * length
            assert not active[place][columns.norm(dim=-1) == 0].any()
            if not active[place].any():
                assert torch.equal(u[place], one)
            if kind in ("p in the cone", "all zero", "zero p"):
                assert torch.equal(u[place], one) and not active[place].any()
            alone, who = project_three(one, columns.unbind(-2))  # the leading dimensions change nothing
            assert float((alone - u[place]).norm()) <= CLOSE[dtype] * length and torch.equal(who, active[place])


@pytest.mark.parametrize("rho", [0.0625, 0.3])
@pytest.mark.parametrize("kind", ["random", "twins", "collinear", "one zero", "all zero", "p against all", "zero p"])
def test_margins_agree_with_the_general_solver_and_with_nnls(kind: str, rho: float) -> None:
    p, M = rows(kind, (6,), 20, torch.float64)
    u, _ = project_three(p, M.unbind(-2), rho)
    for i in range(6):
        length = max(float(p[i].norm()), 1e-30)
        exact, _ = plain.project(p[i].numpy(), list(M[i].numpy()), rho)
        assert np.linalg.norm(u[i].numpy() - exact) <= 1e-11 * length
        assert float((u[i] - cone.project(p[i], M[i], rho=rho).u).norm()) <= 1e-11 * length


def near_antipodal(apart: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a client sees at its second step: M_1 = M_2 and M_3 all but opposite to them."""
    generator = torch.Generator().manual_seed(7)
    p, M, n = (torch.randn(*shape, 60, generator=generator, dtype=torch.float64) for shape in ((40,), (40, 3), (40,)))
    M[:, 0] = M[:, 1]
    M[:, 2] = -0.01 * (M[:, 1] + apart * n)
    return p.to(dtype), M.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [9, 20_000])
def test_no_length_loses_digits(size: int, dtype: torch.dtype) -> None:
    """Three rows and p with any lengths, each one of another client; factors are powers of two, and so are those of u."""
    p, M = rows("p against all", (), size, dtype)
    exact, on = project_three(p, M.unbind(-2))
    assert bool(on.all())
    powers = (-110, -74, -66, 0, 60, 110) if dtype == torch.float32 else (-1000, -560, -530, 0, 520, 900)
    powers = powers if size < 100 else powers[1::3]
    lengths = torch.tensor(list(itertools.product(powers, repeat=4)), dtype=torch.float64).exp2()  # [clients, 4]
    scaled = lengths[:, :3, None] * M.double()
    u, active = project_three((lengths[:, 3:] * p.double()).to(dtype), [row.to(dtype) for row in scaled.unbind(-2)])
    assert bool(active.all())
    gap = (u.double() / lengths[:, 3:] - exact.double()).norm(dim=-1) / p.double().norm()
    assert float(gap.max()) <= CLOSE[dtype]


@pytest.mark.parametrize("apart", [1e-2, 1e-3, 1e-4])
def test_nearly_antipodal_rows_in_float64(apart: float) -> None:
    """C-4: feasible to 1e-9 down to 1 + cos = 5e-9."""
    p, M = near_antipodal(apart, torch.float64)
    u, _ = project_three(p, M.unbind(-2))
    unit = M / M.norm(dim=-1, keepdim=True)
    assert float((unit @ u.unsqueeze(-1)).squeeze(-1).div(p.norm(dim=-1, keepdim=True)).min()) >= -1e-9
    for i in range(len(p)):
        exact, _ = plain.project(p[i].numpy(), list(M[i].numpy()), 0.0)
        assert np.linalg.norm(u[i].numpy() - exact) <= 1e-14 / apart**2 * 100 * float(p[i].norm())


@pytest.mark.parametrize("apart", [1e-2, 1e-3, 1e-4])
def test_nearly_antipodal_rows_in_float32(apart: float) -> None:
    """The nearest feasible point to p, of the rows as they are in float32."""
    p, M = near_antipodal(apart, torch.float32)
    u, _ = project_three(p, M.unbind(-2))
    wide = torch.stack([cone.project(q.double(), rows.double()).u for q, rows in zip(p, M, strict=True)])
    assert float(((u - wide).norm(dim=-1) / p.norm(dim=-1)).max()) <= 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["p", "row"])
def test_what_is_not_finite_comes_back_and_leaves_the_others_alone(where: str, bad: float) -> None:
    p, M = rows("p against all", (4,), 12, torch.float64)
    well, _ = project_three(p, M.unbind(-2))
    if where == "p":
        p[1, 3] = bad
    else:
        M[1, 0, 3] = bad
    u, _ = project_three(p, M.unbind(-2))
    assert torch.equal(u[[0, 2, 3]], well[[0, 2, 3]])
    if where == "p":
        assert not bool(torch.isfinite(u[1]).all())
