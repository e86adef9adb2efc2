"""GradMA's quadratic programme: KKT, its exact relations (R14, R15), degenerate cases, and scipy's nnls as a second oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor

from undrift.algorithms.gradient_memory.cone import gram, project

problems = st.tuples(
    st.integers(1, 20),
    st.integers(1, 15),
    st.integers(0, 2**31),
    st.sampled_from(["plain", "twins", "antipodal", "few", "scales", "spanning"]),
)


def problem(d: int, m: int, seed: int, kind: str) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    p = torch.randn(d, dtype=torch.float64, generator=random)
    rows = torch.randn(m, d, dtype=torch.float64, generator=random)
    if kind == "twins" and m > 1:
        rows[1] = 3 * rows[0]
    if kind == "antipodal" and m > 1:  # 1 + cos about 2e-9
        noise = torch.randn(d, dtype=torch.float64, generator=random)
        rows[1] = -rows[0] + 6e-5 * rows[0].norm() * noise / noise.norm()
    if kind == "few":
        rows = rows[:1] * torch.randn(m, 1, dtype=torch.float64, generator=random)
    if kind == "scales":
        rows = rows * 10 ** (4 * torch.randn(m, 1, dtype=torch.float64, generator=random))
    if kind == "spanning":
        rows = torch.cat([rows, -rows])
    return p, rows


def normalised(p: Tensor, rows: Tensor, u: Tensor, z: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Slack w and multipliers z of the problem with unit rows and unit p."""
    size = rows.norm(dim=1)
    return ((rows @ u) / size / p.norm()).numpy(), (z * size / p.norm()).numpy()


@settings(max_examples=4000, deadline=None)
@given(problems)
def test_kkt_and_nnls(made: tuple[int, int, int, str]) -> None:
    """R14: w >= -1e-9, |zw| <= 1e-9 (1 + max z), z >= 0, u = p + Mz; and the same point as scipy's solver finds."""
    p, rows = problem(*made)
    found = project(p, rows)
    w, z = normalised(p, rows, found.u, found.z)
    assert found.solved and z.min() >= 0
    assert w.min() >= -1e-9
    assert abs(z * w).max() <= 1e-9 * (1 + z.max())
    torch.testing.assert_close(found.u, p + found.z @ rows, atol=1e-9 * (1 + z.max()), rtol=0)
    unit = rows / rows.norm(dim=1, keepdim=True)
    second, _ = nnls(unit.T.numpy(), -p.numpy(), maxiter=10_000)
    assert np.abs(p.numpy() + unit.T.numpy() @ second - found.u.numpy()).max() <= 1e-7 * (1 + second.max())


@settings(max_examples=400, deadline=None)
@given(problems, st.floats(0.01, 100.0))
def test_relations(made: tuple[int, int, int, str], c: float) -> None:
    """R14: Pythagoras, idempotence, homogeneity, permutation, duplication, non-expansiveness."""
    p, rows = problem(*made)
    u, z, _ = project(p, rows)
    scale = float(p.norm())
    close = 1e-8 * scale * (1 + float((z * rows.norm(dim=1)).max()) / scale)
    assert abs(p.square().sum() - u.square().sum() - (z @ rows).square().sum()) <= 10 * close * scale
    assert u.norm() <= scale + close
    again = project(u, rows).u
    assert (again - u).abs().max() <= close
    stretched = project(c * p, rows * torch.rand(len(rows), 1, dtype=torch.float64).add(0.1)).u
    assert (stretched - c * u).abs().max() <= 10 * c * close
    turned = project(p, torch.cat([rows, rows]).flip(0)).u
    assert (turned - u).abs().max() <= close
    q = p + torch.randn_like(p)
    assert (project(q, rows).u - u).norm() <= (q - p).norm() + close


def test_a_feasible_vector_comes_back_itself() -> None:
    rows = torch.randn(5, 8, dtype=torch.float64)
    p = rows.sum(0) * 10 + rows[0]
    p = project(p, rows).u + 1e-3 * rows.abs().max() * 0
    inside = rows.T @ torch.linalg.solve(rows @ rows.T, torch.ones(5, dtype=torch.float64))  # <inside, row> = 1
    assert project(inside, rows).u is inside


def test_degenerate_cases() -> None:
    v = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    p = torch.tensor([-1.0, 0.5, 3.0], dtype=torch.float64)
    zero = torch.zeros_like(p)
    assert torch.equal(project(zero, v[None]).u, zero)
    with_zero = project(p, torch.stack([torch.zeros_like(v), v]))
    torch.testing.assert_close(with_zero.u, project(p, v[None]).u)
    assert with_zero.z[0] == 0
    across = project(p, torch.stack([v, -v])).u
    torch.testing.assert_close(across, p - (p @ v) / (v @ v) * v)  # antipodal: orthogonal to v
    everywhere = torch.cat([torch.eye(3), -torch.eye(3)]).double()
    torch.testing.assert_close(project(p, everywhere).u, zero)
    broken = project(torch.full_like(p, torch.nan), v[None])
    assert not broken.solved and torch.isnan(broken.u).all()
    unbounded = project(p, torch.stack([v, torch.full_like(v, torch.inf)]))
    assert not unbounded.solved and unbounded.u is p


@pytest.mark.parametrize("gap", [1e-3, 1e-5, 3e-8])
def test_nearly_antipodal_columns_are_solved_exactly(gap: float) -> None:
    """1 + cos down to 1e-15: the Gram matrix has lost its digits, the columns have not (spec C-4)."""
    random = torch.Generator().manual_seed(1)
    v, side = torch.randn(2, 50, dtype=torch.float64, generator=random)
    v, side = v / v.norm(), side - (side @ v) / (v @ v) * v
    rows = torch.stack([v, -v + gap * side / side.norm()])
    p = -side / side.norm() + 0.3 * v
    found = project(p, rows)
    w, z = normalised(p, rows, found.u, found.z)
    assert w.min() >= -1e-9 and abs(z * w).max() <= 1e-9 * (1 + z.max())
    assert z.max() > 0.1 / gap


def test_margin() -> None:
    """With rho the constraint is <u, M_i> >= rho |p| |M_i|."""
    p, rows = problem(10, 4, 3, "plain")
    found = project(p, rows, rho=0.1)
    slack = (rows @ found.u) / rows.norm(dim=1) / p.norm()
    assert slack.min() >= 0.1 - 1e-9 and (found.z > 0).any()
    assert (abs((slack - 0.1) * found.z) <= 1e-9).all()


def test_float32_is_as_good_as_its_digits_also_with_twins_and_near_antipodes() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 3000, generator=random) * 10 ** torch.randn(40, 1, generator=random)
    rows[1] = 2 * rows[0]
    rows[2] = -rows[3] + 1e-4 * rows[3].norm() * torch.randn(3000, generator=random) / 3000**0.5
    p = -rows.mean(0) / rows.mean(0).norm() + 0.02 * torch.randn(3000, generator=random)
    found = project(p, rows, gram(rows, rows))
    exact = project(p.double(), rows.double())
    assert found.solved
    assert (found.u - exact.u).norm() <= 1e-4 * p.norm()
    slack = (rows.double() @ found.u.double()) / rows.double().norm(dim=1) / p.norm()
    assert slack.min() >= -2e-5


def test_tensor_by_tensor_is_feasible_and_moves_further() -> None:
    """R15."""
    p, rows = problem(12, 6, 5, "plain")
    whole = project(p, rows).u
    parts = torch.cat([project(p[a], rows[:, a]).u for a in (slice(0, 5), slice(5, 12))])
    assert (rows @ parts).min() >= -1e-9
    assert (p - parts).norm() >= (p - whole).norm() - 1e-12 and not torch.allclose(parts, whole)


@pytest.mark.parametrize("noise", [4e-5, 1e-6])
def test_many_columns_along_one_line(noise: float) -> None:
    """Eight columns up and down one direction with a little noise: multipliers up to 1e6, and still exact."""
    for seed in range(60):
        random = torch.Generator().manual_seed(seed)
        line, p = torch.randn(2, 30, dtype=torch.float64, generator=random)
        rows = torch.randn(8, 1, dtype=torch.float64, generator=random) * line
        rows = rows + noise * torch.randn(8, 30, dtype=torch.float64, generator=random)
        found = project(p, rows)
        unit = rows / rows.norm(dim=1, keepdim=True)
        second, _ = nnls(unit.T.numpy(), -p.numpy(), maxiter=100_000)
        assert found.solved and (unit @ found.u / p.norm()).min() >= -1e-9
        assert np.abs(p.numpy() + unit.T.numpy() @ second - found.u.numpy()).max() < 1e-7


def test_a_column_too_short_for_its_square_still_counts() -> None:
    """The programme does not depend on a column's length (spec C-3)."""
    found = project(torch.tensor([1.0, -1.0]), torch.tensor([[0.0, 1e-25]]))
    assert found.u.tolist() == pytest.approx([1.0, 0.0], abs=1e-15)


LENGTHS = {  # powers of two, so that scaling is exact; the first ones of each can be squared without loss
    torch.float32: (-40, -60, -66, -70, -72, -74, -80, -120, 58, 64, 100),
    torch.float64: (-400, -500, -520, -530, -537, -540, -700, -1000, 505, 520, 900),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [9, 70_000])  # the second one in C, where there is a compiler
@pytest.mark.parametrize("which", ["one", "some", "all", "p", "opposite"])
def test_no_length_loses_digits(which: str, size: int, dtype: torch.dtype) -> None:
    """Columns of 1e-22 in float32 or 1e-170 in float64, and longer and shorter ones, constrain like those of length one."""
    random = torch.Generator().manual_seed(3)
    rows, p = (torch.randn(*lead, size, dtype=torch.float64, generator=random).to(dtype) for lead in ((4,), ()))
    p = p - 0.4 * rows.sum(0)
    exact = project(p.double(), rows.double())
    assert int((exact.z > 0).sum()) > 2
    for power in LENGTHS[dtype]:
        few = {"one": [1], "some": [1, 3], "p": []}.get(which, [0, 1, 2, 3])
        factor, own = torch.ones(4, 1, dtype=dtype), 1.0
        factor[few] = 2.0**power
        if which in ("p", "opposite"):
            own = 2.0**power if which == "p" else 2.0 ** (-power // 2)
        found = project(p * own, factor * rows)
        close = 3e-6 if dtype == torch.float32 else 1e-14
        assert found.solved and float((found.u.double() / own - exact.u).norm() / p.norm()) < close, power
        assert torch.equal(found.z > 0, exact.z > 0)
        if which != "opposite":
            torch.testing.assert_close(found.z * (factor.double().squeeze(1) / own), exact.z, rtol=1e-5, atol=1e-7)


def test_only_zeros_are_dropped() -> None:
    p = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    rows = torch.zeros(3, 3, dtype=torch.float64)
    rows[1, 1], rows[2, 2] = 5e-324, 1e300
    found = project(p, rows, counts=torch.tensor([True, True, True]))
    assert found.solved and found.u.tolist() == [1.0, 0.0, 0.5]
    assert project(p, rows, counts=torch.tensor([True, False, True])).u is p
    assert project(p, rows[:1]).u is p, "a column of zeros"
    assert (1e200 * project(1e-200 * p, -1e-200 * rows[2:]).u).tolist() == pytest.approx([1.0, -1.0, 0.0])
    feasible = 1e-200 * p.abs()
    assert project(feasible, rows).u is feasible, "bit for bit"
