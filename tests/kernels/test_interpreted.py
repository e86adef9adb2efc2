"""The kernels for a GPU beside their plain forms, without a GPU: in Triton's interpreter, on small sizes.

`test_cuda` has them compiled, on large ones. What can be seen here of a rehearsal is `test_rehearsal`.
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU they are compiled, see test_cuda", allow_module_level=True)

from tests.algorithms.gradient_memory.test_cone3 import KINDS
from tests.algorithms.gradient_memory.test_cone3 import rows as three_rows
from undrift.algorithms.gradient_memory import cone
from undrift.algorithms.gradient_memory.cone3 import project_three
from undrift.algorithms.gradient_memory.memory import Memory
from undrift.core.forms import watch
from undrift.kernels import consistency_gpu, conv_gpu, pictures_gpu
from undrift.kernels.chain import dense_step, turned_cross_entropy
from undrift.kernels.cone3_gpu import project_three_gpu
from undrift.kernels.cone_gpu import project_gpu
from undrift.kernels.cross_entropy_gpu import turned_cross_entropy_gpu
from undrift.kernels.dense_step_gpu import dense_step_gpu
from undrift.kernels.gram_gpu import gram_gpu
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
    loss, d = turned_cross_entropy_gpu(outputs, targets, real)
    expected, gradient = turned_cross_entropy.plain(outputs, targets, real)
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
    a, b = torch.randn(3, 1500), torch.randn(7, 1500)
    torch.testing.assert_close(gram_gpu(a, b), a.double() @ b.double().T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_three_constraints(kind: str) -> None:
    for size in (3, 40):
        p, M = three_rows(kind, (4,), size, torch.float32)
        for rho in (0.0, 0.1) if kind in ("random", "twins", "collinear", "one zero") else (0.0,):
            u, active = project_three(p, M.unbind(-2), rho)
            found, on = project_three_gpu(p, M.unbind(-2), rho)
            length = p.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            assert float(((found - u) / length).abs().max()) < 2e-6
            assert torch.equal(on.any(-1), active.any(-1))


@pytest.mark.parametrize("constraints", [1, 9])
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_many_constraints(constraints: int, dtype: torch.dtype, close: float) -> None:
    torch.manual_seed(constraints)
    rows, p = torch.randn(constraints, 60, dtype=torch.float64), torch.randn(60, dtype=torch.float64)
    p = p - 0.4 * rows.sum(0) / constraints**0.5  # many are broken
    rows, p, counts = rows.to(dtype), p.to(dtype), torch.arange(constraints) != 3
    for rho in (0.0, 0.02):
        plain = cone.project(p, rows, None, rho, None, counts)
        products, along = rows.double() @ rows.double().T, rows.double() @ p.double()
        u, z, solved = project_gpu(p, rows, products, rho, along, counts)
        assert solved and bool((plain.z > 0).any())
        torch.testing.assert_close(u, plain.u, rtol=close, atol=close)
        torch.testing.assert_close(z, plain.z, rtol=close, atol=close)


def test_what_a_gpu_does_not_solve_is_doubted() -> None:
    torch.manual_seed(0)
    row, other, p = torch.randn(3, 50)
    rows, counts = torch.stack([row, -row + 1e-4 * other]), torch.ones(2, dtype=torch.bool)
    for columns, solved in ((rows, False), (rows[:1], True)):
        with watch() as seen:
            found = project_gpu(p - 10 * row, columns, None, 0.3, None, counts[: len(columns)])
        assert [bool(flag) for flag in seen.doubts] == [not solved] and bool(found.solved) == solved
        assert not seen.by_value


@pytest.mark.parametrize("length", [1e-25, 1e-21])
def test_what_is_too_short_for_its_products_is_doubted(length: float) -> None:
    """But not a column of zeros, nor one that does not count."""
    torch.manual_seed(0)
    rows, everything = torch.randn(3, 50), torch.ones(3, dtype=torch.bool)
    p = -rows.sum(0)
    odd = rows * torch.tensor([[1.0], [length], [1.0]])
    empty = rows * torch.tensor([[1.0], [0.0], [1.0]])
    cases = [(p, rows, everything, True), (p, odd, everything, False), (p * length, rows, everything, False)]
    cases += [(p, empty, everything, True), (p, odd, torch.tensor([True, False, True]), True)]
    cases += [(0 * p, rows, everything, True)]
    for vector, columns, counts, solved in cases:
        with watch() as seen:
            found = project_gpu(vector, columns, None, 0.0, None, counts)
        assert bool(found.solved) == solved and [bool(flag) for flag in seen.doubts] == [not solved]


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
