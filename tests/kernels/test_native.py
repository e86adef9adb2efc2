"""What is computed in C against its plain form, as compiled for this processor and for an older one."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from undrift.algorithms.base import Work
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.gradient_memory.cone import combine
from undrift.algorithms.optimise.momentum import Momentum
from undrift.core.forms import plain_forms
from undrift.kernels import dense_cpu, memory_cpu, native
from undrift.kernels.chain import Chain, fitting_chain
from undrift.oracle.net import Net
from undrift.oracle.oracle import Batch, Oracle
from undrift.round.clients import Started, local_step

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs gcc, Linux and AVX2")


@pytest.fixture(params=["native", "haswell"])
def library(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, made: dict[str, ctypes.CDLL]
) -> ctypes.CDLL:
    """The functions with registers of this processor, and with AVX2's."""
    for module in (dense_cpu, memory_cpu):
        monkeypatch.setattr(module, "library", lambda: made[request.param])
    return made[request.param]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    found = native.library()
    assert found is not None
    with pytest.MonkeyPatch.context() as patch:
        flags = ["-march=haswell" if flag == "-march=native" else flag for flag in native.FLAGS]
        patch.setattr(native, "FLAGS", flags)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        native.library.cache_clear()
        older = native.library()
        assert older is not None
    native.library.cache_clear()
    return {"native": found, "haswell": older}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def several() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(60, 53), nn.ReLU(), nn.Linear(53, 40), nn.ReLU(), nn.Linear(40, 10))


def odd() -> nn.Module:
    """Layers without biases, without a ReLU between them, with two; one output fewer than any vector has."""
    layers = (
        nn.Linear(60, 16, bias=False),
        nn.ReLU(),
        nn.Linear(16, 7),
        nn.Linear(7, 48, bias=False),
        nn.ReLU(),
        nn.ReLU(),
    )
    return nn.Sequential(*layers, nn.Linear(48, 5))


def asked(S: int, batch: int, chain: Chain, padded: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Vectors that are longer than the chain's, samples with a label left out, and which are real: of one client none."""
    x, inputs = 0.2 * torch.randn(S, chain.entries + 3), torch.randn(S, batch, 60)
    targets = torch.randint(0, 5, (S, batch))
    targets[:, batch // 2] = -100
    count = torch.tensor([batch, 0, max(1, batch - 1), 1])[torch.arange(S) % 4]
    return x, inputs, targets, (torch.arange(batch) < count.unsqueeze(-1)).float() if padded else None


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("S, batch", [(4, 64), (5, 1), (2, 5), (3, 17), (2, 80)])
@pytest.mark.parametrize("build", [several, odd, lambda: nn.Sequential(nn.Linear(60, 5))])
def test_a_dense_gradient_is_that_of_float64(
    library: ctypes.CDLL, build: object, S: int, batch: int, padded: bool
) -> None:
    torch.manual_seed(0)
    chain = Chain.of(build())  # type: ignore[operator]
    assert chain is not None and chain.dense is not None
    x, inputs, targets, real = asked(S, batch, chain, padded)
    if batch == 5:
        x = x[:1].expand(S, -1)  # as in a round's first step
    assert chain.dense.serves(x, S) and not chain.dense.serves(x.double(), S)
    before = x.clone()
    loss, g = chain.gradient(x, inputs, targets, real)
    wide = [None if t is None else t.double() for t in (x, inputs, real)]
    exact, expected = chain.gradient(wide[0], wide[1], targets, wide[2])  # type: ignore[arg-type]
    torch.testing.assert_close(g.double(), expected, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(loss.double(), exact, rtol=2e-6, atol=1e-6)
    assert torch.equal(g[:, chain.entries :], torch.zeros(S, 3)) and torch.equal(x, before)
    for rate in (0.3, torch.tensor(0.3), torch.linspace(0.1, 0.5, S)):
        same, moved = chain.gradient(x, inputs, targets, real, rate)
        step = x - torch.as_tensor(rate).reshape(-1, 1) * g
        torch.testing.assert_close(moved, step, rtol=1e-6, atol=1e-7)
        assert torch.equal(same, loss) and torch.equal(moved[:, chain.entries :], x[:, chain.entries :])
    assert batch == 1 or expected.abs().max() > 1e-3


def normed() -> nn.Module:
    """BatchNorm with and without a ReLU, a layer without it first, a layer without biases."""
    return nn.Sequential(
        nn.Linear(60, 33), nn.ReLU(), nn.Linear(33, 20, bias=False), nn.BatchNorm1d(20, eps=0.01, momentum=0.3), nn.ReLU(),
        nn.Linear(20, 9), nn.BatchNorm1d(9, eps=0.01), nn.Linear(9, 5),
    )  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("S, batch", [(4, 64), (5, 17), (3, 4)])
def test_batch_norms_are_those_of_float64(library: ctypes.CDLL, threads: int, S: int, batch: int, padded: bool) -> None:
    """Also of a client whose samples are all padding, and of one that has a single sample."""
    torch.manual_seed(0)
    gradients, moved, statistics, losses = [], [], [], []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        net = Net(normed(), dtype=dtype)
        chain = Chain.of(net.original)
        assert chain is not None
        x, inputs, targets, real = asked(S, batch, chain, padded)
        rest = len(net.start()[0]) - chain.entries
        x, inputs, targets = nn.functional.pad(x[:, :-3], (0, rest)).to(dtype), inputs.to(dtype), targets.clamp(min=0)
        mini = Batch(inputs, targets, None if real is None else real.to(dtype), torch.zeros(S, dtype=torch.int64))
        start = net.start()[1] + torch.linspace(0, 1, S, dtype=dtype).unsqueeze(-1)
        oracle, other = Oracle(net, mini, start), Oracle(net, mini, start)
        if dtype == torch.float32:
            assert fitting_chain(oracle) is not None
        gradients.append(oracle.grad(x).double())
        moved.append(other.step(x, 0.3).double())
        losses.append(oracle.loss.double())
        statistics += [oracle.buffers.double(), other.buffers.double()]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    for each in statistics[1:]:
        torch.testing.assert_close(statistics[0], each, rtol=1e-5, atol=1e-5)
    assert gradients[1].abs().max() > 1e-2


def pictures(
    channels: int, outputs: tuple[int, ...], kernel: int, padding: int, side: int, biased: bool = True
) -> nn.Module:
    """Blocks of convolutions with so many outputs each, and two dense layers behind them."""
    layers: list[nn.Module] = []
    for n in outputs:
        layers += [nn.Conv2d(channels, n, kernel, padding=padding, bias=biased), nn.ReLU(), nn.MaxPool2d(2)]
        channels, side = n, (side + 2 * padding - kernel + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side**2, 12), nn.ReLU(), nn.Linear(12, 5))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("S, batch", [(2, 64), (3, 1), (4, 17)])
@pytest.mark.parametrize(
    "channels, outputs, kernel, padding, side, biased",
    [
        (3, (6, 16), 5, 0, 32, True),  # LeNet-5
        (1, (6, 16), 5, 2, 28, False),
        (2, (5, 9, 2), 3, 1, 13, True),  # sides that pooling does not divide
        (4, (1,), 3, 0, 4, True),  # one place is left
        (1, (32, 7), 3, 0, 15, True),
    ],
)
def test_the_gradient_of_convolutions_is_that_of_float64(
    library: ctypes.CDLL, channels: int, outputs: tuple[int, ...], kernel: int, padding: int, side: int, biased: bool,
    S: int, batch: int, padded: bool,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    chain = Chain.of(pictures(channels, outputs, kernel, padding, side, biased))
    assert chain is not None and chain.dense is not None and len(chain.dense.blocks) == len(outputs)
    x, _, targets, real = asked(S, batch, chain, padded)
    inputs = torch.randint(-2, 3, (S, batch, channels, side, side)).float()  # with equals among what is pooled
    x = x.mul(8).round().div(8) if batch == 17 else x
    assert chain.fits(inputs, targets, torch.Size([S])) and not chain.fits(inputs.double(), targets, torch.Size([S]))
    loss, g = chain.gradient(x, inputs, targets, real)
    for s in range(S):
        mask = None if real is None else real[s].double()
        exact, expected = chain.gradient(x[s].double(), inputs[s].double(), targets[s], mask)
        torch.testing.assert_close(g[s].double(), expected, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(loss[s].double(), exact, rtol=5e-6, atol=2e-6)
        assert batch == 1 or s % 4 == 1 or expected[:9].abs().max() > 1e-4 or outputs == (1,)
    rates = torch.linspace(0.1, 0.5, S)
    same, moved = chain.gradient(x, inputs, targets, real, rates)
    torch.testing.assert_close(moved, x - rates.unsqueeze(-1) * g, rtol=1e-6, atol=1e-6)
    assert torch.equal(same, loss) and torch.equal(moved[:, chain.entries :], x[:, chain.entries :])


def test_pictures_that_are_not_finite_spoil_their_client_alone(library: ctypes.CDLL) -> None:
    """Wherever in the four places that are pooled it is; as in PyTorch, NaN is the largest of them."""
    torch.manual_seed(0)
    chain = Chain.of(pictures(1, (3,), 3, 0, 6))
    assert chain is not None
    x, _, targets, _ = asked(10, 4, chain, False)
    inputs = torch.randn(10, 4, 1, 6, 6)
    for s in range(9):
        inputs[s, 1, 0, s // 3 + 1, s % 3 + 1] = torch.nan
    loss, g = chain.gradient(x, inputs, targets, None)
    assert loss.isfinite().tolist() == g.isfinite().all(1).tolist() == [False] * 9 + [True]


def test_stacked_pictures_are_computed_in_one_call(library: ctypes.CDLL) -> None:
    """In an oracle of several runs, where autograd would make grouped convolutions of them."""
    torch.manual_seed(0)
    net = Net(pictures(3, (6, 4), 5, 0, 20))
    x0, buffers = net.start()
    x, key = x0 + 0.1 * torch.randn(2, 3, len(x0)), torch.zeros(2, 3, dtype=torch.int64)
    batch = Batch(torch.randn(2, 3, 8, 3, 20, 20), torch.randint(0, 5, (2, 3, 8)), None, key)
    oracle = Oracle(net, batch, buffers.expand(2, 3, -1))
    found, (again, _) = oracle.grad(x), oracle.grads(x, x + 1)
    assert fitting_chain(oracle) is not None and not oracle.tally.mapped and oracle.calls == 3
    with plain_forms():
        torch.testing.assert_close(found, oracle.grad(x), rtol=1e-4, atol=1e-6)
    assert torch.equal(again, found) and oracle.tally.mapped and oracle.calls == 4


@pytest.mark.parametrize("build", [several, lambda: pictures(3, (6, 4), 5, 0, 20)])
def test_one_client_alone_is_computed_as_in_a_cohort(library: ctypes.CDLL, build: Any) -> None:
    """And by any number of threads."""
    torch.manual_seed(0)
    chain = Chain.of(build())
    assert chain is not None and chain.dense is not None
    x, inputs, targets, _ = asked(6, 20, chain, False)
    inputs = torch.randn(6, 20, 3, 20, 20) if chain.dense.blocks else inputs
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(chain.gradient(x, inputs, targets, None)[1])
            assert chain.dense.serves(x, 6) and chain.dense.serves(x, 0) == (count == 1)
        torch.set_num_threads(1)
        alone = torch.stack([chain.gradient(*one, None)[1] for one in zip(x, inputs, targets, strict=True)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(g, alone) for g in found)


def test_what_is_not_finite_stays_so(library: ctypes.CDLL) -> None:
    """In one client's gradient, and only in that one's."""
    torch.manual_seed(0)
    chain = Chain.of(several())
    assert chain is not None
    x, inputs, targets, _ = asked(3, 8, chain, False)
    inputs[1, 2, 3], x[2, 0] = torch.nan, torch.inf
    loss, g = chain.gradient(x, inputs, targets, None)
    assert loss.isfinite().tolist() == [True, False, False]
    assert g.isfinite().all(1).tolist() == [True, False, False]


@pytest.mark.parametrize("label", [-1, 10, 1 << 40])
def test_a_label_without_an_output_is_refused(library: ctypes.CDLL, label: int) -> None:
    chain = Chain.of(several())
    assert chain is not None
    x, inputs, targets, _ = asked(3, 8, chain, False)
    targets[2, 5] = label
    with pytest.raises(IndexError, match="10 classes"):
        chain.gradient(x, inputs, targets, None)


def test_what_c_does_not_take_is_left_to_torch(library: ctypes.CDLL) -> None:
    for module in (
        nn.Sequential(nn.ReLU(), nn.Linear(6, 5)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)),
        pictures(1, (4,), 7, 0, 12), pictures(1, (64,), 3, 0, 12), pictures(1, (4, 64), 3, 0, 12),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=(1, 0)), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)),
    ):  # fmt: skip
        chain = Chain.of(module)
        assert chain is not None and chain.dense is None


@pytest.mark.parametrize("few, count, length", [(10, 100, 70_001), (0, 1, 1 << 16), (3, 7, 99_999), (23, 50, 70_000)])
def test_products_of_rows_are_numpys(library: ctypes.CDLL, few: int, count: int, length: int, threads: int) -> None:
    torch.manual_seed(0)
    m, r = 1 + torch.randn(length + 3), 1 + torch.randn(count, length + 3)
    m, r, at = m[1:-2], r[:, 1:-2], torch.randperm(count)[:few]
    exact = torch.cat([r[at], m[None]]).double() @ r.double().T
    for found in (memory_cpu.row_products(r, at, m), memory_cpu.blas_products(r, at, m)):
        torch.testing.assert_close(found, exact, rtol=2e-6, atol=2e-6 * length)
    apart = memory_cpu.row_products(r.T.contiguous().T, at, m)  # rows that are columns in memory: not for C
    torch.testing.assert_close(apart, exact, rtol=2e-5, atol=2e-5 * length)


def test_rows_that_are_renewed_and_multiplied_in_one_pass(library: ctypes.CDLL, threads: int) -> None:
    """A row that was empty, one that fades, one that stays: as in two passes, and nothing else is written."""
    torch.manual_seed(0)
    r, updates, m = torch.randn(11, 70_013), torch.randn(3, 70_013), torch.randn(70_013)
    at, scale = torch.tensor([7, 0, 10]), torch.tensor([[0.0], [0.25], [1.0]])
    expected, before = r.double(), r.clone()
    expected[at] = scale.double() * expected[at] + updates.double()
    for columns in (slice(0, 70_013), slice(2, 70_000)):  # a part is what a tensor's own programme has
        r.copy_(before)
        found = memory_cpu.in_one_pass(r[:, columns], at, scale, updates[:, columns], m[columns])
        assert found is not None
        torch.testing.assert_close(r[:, columns].double(), expected[:, columns], rtol=1e-6, atol=1e-6)
        exact = torch.cat([expected[at], m.double()[None]])[:, columns] @ expected[:, columns].T
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=2e-2)
        others = [i for i in range(11) if i not in at.tolist()]
        assert torch.equal(r[others], before[others]) and torch.equal(r[:, columns.stop :], before[:, columns.stop :])
        assert torch.equal(r[:, : columns.start], before[:, : columns.start])
    for unfit in (before.double(), before[:, :1000], before.T.contiguous().T):
        wide = unfit.clone()
        length = unfit.shape[1]
        assert memory_cpu.in_one_pass(wide, at, scale, updates[:, :length], m[:length]) is None and torch.equal(
            wide, unfit
        )


def test_a_combination_is_the_plain_one_to_the_last_digit(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    p, r = torch.randn(150_001), torch.randn(5, 150_001)
    index, share = torch.tensor([3, 0, 4]), torch.tensor([1e4, 2.0, 1e-3], dtype=torch.float64)
    found = combine(p, r, index, share)
    monkeypatch.setattr(memory_cpu, "library", lambda: None)
    plain = combine(p, r, index, share)
    assert torch.equal(found, plain) and not torch.equal(found, p)


def test_large_outputs_keep_the_digits_of_the_loss(library: ctypes.CDLL) -> None:
    chain = Chain.of(nn.Sequential(nn.Linear(1, 2, bias=False)))
    assert chain is not None
    for size in (1e3, 1e7):
        loss, _ = chain.gradient(
            torch.full((1, 2), size), torch.ones(1, 4, 1), torch.zeros(1, 4, dtype=torch.int64), None
        )
        torch.testing.assert_close(loss, torch.tensor([2.0]).log())


def test_torchs_defaults_change_nothing(library: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    chain = Chain.of(several())
    assert chain is not None
    x, inputs, targets, _ = asked(3, 8, chain, False)
    loss, g = chain.gradient(x, inputs, targets, None, 0.1)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            again = chain.gradient(x, inputs, targets, None, 0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again[0], loss) and torch.equal(again[1], g)


def test_what_does_not_fit_is_refused(library: ctypes.CDLL) -> None:
    chain = Chain.of(several())
    assert chain is not None
    x, inputs, targets, real = asked(3, 8, chain, True)
    assert real is not None
    right = (x, inputs, targets, real, 0.1)
    chain.gradient(*right)
    for place, other in (
        (0, x[:, :100]), (1, inputs[..., :59]), (1, inputs.double()), (1, inputs[:2]), (2, targets[:, :7]), (2, targets.int()),
        (2, torch.cat([targets, targets], 1)), (3, real[0]), (3, real[:1]), (4, torch.ones(2)), (4, torch.ones(3, 1)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="do not fit"):
            chain.gradient(*right[:place], other, *right[place + 1 :])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not fit"):
        chain.gradient(x, inputs[:, :0], targets[:, :0], None)
    misfits = Chain.of(nn.Sequential(nn.Linear(6, 5), nn.Linear(7, 3)))
    assert misfits is not None and misfits.dense is None
    chain = Chain.of(pictures(2, (6, 4), 3, 0, 14))
    assert chain is not None
    x = torch.randn(3, chain.entries)
    chain.gradient(x, torch.randn(3, 8, 2, 14, 14), targets % 5, real)
    for shape in (
        (3, 8, 1, 14, 14),
        (3, 8, 2, 14, 13),
        (3, 8, 2, 4, 4),
        (3, 8, 2, 1, 1),
        (3, 7, 2, 14, 14),
        (2, 8, 2, 14, 14),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            chain.gradient(x, torch.randn(shape), targets % 5, real)
    halves = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 4, 3), nn.ReLU(), nn.MaxPool2d(2)
    )
    misfits = Chain.of(nn.Sequential(*halves, nn.Flatten(), nn.Linear(16, 5)))
    assert misfits is not None
    with pytest.raises(ValueError, match="do not fit"):
        misfits.gradient(torch.randn(3, misfits.entries), torch.randn(3, 8, 1, 14, 14), targets % 5, real)


def test_rates_meet_their_clients(library: ctypes.CDLL) -> None:
    """Whatever leading dimensions they leave out."""
    torch.manual_seed(0)
    net = Net(several())
    x0, buffers = net.start()
    x, key = x0 + 0.1 * torch.randn(2, 3, len(x0)), torch.zeros(2, 3, dtype=torch.int64)
    batch = Batch(torch.randn(2, 3, 8, 1, 6, 10), torch.randint(0, 10, (2, 3, 8)), None, key)
    for shape in ((), (1,), (3, 1), (2, 1, 1), (1, 3, 1), (2, 3, 1)):
        rate, oracle = torch.rand(shape), Oracle(net, batch, buffers.expand(2, 3, -1))
        chain = fitting_chain(oracle)
        assert chain is not None and chain.in_c(x, 6) is not None
        torch.testing.assert_close(oracle.step(x, rate), x - rate * oracle.grad(x), rtol=1e-6, atol=1e-7)
        assert oracle.calls == 2


class Doubled(Oracle):
    """Somebody's own."""

    def grad(self, x: Tensor, *others: Any, **how: Any) -> Tensor:
        return 2 * super().grad(x, *others, **how)


def test_a_step_is_taken_at_once_only_where_nothing_is_between(library: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    net = Net(several())
    x, buffers = net.start()
    x = x.expand(3, -1)
    batch = Batch(torch.randn(3, 8, 1, 6, 10), torch.randint(0, 10, (3, 8)), None, torch.zeros(3, dtype=torch.int64))
    plain, doubled = Oracle(net, batch, buffers.expand(3, -1)), Doubled(net, batch, buffers.expand(3, -1))
    g = plain.grad(x)
    torch.testing.assert_close(doubled.step(x, 0.1), x - 0.2 * g, rtol=1e-5, atol=1e-7)
    at = Started(None, Work(x, x[:, :1], Momentum(torch.ones_like(x))), buffers)
    moved = local_step(FedAvg(optimizer="momentum", momentum=0.7), None, at, plain)
    torch.testing.assert_close(moved.opt.b, g + 0.7, rtol=1e-5, atol=1e-7)


@pytest.fixture
def forgotten() -> Iterator[None]:
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def again() -> ctypes.CDLL | None:
    native.library.cache_clear()
    return native.library()


def test_it_is_compiled_once_and_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forgotten: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is not None
    (made,) = (tmp_path / "undrift").iterdir()
    written = made.stat().st_mtime_ns
    assert again() is not None and made.stat().st_mtime_ns == written
    whole = made.read_bytes()
    made.unlink()  # the library is loaded from the old file, which must stay whole until Python ends
    made.write_bytes(whole[:8192])  # a file cut short is not loaded, which would end Python, but made again
    assert again() is not None and made.read_bytes() == whole
    monkeypatch.setenv("UNDRIFT_NATIVE", "0")
    assert again() is None
    monkeypatch.delenv("UNDRIFT_NATIVE")
    monkeypatch.setenv("PATH", str(tmp_path))  # no gcc
    assert again() is None


def test_without_a_cache_folder_it_is_made_for_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forgotten: None
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert native.library() is not None
    assert [p.name for p in tmp_path.iterdir()] == ["file"]

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nobody)
    assert again() is not None


def test_what_gcc_does_not_make_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forgotten: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "SOURCES", [Path(__file__)])
    with pytest.warns(UserWarning, match="gcc made nothing of the C functions, so PyTorch serves"):
        assert native.library() is None and not list((tmp_path / "undrift").iterdir())
