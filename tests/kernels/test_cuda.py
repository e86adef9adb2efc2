"""The kernels for a GPU beside their plain forms, compiled and on large sizes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import programmes
from undrift.algorithms.gradient_memory import cone
from undrift.core.forms import Seen, watch
from undrift.core.trees import leaves, map_leaves
from undrift.core.vec import descend
from undrift.data.augment import Transform, lookup
from undrift.kernels import conv_gpu, devices, launch, pictures_gpu
from undrift.kernels.chain import Chain, transposed_cross_entropy
from undrift.kernels.consistency_gpu import spread
from undrift.oracle.net import Net
from undrift.oracle.oracle import Batch, Oracle, View

pytestmark = pytest.mark.cuda


def solve(
    p: Tensor, rows: Tensor, parts: list[slice], rho: float, counts: Tensor, device: str
) -> tuple[cone.Projection, Seen]:
    """The programmes from float64 products, and what was reported."""
    wide, q = rows.double(), p.double()
    products = torch.stack([wide[:, s] @ wide[:, s].T for s in parts])
    along = torch.stack([wide[:, s] @ q[s] for s in parts])
    given = [t.to(device) for t in (products, along, counts, torch.zeros_like(along, dtype=torch.bool))]
    with watch() as seen:
        found = cone.project_parts(p.to(device), rows.to(device), parts, *given, rho)
    return map_leaves(lambda t: t.cpu(), found), seen


@pytest.mark.parametrize("number", range(7))
def test_columns_of_nothing_but_rounding(number: int) -> None:
    """None of them is left to the host."""
    p, rows, _ = programmes.dead_biases(number)
    found, seen = solve(p, rows, [slice(0, len(p))], 0.0, torch.ones(len(rows), dtype=torch.bool), "cuda")
    assert found.solved.all() and not any(bool(flag.any()) for flag in seen.doubts)
    programmes.check(p, rows, found.z.view(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constraints", [1, 7, 100, 128])
def test_the_cone_on_the_gpu_is_that_on_the_host(constraints: int, dtype: torch.dtype) -> None:
    """In three segments, one of them with fewer entries than constraints."""
    generator = torch.Generator().manual_seed(constraints)
    rows, p = (torch.randn(*s, 9010, generator=generator, dtype=torch.float64) for s in ((constraints,), ()))
    p = p - 0.4 * rows.sum(0) / constraints**0.5  # many constraints are broken
    rows, p = rows.to(dtype), p.to(dtype)
    rows[constraints // 2] *= 0 if constraints > 1 else 1
    counts = torch.rand(constraints, generator=generator) < 0.9
    counts[0] = True
    for rho, parts in ((0.0, [slice(0, 3000), slice(3000, 3010), slice(3010, 9010)]), (0.02, [slice(0, 9010)])):
        host, _ = solve(p, rows, parts, rho, counts, "cpu")
        there, seen = solve(p, rows, parts, rho, counts, "cuda")
        assert host.solved.all() and there.solved.all() and bool((host.z > 0).any()) and not seen.by_value
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(there.u, host.u, **close)
        torch.testing.assert_close(there.z[0], host.z[0], **close)


@pytest.mark.parametrize("entries", [10, 500, 6000])
@pytest.mark.parametrize("apart", [1e-2, 1e-4])
def test_nearly_dependent_columns_on_the_gpu(entries: int, apart: float) -> None:
    """A hundred columns near a subspace: the solution meets the conditions to the digits of float32."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(100, 6, generator=generator) @ torch.randn(6, entries, generator=generator)
    rows = few / few.norm(dim=1, keepdim=True) + apart * torch.randn(100, entries, generator=generator) / entries**0.5
    p = torch.randn(entries, generator=generator) - rows[::2].mean(0)
    found, seen = solve(p, rows, [slice(0, entries)], 0.0, torch.ones(100, dtype=torch.bool), "cuda")
    slack = rows.double() @ found.u.double() / rows.double().norm(dim=1) / p.norm()
    assert found.solved.all() and slack.min() > -1e-6 and not seen.by_value
    assert float((slack * (found.z[0] > 0)).abs().max()) < 1e-6
    torch.testing.assert_close(found.u.double(), p.double() + found.z[0] @ rows.double(), rtol=1e-5, atol=1e-5)


def test_what_the_gpu_does_not_solve_is_doubted() -> None:
    generator = torch.Generator().manual_seed(0)
    row, p = (torch.randn(500, generator=generator) for _ in range(2))
    opposite, everything = torch.stack([row, -row]), torch.ones(2, dtype=torch.bool)
    spoilt = opposite.clone()
    spoilt[0, 0] = torch.nan
    for rows in (opposite, spoilt):
        found, seen = solve(p - 10 * row, rows, [slice(0, 500)], 0.3, everything, "cuda")
        assert not found.solved and [bool(flag) for flag in seen.doubts] == [True]
    assert torch.equal(found.u, p - 10 * row)


@pytest.mark.parametrize("length", [1e-25, 1e-21, 1e21])
def test_columns_of_unusual_lengths(length: float) -> None:
    """Solved in float32, whose products are float64; in float64 left to the host."""
    generator = torch.Generator().manual_seed(0)
    rows, everything = torch.randn(3, 500, generator=generator), torch.ones(3, dtype=torch.bool)
    p, factor, whole = -rows.sum(0), torch.tensor([[1.0], [length], [1.0]]), [slice(0, 500)]
    for vector, columns in ((p, factor * rows), (length * p, rows)):
        there, _ = solve(vector, columns, whole, 0.0, everything, "cuda")
        exact = cone.project(vector.double(), columns.double())
        assert there.solved.all() and float((there.u - exact.u).norm() / vector.double().norm()) < 1e-6
        vector, columns = vector.double() * float(length) ** 8, columns.double()
        found, seen = solve(vector, columns, whole, 0.0, everything, "cuda")
        assert not found.solved.any() and [bool(flag) for flag in seen.doubts] == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_three_rows_of_any_length_on_the_gpu(dtype: torch.dtype) -> None:
    from undrift.algorithms.gradient_memory.cone3 import project_three_parts

    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(3000, generator=generator, dtype=dtype) for _ in range(3)]
    p = -sum(rows, torch.zeros(3000, dtype=dtype))
    for power in (-110, -74) if dtype == torch.float32 else (-1000, -560):
        M = [rows[0], 2.0**power * rows[1], 2.0**-power * rows[2]]
        u, active = project_three_parts(p, M, [slice(0, 3000)])
        there, on = project_three_parts(p.cuda(), [row.cuda() for row in M], [slice(0, 3000)])
        assert torch.equal(on.cpu(), active) and bool(active.all())
        assert float((there.cpu() - u).norm() / p.norm()) < (2e-6 if dtype == torch.float32 else 1e-12)


def test_products_of_long_rows_are_summed_in_float64() -> None:
    """Also where TF32 is allowed."""
    a, b = torch.randn(11, 70_001, device="cuda"), torch.randn(100, 70_001, device="cuda")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    for parts in ([slice(0, 70_001)], [slice(0, 6), slice(6, 5000), slice(5000, 70_001)]):
        exact = torch.stack([a[:, s].double() @ b[:, s].double().T for s in parts])
        torch.testing.assert_close(cone.grams(a, b, parts), exact, rtol=1e-12, atol=1e-9)
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def test_three_constraints_on_the_gpu_are_those_on_the_host() -> None:
    from tests.algorithms.gradient_memory.test_cone3 import KINDS
    from tests.algorithms.gradient_memory.test_cone3 import rows as made
    from undrift.algorithms.gradient_memory.cone3 import project_three_parts

    for kind in KINDS:
        for sizes in ((3, 5), (40, 5000)):
            both = [made(kind, (6,), size, torch.float32) for size in sizes]
            p, M = (torch.cat([pair[n] for pair in both], -1) for n in (0, 1))
            parts = [slice(0, sizes[0]), slice(sizes[0], sum(sizes))]
            for rho in (0.0, 0.1) if kind in ("random", "twins", "collinear", "one zero") else (0.0,):
                u, active = project_three_parts(p, M.unbind(-2), parts, rho)
                margin = torch.full((6, 1), rho, device="cuda")
                there, on = project_three_parts(p.cuda(), M.cuda().unbind(-2), parts, margin)
                assert torch.equal(on.cpu().any(-1), active.any(-1))
                for n, s in enumerate(parts):
                    length = p[:, s].norm(dim=-1, keepdim=True).clamp(min=1e-30)
                    assert float(((there.cpu() - u)[:, s] / length).abs().max()) < 2e-6, kind
                    still = ~active[:, n].any(-1)
                    assert torch.equal(there.cpu()[still][:, s], u[still][:, s])


def test_who_is_remembered_on_the_gpu() -> None:
    from undrift.algorithms.gradient_memory.memory import Memory

    generator = torch.Generator().manual_seed(0)
    host = Memory.empty(12, torch.zeros(8), 1)
    there = map_leaves(lambda t: t.cuda(), host)
    for _ in range(40):
        clients = torch.randperm(40, generator=generator)[:5]
        updates = torch.randn(5, 8, generator=generator)
        host, place = host.let_in(clients)
        there, at = there.let_in(clients.cuda())
        assert torch.equal(at.cpu(), place)
        host, _ = host.remember(place, updates, 0.5, [slice(0, 8)], updates[0])
        there, _ = there.remember(at, updates.cuda(), 0.5, [slice(0, 8)], updates[0].cuda())
        for a, b in zip(leaves(host), leaves(there), strict=True):
            torch.testing.assert_close(b.cpu(), a, rtol=1e-5, atol=1e-5)
    assert host.evictions > 20


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_normalised_by_a_table_as_they_are_one_by_one(channels: int) -> None:
    """Bit for bit, also where a picture is no whole number of blocks; and no picture at all."""
    torch.manual_seed(0)
    held = torch.randint(0, 256, (50, channels, 37, 31), dtype=torch.uint8)
    transform = Transform((0.5,) * channels, tuple(0.2 + 0.1 * c for c in range(channels)))
    for index in (torch.randint(0, 50, (70,)), torch.zeros(0, dtype=torch.int64)):
        plain = transform(held.cuda()[index.cuda()], torch.float32)
        values = lookup(transform, channels, torch.float32, torch.device("cuda"))
        assert torch.equal(pictures_gpu.look_up(held.cuda(), index.cuda(), values), plain)


@pytest.mark.parametrize("lead, batch", [((3,), 70), ((2, 3), 64), ((1,), 1)])
def test_pictures_that_lie_turned_are_the_same(lead: tuple[int, ...], batch: int) -> None:
    torch.manual_seed(0)
    held, index = torch.randint(0, 256, (50, 3, 9, 7), dtype=torch.uint8), torch.randint(0, 50, (*lead, batch))
    values = torch.randn(3, 256)
    expected = values[torch.arange(3).view(-1, 1, 1), held[index].long()]
    found = pictures_gpu.turn(held.cuda(), index.cuda(), values.cuda())
    assert torch.equal(found.cpu(), expected)
    assert found.flatten(-3).mT.is_contiguous()  # as views, without a copy


@pytest.mark.parametrize("classes, batch", [(10, 64), (7, 33), (62, 20), (1, 5)])
@pytest.mark.parametrize("padded", [False, True])
def test_turned_cross_entropy_is_the_plain_one(classes: int, batch: int, padded: bool) -> None:
    """With labels that are left out, too, and a client without a sample; a label that is no class is not passed over."""
    torch.manual_seed(0)
    outputs, targets = 3 * torch.randn(4, classes, batch).cuda(), torch.randint(0, classes, (4, batch)).cuda()
    targets[1, :3] = -100
    real = (torch.rand(4, batch) < 0.6).float().cuda() if padded else None
    if real is not None:
        real[3] = 0.0
    wide = outputs.double(), targets, None if real is None else real.double()
    fast = transposed_cross_entropy.choose(outputs, targets, real)
    assert (
        fast is not transposed_cross_entropy.plain
        and transposed_cross_entropy.choose(*wide) is transposed_cross_entropy.plain
    )
    loss, d = fast(outputs, targets, real)
    expected, gradient = transposed_cross_entropy(*wide)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(d.double(), gradient, rtol=1e-5, atol=1e-7)
    targets[0, 0] = classes
    wrong, d = transposed_cross_entropy(outputs, targets, None)
    assert wrong[0].isnan() and not wrong[1:].isnan().any()
    assert d[0, :, 0].isnan().all() and not d[0, :, 1:].isnan().any()


@pytest.mark.parametrize(
    "sizes",
    [
        (3, 64, 3, 32, 6, 5, 0, True),
        (2, 7, 6, 14, 16, 5, 0, True),
        (5, 3, 1, 9, 20, 3, 1, False),
        (2, 40, 3, 32, 64, 5, 2, True),
    ],
)
def test_a_narrow_convolution_of_stacked_clients_is_the_plain_one(sizes: tuple[int, ...]) -> None:
    """Its outputs and the gradients of filters and biases in longer vectors, and of inputs, as far as cuDNN is exact."""
    S, B, C, side, filters, k, padding, biased = sizes
    torch.manual_seed(0)
    entries = filters * C * k * k
    x = torch.randn(S, B, C, side, side, device="cuda", requires_grad=True)
    v = torch.randn(S, entries + filters + 3, device="cuda", requires_grad=True)

    def of(form: Any, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        w, b = v[:entries].view(filters, C, k, k), v[entries : entries + filters] if biased else None
        assert conv_gpu.suits(x.shape, w.shape, padding) and launch.only_stacked()
        return form(x, w, b)

    def fast(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        return conv_gpu.convolution(x, w, b, padding)

    def plain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        return torch.conv2d(x.double(), w.double(), None if b is None else b.double(), padding=padding)

    made, exact = (torch.vmap(lambda x, v, f=form: of(f, x, v))(x, v) for form in (fast, plain))
    d = torch.randn_like(made)
    torch.testing.assert_close(made.double(), exact, rtol=1e-5, atol=1e-4)
    found, wanted = torch.autograd.grad(made, (x, v), d), torch.autograd.grad(exact, (x, v), d.double())
    for a, b, close in zip(found, wanted, (5e-3, 2e-5), strict=True):  # cuDNN takes TF32 for the inputs' gradient
        torch.testing.assert_close(a, b, rtol=1e-4, atol=close * float(b.abs().max()))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of torch's own, when forward derivatives are first asked for
def test_derivatives_inside_an_objective_on_the_gpu() -> None:
    """torch.func.grad and jvp in an objective, and a gradient of a gradient, of a model with narrow convolutions."""
    layers = torch.nn.Conv2d(3, 6, 5), torch.nn.Tanh(), torch.nn.Conv2d(6, 4, 3, padding=1), torch.nn.Flatten()
    module = torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))
    torch.manual_seed(0)
    x0, buffers = Net(module).start()
    x, inputs = x0 + torch.randn(3, len(x0)) / 100, torch.randn(3, 4, 3, 12, 12)
    targets = torch.randint(0, 10, (3, 4))

    def penalty(model: View, x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        g = torch.func.grad(lambda i: model.loss(model(x, i), targets).sum())(inputs)
        return model.loss(model(x, inputs), targets) + g.flatten(1).square().sum(1)

    def along(model: View, x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda v: model.loss(model(v, inputs), targets), (x,), (x,))[1]

    def found(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        net = Net(module, dtype=dtype).to(torch.device(device))
        v = x.to(device, dtype)
        batch = Batch(
            inputs.to(device, dtype),
            targets.to(device),
            torch.ones(3, 4, device=device),
            torch.arange(3, device=device),
        )
        oracle = Oracle(net, batch, buffers.to(device, dtype).expand(3, -1))
        return [oracle.grad(v), oracle.grad(v, penalty), oracle.grad(v, along)]

    for there, exact in zip(found("cuda", torch.float32), found("cpu", torch.float64), strict=True):
        assert float((there.cpu() - exact).abs().max()) < 1e-2 * float(exact.abs().max())

    def twice(form: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = torch.vmap(form)(x, w.requires_grad_()).tanh().sum()
        (g,) = torch.autograd.grad(made, w, create_graph=True)
        return torch.autograd.grad(g.square().sum(), w)[0]

    w = torch.randn(3, 6, 3, 5, 5, device="cuda") / 5
    fast = twice(lambda x, w: conv_gpu.convolution(x, w, None, 1), inputs.cuda(), w)
    plain = twice(lambda x, w: torch.conv2d(x, w, padding=1), inputs.cuda().double(), w.detach().double())
    assert float((fast - plain).abs().max()) < 1e-2 * float(plain.abs().max())


@pytest.mark.parametrize("precision, close", [("ieee", 1e-5), ("tf32", 5e-2)])
@pytest.mark.parametrize(
    "sizes, biased", [((784, 200, 200, 10), True), ((50, 33, 7), False), ((30, 10), True), ((9, 8, 300), True)]
)
@pytest.mark.parametrize("batch, padded", [(64, False), (17, True)])
def test_a_step_in_one_pass_is_the_plain_one(
    precision: str, close: float, sizes: tuple[int, ...], biased: bool, batch: int, padded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """For vectors of their own and one for all, one rate and one each; what lies behind the layers stays as it is."""
    torch.manual_seed(0)
    layers = [layer for n, m in itertools.pairwise(sizes) for layer in (torch.nn.Linear(n, m, biased), torch.nn.ReLU())]
    monkeypatch.setattr(devices, "cache", lambda device: 0)
    chain = Chain.of(torch.nn.Sequential(*layers[:-1]))
    assert chain is not None
    clients, length = 5, chain.entries + 11
    inputs, targets = torch.randn(clients, batch, sizes[0]).cuda(), torch.randint(0, sizes[-1], (clients, batch)).cuda()
    real = (torch.rand(clients, batch) < 0.7).float().cuda() if padded else None
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        for x in (torch.randn(clients, length).cuda() / 10, (torch.randn(length).cuda() / 10).expand(clients, length)):
            for rate in (0.3, torch.rand(clients).cuda()):
                loss, made = chain.step(x, inputs, targets, real, rate)
                wide = None if real is None else real.double()
                expected, g = chain.gradient(x.double(), inputs.double(), targets, wide)
                rates = rate if isinstance(rate, float) else rate.double().unsqueeze(-1)
                torch.testing.assert_close(loss.double(), expected, rtol=close, atol=close)
                moved = descend(x.double(), rates, g) - x.double()
                assert (made - x - moved).norm() < close * moved.norm() + 1e-6 * x.norm()
                assert torch.equal(made[:, chain.entries :], x[:, chain.entries :])
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("groups, S, P", [((), 10, 3001), ((4,), 7, 20_000), ((2,), 1, 100), ((), 64, 5000)])
def test_the_spread_of_local_models_is_the_plain_one(groups: tuple[int, ...], S: int, P: int) -> None:
    """With clients of weight zero, too, and where the vectors are a part of longer ones."""
    torch.manual_seed(0)
    x, share = 1 + torch.randn(*groups, S, P + 5).cuda()[..., :P], torch.rand(*groups, S, 1).cuda()
    share[..., -1, :] *= S == 1
    share = share / share.sum(-2, keepdim=True)
    wide, weight = x.double(), share.double()
    mean = (weight * wide).sum(-2, keepdim=True)
    expected = (weight * (wide - mean).square()).sum((-2, -1))
    torch.testing.assert_close(spread(x, share).double(), expected, rtol=1e-5, atol=1e-6)


def test_the_spread_of_long_vectors() -> None:
    """Whose blocks are more than a grid's second dimension holds; the vectors overlap, so that they need little memory."""
    S, P = 64, 9_000_000
    x = torch.randn(P + S).cuda().as_strided((S, P), (1, 1))
    share = torch.full((S, 1), 1 / S).cuda()
    wide = (part.double() for part in x.split(100_000, 1))
    expected = sum((part - part.mean(0)).square().sum() / S for part in wide)
    torch.testing.assert_close(spread(x, share).double(), torch.as_tensor(expected), rtol=1e-5, atol=0)


def test_a_rehearsal_makes_kernels_ready_and_launches_none() -> None:
    """Also where a backward pass asks for one, in a thread of PyTorch's own."""
    device, (S, B, size) = torch.device("cuda"), (3, 5, 19)  # sizes that nothing else here has
    x, w = torch.randn(S, B, 3, size, size).cuda(), torch.randn(S, 7, 3, 3, 3).cuda().requires_grad_()
    kernels = conv_gpu._forward, conv_gpu._filters

    def convolved() -> list[torch.Tensor]:
        made = torch.ops.undrift.stacked_few_channels(x, w, None, 1)
        return [made, *torch.autograd.grad(made.square().sum(), w)]

    def ready() -> list[Any]:
        held = (kernel.device_caches[torch.cuda.current_device()][0] for kernel in kernels)
        return [made for each in held for made in each.values() if made.module is not None]

    before = len(ready())
    with launch.rehearsal(device):
        rehearsed = convolved()
    assert len(ready()) == before + 2 and not any(t.any() for t in rehearsed)
    found = convolved()
    assert len(ready()) == before + 2
    plain = torch.vmap(lambda x, w: torch.conv2d(x, w, padding=1))(x.double(), w.double())
    (gradient,) = torch.autograd.grad(plain.square().sum(), w)
    torch.testing.assert_close(found[0].double(), plain, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[1], gradient, rtol=1e-2, atol=1e-2 * float(gradient.abs().max()))
