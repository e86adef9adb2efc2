"""The kernels for a GPU beside their plain forms, without a GPU: in Triton's interpreter, on small sizes.

`test_cuda` has them compiled, on large ones. What can be seen here of a rehearsal is `test_rehearsal`.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU they are compiled, see test_cuda", allow_module_level=True)

from tests.algorithms.gradient_memory.test_cone import problem
from tests.algorithms.gradient_memory.test_cone3 import KINDS
from tests.algorithms.gradient_memory.test_cone3 import rows as three_rows
from tests.kernels import programmes
from undrift.algorithms.gradient_memory import cone
from undrift.algorithms.gradient_memory.cone3 import project_three_parts
from undrift.algorithms.gradient_memory.memory import Memory
from undrift.core.forms import watch
from undrift.kernels import consistency_gpu, conv_gpu, pictures_gpu
from undrift.kernels.chain import dense_step, transposed_cross_entropy
from undrift.kernels.cone3_gpu import project_three_parts_gpu
from undrift.kernels.cone_gpu import project_parts_gpu
from undrift.kernels.cross_entropy_gpu import transposed_cross_entropy_gpu
from undrift.kernels.dense_step_gpu import dense_step_gpu
from undrift.kernels.gram_gpu import grams_gpu
from undrift.kernels.memory_gpu import mem_red_gpu


@pytest.mark.parametrize(
    "sizes", [(2, 3, 3, 9, 6, 5, 0, True), (3, 2, 1, 7, 20, 3, 1, False), (1, 40, 2, 6, 3, 3, 2, True)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_narrow_convolution(sizes: tuple[int, ...], shared: bool) -> None:
    """Its outputs and the gradients of inputs, filters and biases; also where all clients have the same vector."""
    S, B, C, side, filters, k, padding, biased = sizes
    torch.manual_seed(0)
    entries = filters * C * k * k
    x = torch.randn(S, B, C, side, side, requires_grad=True)
    v = torch.randn(1 if shared else S, entries + filters + 3).expand(S, -1).requires_grad_()

    def of(form: str, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        w, b = v[:entries].view(filters, C, k, k), v[entries : entries + filters] if biased else None
        return conv_gpu.convolution(x, w, b, padding) if form == "fast" else torch.conv2d(x, w, b, padding=padding)

    made = torch.vmap(of, (None, 0, 0))("fast", x, v)
    exact = torch.vmap(of, (None, 0, 0))("plain", x.double(), v.double())
    torch.testing.assert_close(made.double(), exact, rtol=1e-5, atol=1e-5)
    d = torch.randn_like(made)
    found, wanted = torch.autograd.grad(made, (x, v), d), torch.autograd.grad(exact, (x, v), d.double())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes, biased", [((70, 5, 3), True), ((9, 8, 66), False)])
@pytest.mark.parametrize("rates", [False, True])
def test_a_step_of_dense_layers(sizes: tuple[int, ...], biased: bool, rates: bool) -> None:
    torch.manual_seed(0)
    S, B, layers = 2, 37, list(itertools.pairwise(sizes))
    length = sum((n + biased) * m for n, m in layers) + 5
    x, rate = torch.randn(S, length), torch.rand(S) if rates else 0.3
    outs, back = [torch.randn(S, n, B) for n, _ in layers], [torch.randn(S, m, B) for _, m in layers]
    given = x, rate, outs, back, [biased] * len(layers)
    torch.testing.assert_close(dense_step_gpu(*given), dense_step.plain(*given))


@pytest.mark.parametrize("padded", [False, True])
def test_cross_entropy_of_turned_outputs(padded: bool) -> None:
    torch.manual_seed(0)
    outputs, targets = 3 * torch.randn(3, 7, 5), torch.randint(0, 7, (3, 5))
    targets[1, :2], targets[2] = -100, -100
    real = torch.tensor([[1.0, 0, 1, 1, 0]] * 3) if padded else None
    loss, d = transposed_cross_entropy_gpu(outputs, targets, real)
    expected, gradient = transposed_cross_entropy.plain(outputs, targets, real)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(d, gradient)


def test_pictures() -> None:
    torch.manual_seed(0)
    held, index, table = (
        torch.randint(0, 256, (9, 3, 5, 4), dtype=torch.uint8),
        torch.randint(0, 9, (2, 6)),
        torch.randn(3, 256),
    )
    plain = table[torch.arange(3).view(-1, 1, 1), held[index].long()]
    assert torch.equal(pictures_gpu.turn(held, index, table), plain)
    assert torch.equal(pictures_gpu.look_up(held, index.flatten(), table), plain.flatten(0, 1))


def test_the_spread_of_vectors_and_products_of_rows() -> None:
    torch.manual_seed(0)
    x, share = torch.randn(2, 3, 5000), torch.rand(2, 3, 1).softmax(1)
    expected = (share * (x - (share * x).sum(1, keepdim=True)).square()).sum((1, 2))
    torch.testing.assert_close(consistency_gpu.spread(x, share), expected)
    a, b, parts = torch.randn(3, 1500), torch.randn(7, 1500), [slice(0, 6), slice(6, 700), slice(700, 1500)]
    exact = torch.stack([a[:, s].double() @ b[:, s].double().T for s in parts])
    torch.testing.assert_close(grams_gpu(a, b, parts), exact, rtol=1e-14, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_three_constraints(kind: str) -> None:
    """For each of two segments, the second one longer than a block."""
    for sizes in ((3, 5), (40, 2100)):
        made = [three_rows(kind, (4,), size, torch.float32) for size in sizes]
        p, M = (torch.cat([pair[n] for pair in made], -1) for n in (0, 1))
        parts = [slice(0, sizes[0]), slice(sizes[0], sum(sizes))]
        for rho in (0.0, 0.1) if kind in ("random", "twins", "collinear", "one zero") else (0.0,):
            u, active = project_three_parts(p, M.unbind(-2), parts, rho)
            found, on = project_three_parts_gpu(p, M.unbind(-2), parts, rho)
            for s in parts:
                length = p[:, s].norm(dim=-1, keepdim=True).clamp(min=1e-30)
                assert float(((found - u)[:, s] / length).abs().max()) < 2e-6
            assert torch.equal(on.any(-1), active.any(-1))


def solve(
    p: Tensor,
    rows: Tensor,
    parts: list[slice],
    rho: float = 0.0,
    counts: Tensor | None = None,
    start: Tensor | None = None,
) -> tuple[cone.Projection, cone.Projection]:
    """On a GPU, and on the host in float64."""
    wide, q, m = rows.double(), p.double(), len(rows)
    counts = torch.ones(m, dtype=torch.bool) if counts is None else counts
    start = torch.zeros(len(parts), m, dtype=torch.bool) if start is None else start
    products = torch.stack([wide[:, s] @ wide[:, s].T for s in parts])
    along = torch.stack([wide[:, s] @ q[s] for s in parts])
    found = project_parts_gpu(p, rows, parts, products, along, counts, start, rho)
    return found, cone.project_parts.plain(q, wide, parts, products, along, counts, start, rho)


@pytest.mark.parametrize("constraints", [1, 9, 17])
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_many_constraints(constraints: int, dtype: torch.dtype, close: float) -> None:
    """Segments with more and with fewer entries than constraints, and any guess of the active ones."""
    torch.manual_seed(constraints)
    rows, p = torch.randn(constraints, 66, dtype=torch.float64), torch.randn(66, dtype=torch.float64)
    p = p - 0.4 * rows.sum(0) / constraints**0.5  # many are broken
    rows, p, counts = rows.to(dtype), p.to(dtype), torch.arange(constraints) != 3
    parts = [slice(0, 60), slice(60, 66)]
    for rho, guess in ((0.0, 0.0), (0.02, 0.0), (0.0, 0.5)):
        guessed = torch.rand(2, constraints) < guess
        found, plain = solve(
            p, rows, parts if rho == 0 else parts[:1], rho, counts, guessed if rho == 0 else guessed[:1]
        )
        assert found.solved.all() and bool((plain.z[0] > 0).any())
        end = 66 if rho == 0 else 60
        torch.testing.assert_close(found.u[:end], plain.u.to(dtype), rtol=close, atol=close)
        torch.testing.assert_close(found.z[0], plain.z[0], rtol=close, atol=close)


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-5, 1e-3])
def test_many_columns_in_few_dimensions(noise: float) -> None:
    """As a bias has them: 30 columns near a subspace of 3 of 10 dimensions. Exact where float32 can tell them apart."""
    torch.manual_seed(1)
    rows = torch.randn(30, 3, dtype=torch.float64) @ torch.randn(3, 10, dtype=torch.float64)
    rows = (rows / rows.norm(dim=1, keepdim=True) + noise * torch.randn(30, 10, dtype=torch.float64)).float()
    p = torch.randn(10) - 3 * rows[::2].mean(0)
    found, exact = solve(p, rows, [slice(0, 10)])
    size = rows.double().norm(dim=1)
    slack = rows.double() @ found.u.double() / size / p.norm()
    assert found.solved.all() and (found.z >= 0).all() and slack.min() > -1e-6
    assert float((slack * (found.z[0] > 0)).abs().max()) < 1e-6
    torch.testing.assert_close(found.u.double(), p.double() + found.z[0] @ rows.double(), rtol=0, atol=1e-6)
    if noise >= 1e-5:
        torch.testing.assert_close(found.u.double(), exact.u, rtol=0, atol=1e-3 * float(p.norm()))


@pytest.mark.parametrize("kind", ["plain", "twins", "antipodal", "scales", "spanning"])
def test_the_problems_of_the_host(kind: str) -> None:
    for seed in range(6):
        p, rows = problem(2 + 3 * seed, 15 - 2 * seed, seed, kind)
        for dtype, close in ((torch.float32, 1e-6), (torch.float64, 1e-10)):
            found, exact = solve(p.to(dtype), rows.to(dtype), [slice(0, len(p))])
            assert found.solved.all() or (kind == "antipodal" and dtype == torch.float64)
            assert float((found.u - exact.u).norm() / p.norm()) < close or not found.solved.all()


@pytest.mark.parametrize("number", range(7))
def test_columns_of_nothing_but_rounding(number: int) -> None:
    """Updates of a bias before BatchNorm, as runs of gradma-nn had them: 100 columns of last digits in some 20 directions.

    Number 3 takes seconds in the interpreter, and its solution is flat.
    """
    p, rows, start = programmes.dead_biases(number)
    sides = [cone.project(p, rows, start=start)]
    if number != 3:
        sides.append(solve(p, rows, [slice(0, len(p))], start=start[None])[0])
    for found in sides:
        assert found.solved.all()
        programmes.check(p, rows, found.z.view(-1))


def test_what_a_gpu_does_not_solve_is_doubted() -> None:
    """Opposite rows with a margin have no solution; numbers that are not finite have none either."""
    torch.manual_seed(0)
    row, p = torch.randn(2, 50)
    spoilt = torch.cat([torch.full((1,), torch.nan), row[1:]])
    for rows, solved in (([row, -row], False), ([row], True), ([spoilt], False), ([row, spoilt], False)):
        with watch() as seen:
            found, _ = solve(p - 10 * row, torch.stack(rows), [slice(0, 50)], 0.3)
        assert [bool(flag) for flag in seen.doubts] == [not solved] and bool(found.solved) == solved


@pytest.mark.parametrize("length", [1e-25, 1e-21])
def test_columns_of_unusual_lengths(length: float) -> None:
    """Solved in float32. In float64 what is too short for its products is doubted, but not zeros and what does not count."""
    torch.manual_seed(0)
    rows, everything, whole = torch.randn(3, 50), torch.ones(3, dtype=torch.bool), [slice(0, 50)]
    p = -rows.sum(0)
    for vector, columns in ((p, rows * torch.tensor([[1.0], [length], [1.0]])), (p * length, rows)):
        found, exact = solve(vector, columns, whole)
        assert found.solved.all() and float((found.u - exact.u).norm() / vector.double().norm()) < 1e-6
    p, rows, short = p.double(), rows.double(), length**8
    tiny, empty = (rows * torch.tensor([[1.0], [factor], [1.0]], dtype=torch.float64) for factor in (short, 0.0))
    cases = [(p, rows, everything, True), (p, tiny, everything, False), (p * short, rows, everything, False)]
    cases += [(p, empty, everything, True), (p, tiny, torch.tensor([True, False, True]), True)]
    cases += [(0 * p, rows, everything, True)]
    for vector, columns, counts, solved in cases:
        with watch() as seen:
            found, _ = solve(vector, columns, whole, 0.0, counts)
        assert bool(found.solved) == solved and [bool(flag) for flag in seen.doubts] == [not solved]
        found, exact = solve(vector, columns, whole, 0.0, counts)  # nobody watches: the host solves the rest
        assert found.solved.all() and torch.equal(found.z > 0, exact.z > 0)
        assert float((found.u - exact.u).norm()) <= 1e-12 * float(vector.norm())


def test_who_is_remembered() -> None:
    torch.manual_seed(0)
    memory = Memory.empty(6, torch.zeros(2), 1)
    for _ in range(12):
        clients = torch.randperm(15)[:3]
        found, place = mem_red_gpu(memory, clients)
        memory, at = memory.let_in(clients)
        assert torch.equal(place, at)
        for name in ("ids", "age", "uses", "since", "evictions"):
            assert torch.equal(getattr(found, name), getattr(memory, name))
        memory = memory._replace(age=memory.age + 1)
    assert memory.evictions > 5
