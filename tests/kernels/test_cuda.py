"""The same results on a GPU; skipped where there is none."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import undrift
from undrift.algorithms.gradient_memory import cone
from undrift.core.names import names
from undrift.core.trees import leaves, map_leaves
from undrift.core.vec import descend
from undrift.data.augment import Transform, lookup
from undrift.dataparallel.command import run_parallel
from undrift.jobs.folder import RunFolder
from undrift.kernels import conv_gpu, devices, launch, pictures_gpu
from undrift.kernels.chain import Chain, dense_step, turned_cross_entropy
from undrift.kernels.consistency_gpu import spread
from undrift.oracle.net import Net
from undrift.oracle.oracle import Batch, Oracle, View

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
QUICK = {"clients": 20, "cohort": 6, "batch": 16, "rounds": 4, "eval_every": 2, "execution": "stacked"}


def run(device: str, **settings: Any) -> undrift.Result:
    return undrift.run(QUICK | {"device": device} | settings)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", names("algorithms"))
@pytest.mark.parametrize("model", ["mlp", "gradma-nn"])
def test_cuda_agrees_with_the_cpu(name: str, model: str, replay: bool) -> None:
    """Float64, epochs (unequal steps), BatchNorm: the streams are integer arithmetic, so cohorts and batches are the same."""
    settings = {"algorithm": name, "model": model, "dtype": "float64", "epochs": 1.0}
    here, there = run("cpu", **settings), run("cuda", replay=replay, **settings)
    for n, tensor in here.model.items():
        torch.testing.assert_close(there.model[n], tensor, rtol=1e-9, atol=1e-9)
    assert [r["bytes_up"] for r in here.records] == [r["bytes_up"] for r in there.records]


def test_dropout_and_convolutions_agree_with_the_cpu() -> None:
    import numpy as np

    random = np.random.default_rng(0)
    images = random.integers(0, 256, (200, 28, 28, 1), dtype=np.uint8)
    labels = random.integers(0, 10, 200)
    data = undrift.Dataset("random", images, labels, images[:20], labels[:20], 10, (0.5,), (0.5,), crop=2, flip=True)
    here, there = (
        undrift.run(QUICK | {"device": d}, data=data, model="gradma-lenet5", dtype="float64", partition="iid", rounds=2)
        for d in ("cpu", "cuda")
    )
    for n, tensor in here.model.items():
        torch.testing.assert_close(there.model[n], tensor, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", names("algorithms"))
def test_deterministic_runs_repeat_and_resume_bit_for_bit(name: str, replay: bool, tmp_path: Path) -> None:
    how = {"algorithm": name, "deterministic": True, "replay": replay}
    once, twice = (run("cuda", **how) for _ in range(2))
    cut = undrift.run(QUICK | {"device": "cuda", "rounds": 2}, **how, out=tmp_path / "r")
    assert len(cut.records) == 2
    resumed = undrift.run(out=tmp_path / "r", resume=True, rounds=4)
    for n, tensor in once.model.items():
        assert torch.equal(twice.model[n], tensor)
        assert torch.equal(resumed.model[n], tensor)


def test_chunks_shrink_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    from undrift.simulate import here

    whole = run("cuda", algorithm="scaffold", dtype="float64")
    real = here.train
    calls: list[int] = []

    def short(*arguments: Any) -> Any:
        answers = real(*arguments)
        calls.append(len(answers.loss))
        if len(answers.loss) > 3:
            raise torch.cuda.OutOfMemoryError("pretended")
        return answers

    monkeypatch.setattr(here, "train", short)
    split = run("cuda", algorithm="scaffold", dtype="float64", chunk=6, replay=False)
    assert calls[:3] == [6, 3, 3]
    assert split.records[-1]["gradients"] == whole.records[-1]["gradients"]
    for n, tensor in whole.model.items():
        torch.testing.assert_close(split.model[n], tensor, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "gradma-s", "gradma", "fedmim", "mime"])
def test_packed_runs_agree_with_the_cpu(name: str, replay: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from undrift.jobs import packs
    from undrift.jobs.config import from_mapping

    runs = [
        {"algorithm": name, "dtype": "float64", "seed": seed, "set": {"lr": lr}, "replay": replay}
        for seed, lr in ((0, 0.1), (1, 0.05), (2, 0.2))
    ]
    folders = [tmp_path / str(each["seed"]) for each in runs]
    configs = [from_mapping(QUICK | {"device": "cuda"} | each) for each in runs]
    assert packs.cost(configs[0], 1).most >= 3 and len({packs.kind(c, RunFolder(tmp_path)) for c in configs}) == 1
    packs.run_packed(configs, folders, [lambda record, rounds: None] * 3)
    for each, folder in zip(runs, folders, strict=True):
        found = load_file(folder / "model.safetensors")
        for n, tensor in run("cpu", **each).model.items():
            torch.testing.assert_close(found[n], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constraints", [1, 7, 100, 128])
def test_the_cone_on_the_gpu_is_that_on_the_host(constraints: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(constraints)
    rows, p = (torch.randn(*s, 3000, generator=generator, dtype=torch.float64) for s in ((constraints,), ()))
    p = p - 0.4 * rows.sum(0) / constraints**0.5  # many constraints are broken
    rows, p = rows.to(dtype), p.to(dtype)
    rows[constraints // 2] *= 0 if constraints > 1 else 1
    counts = torch.rand(constraints, generator=generator) < 0.9
    counts[0] = True
    for rho in (0.0, 0.02):
        host = cone.project(p, rows, None, rho, None, counts)
        there = cone.project(p.cuda(), rows.cuda(), None, rho, None, counts.cuda())
        assert bool(host.solved) and bool(there.solved) and bool((host.z > 0).any())
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(there.u.cpu(), host.u, **close)
        torch.testing.assert_close(there.z.cpu(), host.z, **close)


def test_columns_that_are_too_much_alike_are_left_to_the_host() -> None:
    generator = torch.Generator().manual_seed(0)
    row, other, p = (torch.randn(500, generator=generator) for _ in range(3))
    rows = torch.stack([row, -row + 1e-4 * other])
    p = p - row * 10
    everything = torch.ones(2, dtype=torch.bool)
    assert cone.project(p, rows, None, 0.3, None, everything).solved
    assert not cone.project(p.cuda(), rows.cuda(), None, 0.3, None, everything.cuda()).solved
    spoilt = rows.clone()
    spoilt[0, 0] = torch.nan
    found = cone.project(p.cuda(), spoilt.cuda(), None, 0.0, None, everything.cuda())
    assert not found.solved and torch.equal(found.u.cpu(), p)


def test_products_of_long_rows_keep_float32s_digits() -> None:
    a, b = torch.randn(11, 70_001, device="cuda"), torch.randn(100, 70_001, device="cuda")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    exact = a.double() @ b.double().T
    assert float((cone.gram(a, b) - exact).abs().max()) < 2e-7 * 70_001
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def test_three_constraints_on_the_gpu_are_those_on_the_host() -> None:
    from tests.algorithms.gradient_memory.test_cone3 import KINDS
    from tests.algorithms.gradient_memory.test_cone3 import rows as made
    from undrift.algorithms.gradient_memory.cone3 import project_three

    for kind in KINDS:
        for size in (3, 40, 5000):
            p, M = made(kind, (6,), size, torch.float32)
            for rho in (0.0, 0.1) if kind in ("random", "twins", "collinear", "one zero") else (0.0,):
                u, active = project_three(p, M.unbind(-2), rho)
                there, _ = project_three(p.cuda(), M.cuda().unbind(-2), torch.full((6, 1), rho, device="cuda"))
                length = p.norm(dim=-1, keepdim=True).clamp(min=1e-30)
                assert float(((there.cpu() - u) / length).abs().max()) < 2e-6, kind
                assert torch.equal(there.cpu()[~active.any(-1)], u[~active.any(-1)])


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when the compiler is first imported
@pytest.mark.parametrize("name", ["fedavg", "gradma-s", "gradma", "scaffold"])
def test_compiled_rounds_agree_with_others(name: str) -> None:
    how = {"algorithm": name, "rounds": 70, "eval_every": 100, "precision": "fp32"}
    plain, compiled = run("cuda", **how, replay=False), run("cuda", **how, compile="on")
    for n, tensor in plain.model.items():
        torch.testing.assert_close(compiled.model[n], tensor, rtol=5e-3, atol=5e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when the compiler is first imported
@pytest.mark.parametrize("how", [{"replay": False}, {"replay": True}, {"replay": True, "compile": True}])
@pytest.mark.parametrize("method", ["sgd", "saef", "ef21", "def"])
def test_data_parallel_workers_agree_with_the_cpu(method: str, how: dict[str, Any]) -> None:
    settings = {
        "method": method,
        "workers": 4,
        "rounds": 2,
        "steps": 6,
        "dtype": "float64",
        "model": "gradma-nn",
        "lr": 0.02,
    }
    here = run_parallel(settings, device="cpu", execution="stacked")
    there = run_parallel(settings, device="cuda", **how)
    for n, tensor in here.model.items():
        torch.testing.assert_close(there.model[n], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2)])
def test_def_over_a_process_group(backend: str, ranks: int) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launch, "-m", "tests.dataparallel.cuda_case", backend], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("5 ways as on the CPU") == ranks


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
    fast = turned_cross_entropy.choose(outputs, targets, real)
    assert fast is not turned_cross_entropy.plain and turned_cross_entropy.choose(*wide) is turned_cross_entropy.plain
    loss, d = fast(outputs, targets, real)
    expected, gradient = turned_cross_entropy(*wide)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(d.double(), gradient, rtol=1e-5, atol=1e-7)
    targets[0, 0] = classes
    wrong, d = turned_cross_entropy(outputs, targets, None)
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
        assert conv_gpu.suits(x.shape, w.shape, padding) and conv_gpu.only_stacked()
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
        return [oracle.grad(v), oracle.grad(v, penalty), oracle.values(v, along), oracle.grad(v, along)]

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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when the compiler is first imported
@pytest.mark.parametrize("how", [{"replay": False}, {"replay": True}, {"replay": True, "compile": "on"}])
@pytest.mark.parametrize("plan", [{"steps": 3}, {"epochs": 1.0, "partition": "dirichlet:0.1"}])
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold"])
def test_a_cohort_that_fills_the_cache_agrees_with_a_small_one(
    name: str, plan: dict[str, Any], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"algorithm": name, "model": "mlp"} | plan | how
    small, steps = run("cuda", **settings), []
    monkeypatch.setattr(devices, "cache", lambda device: 0)
    ((when, made),) = dense_step.forms
    forms = [(when, lambda *given: steps.append(len(given[0])) or made(*given))]
    monkeypatch.setattr(dense_step, "forms", forms)
    large = run("cuda", **settings)
    assert bool(steps) == (name == "fedavg")  # others ask for a gradient, on the same turned inputs
    assert large.records[-1]["gradients"] == small.records[-1]["gradients"]
    for n, tensor in small.model.items():
        torch.testing.assert_close(large.model[n], tensor, rtol=1e-3, atol=1e-4)


def test_packed_runs_that_fill_the_cache_agree_with_single_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    from undrift.jobs import packs
    from undrift.jobs.config import from_mapping

    runs = [{"model": "mlp", "seed": seed, "set": {"lr": lr}} for seed, lr in ((0, 0.1), (1, 0.05), (2, 0.2))]
    alone = [run("cuda", **each).model for each in runs]
    monkeypatch.setattr(devices, "cache", lambda device: 0)
    configs = [from_mapping(QUICK | {"device": "cuda"} | each) for each in runs]
    folders = [tmp_path / str(each["seed"]) for each in runs]
    packs.run_packed(configs, folders, [lambda record, rounds: None] * 3)
    for folder, model in zip(folders, alone, strict=True):
        found = load_file(folder / "model.safetensors")
        for n, tensor in model.items():
            torch.testing.assert_close(found[n], tensor, rtol=1e-3, atol=1e-4)


def test_padding_keeps_the_layout_of_turned_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from undrift.simulate import work

    monkeypatch.setattr(devices, "cache", lambda device: 0)
    made, seen = work.mini_batch, []

    def watched(*given: Any) -> Any:
        batch = made(*given)
        seen.append((batch.real is not None, batch.inputs.flatten(2).mT.is_contiguous()))
        return batch

    monkeypatch.setattr(work, "mini_batch", watched)
    run("cuda", model="mlp", epochs=1.0, partition="dirichlet:0.1", replay=False)
    assert any(padded for padded, _ in seen) and all(turned for _, turned in seen)


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


@pytest.mark.parametrize("how", [{"execution": "stacked"}, {"execution": "auto"}])
def test_the_kernels_of_a_run_are_rehearsed(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that take pictures; and a loss that ends the program where its input is no probability never sees one."""
    import numpy as np

    asked: set[str] = set()
    ask = launch.Rehearsal.ask

    def watched(self: launch.Rehearsal, kernel: Any, *given: Any) -> None:
        asked.add(kernel.fn.__name__)
        ask(self, kernel, *given)

    monkeypatch.setattr(launch.Rehearsal, "ask", watched)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (200, 12, 12, 3), dtype=np.uint8)
    marks = random.integers(0, 2, (200, 4)).astype(np.float32)
    data = undrift.Dataset("random", images, marks, images[:20], marks[:20], 4, (0.5,) * 3, (0.5,) * 3)
    layers = torch.nn.Conv2d(3, 6, 5), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(384, 4), torch.nn.Sigmoid()
    settings = QUICK | how | {"algorithm": "gradma", "device": "cuda", "partition": "iid", "deterministic": True}
    result = undrift.run(settings, data=data, model=torch.nn.Sequential(*layers), loss=torch.nn.BCELoss())
    assert {"_forward", "_filters", "_products", "_mem_red", "_pivots"} <= asked
    assert all(t.isfinite().all() for t in result.model.values())
