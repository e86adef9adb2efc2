"""Stacked, chunked, pooled or alone, a client ends at the same model."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from tests.oracle.test_net import normed
from tests.small import CPU, SIZES, federation, path, simulation, tiny_mlp
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.gradma_s import GradMAS
from undrift.algorithms.scaffold import Scaffold
from undrift.core.errors import BadSetting
from undrift.oracle.net import Net
from undrift.oracle.oracle import Batch, Oracle, View
from undrift.round.who import Attendance
from undrift.simulate.here import AskHere, Pool, Stacked
from undrift.simulate.work import LocalWork


def convolutional(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.Conv1d(1, 4, 3),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Dropout1d(0.3),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


@pytest.mark.parametrize("module", [tiny_mlp, normed, convolutional])
@pytest.mark.parametrize("alg", [FedAvg(), Scaffold(), GradMAS(slots=6)])
def test_every_execution_gives_the_same_result(module: Any, alg: Any) -> None:
    """R40: order, stacking, chunks and threads do not matter; unequal clients and steps, BatchNorm, dropout."""
    runs = [
        simulation(alg, module(), cohort=4, epochs=1.5, **how)
        for how in (
            {"execution": "stacked"},
            {"execution": "stacked", "chunk": 1},
            {"execution": "stacked", "chunk": 3},
            {"execution": "pool"},
        )
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threaded = simulation(alg, module(), cohort=4, epochs=1.5, execution="pool")
        first, *others = (torch.cat([path(run, 3)[-1], run.state.buffers]) for run in (*runs, threaded))
        assert isinstance(threaded.execution, Pool) and threaded.execution.threads == 2
    finally:
        torch.set_num_threads(threads)
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("module", [tiny_mlp, normed, convolutional])
def test_a_small_client_in_a_padded_cohort_ends_where_it_ends_alone(module: Any) -> None:
    """Statistics, losses and dropout ignore padding: 3 samples beside 64 (float64, 1e-10)."""
    fed = federation((3, 64, 64, 64))
    together = simulation(FedAvg(), module(), fed, cohort=4, batch=64, steps=4)
    answers = _answers(together, [0, 1, 2, 3], 64)
    alone = _answers(simulation(FedAvg(), module(), fed, cohort=4, batch=64, steps=4), [0], 3)
    torch.testing.assert_close(answers.up.d[0], alone.up.d[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(answers.buffers[0], alone.buffers[0], rtol=1e-10, atol=1e-10)
    assert alone.up.d.abs().max() > 1e-3


def _answers(run: Any, ids: list[int], widest: int) -> Any:
    chosen = torch.tensor(ids)
    table = run.data.table(run.settings.plan, 0, 0, chosen.numpy(), run.position[chosen.numpy()])
    assert table.index.shape[-1] == widest
    work = LocalWork(run.net, run.data, 0, 0, chosen, table, 64)
    who = run.who(Attendance(chosen.numpy(), chosen.numpy(), chosen.numpy(), table.steps))
    return AskHere(Stacked(100), work, run.clients).train(run.alg, run.down(who), run.state.buffers, who)


class Branching(nn.Module):
    """Python branches on data: vmap cannot stack it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x if bool((x.sum() > 0).item()) else -x)  # type: ignore[no-any-return]


def test_a_model_that_cannot_be_stacked_runs_in_the_pool() -> None:
    run = simulation(FedAvg(), Branching(), execution="auto")
    run.round()
    assert isinstance(run.execution, Pool)


def test_auto_settles_on_an_execution_and_counts_only_real_work() -> None:
    run = simulation(FedAvg(), execution="auto")
    assert run.round().gradients == 9
    assert run.execution is not None


def light() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


class Heavy(nn.Module):
    """A convolution that no module holds: 1.1 million multiply-adds a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.head = nn.Parameter(torch.randn(96, 1, 9, 9) / 9), nn.Linear(96, 3)

    def forward(self, x: Tensor) -> Tensor:
        pictures = x.repeat(1, 80).view(-1, 1, 20, 20)
        return self.head(torch.conv2d(pictures, self.kernel).amax((-2, -1)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("slow", [Stacked, Pool])
@pytest.mark.parametrize("module, chosen", [(tiny_mlp, "stacked"), (light, "stacked"), (Heavy, "pool")])
def test_auto_follows_from_the_model_and_not_from_a_clock(
    module: Any, chosen: str, slow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is busy while one of the two is tried changes nothing."""
    real = slow.train

    def delayed(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.2)
        return real(*arguments, **named)

    monkeypatch.setattr(slow, "train", delayed)
    run = simulation(FedAvg(), module(), execution="auto", batch=8)
    run.round()
    assert run.execution is not None and run.execution.name == chosen


@pytest.mark.parametrize("batch, chosen", [(64, "pool"), (1, "stacked")])
def test_auto_weighs_the_work_of_an_operation(batch: int, chosen: str) -> None:
    x, y = torch.zeros(256, 1, 28, 28), torch.arange(256) % 10
    how: dict[str, Any] = {"partition": "iid", "clients": 4, "cohort": 3, "rounds": 1, "steps": 1}
    result = undrift.run(model="small-cnn", data=(x, y, x[:10], y[:10]), batch=batch, **how)
    assert result.about["execution"] == chosen


def test_free_memory_changes_nothing_while_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    from undrift.simulate import choose

    load = choose.Load(1000, 0, 1)
    monkeypatch.setattr(choose, "total_memory", lambda device: 20_000)
    for free in (20_000, 14_000):
        monkeypatch.setattr(choose, "available_memory", lambda device, free=free: free)
        assert choose.clients_at_a_time(load, CPU, 100) == 10
    monkeypatch.setattr(choose, "available_memory", lambda device: 6_000)
    assert choose.clients_at_a_time(load, CPU, 4) == 10  # four fit
    with pytest.warns(UserWarning, match="3 clients are stacked at a time instead of 5"):
        assert choose.clients_at_a_time(load, CPU, 5) == 3


def test_an_objective_with_other_vectors_is_fedprox() -> None:
    """oracle.grad(x, objective, x_t): per-sample losses plus mu/2 |x - x_t|^2 has FedProx's gradient."""
    net = Net(tiny_mlp(), dtype=torch.float64)
    x0, _ = net.start()
    x = x0 + 0.1 * torch.randn(4, len(x0), dtype=torch.float64)
    batch = Batch(torch.randn(4, 6, 5, dtype=torch.float64), torch.randint(0, 3, (4, 6)), None, torch.arange(4))

    def objective(model: View, x: Tensor, inputs: Tensor, targets: Tensor, x_t: Tensor) -> Tensor:
        return model.loss(model(x, inputs), targets) + 0.5 * 0.3 * (x - x_t).square().sum()

    oracle = Oracle(net, batch, torch.zeros(4, 0, dtype=torch.float64))
    found = oracle.grad(x, objective, x0)
    torch.testing.assert_close(found, oracle.grad(x) + 0.3 * (x - x0))
    assert oracle.calls == 2
    for s in range(4):
        alone = Oracle(
            net, Batch(batch.inputs[s], batch.targets[s], None, batch.key[s]), torch.zeros(0, dtype=torch.float64)
        )
        torch.testing.assert_close(alone.grad(x[s], objective, x0), found[s])


def test_a_client_that_breaks_is_dropped_and_the_round_goes_on() -> None:
    fed = federation()
    run = simulation(Scaffold(), fed=fed, cohort=6)
    run.round()
    assert fed.train.held is not None
    bad = 3
    fed.train.held[fed.members[fed.start[bad] : fed.start[bad] + fed.sizes[bad]]] = float("nan")
    kept = run.clients.columns[0][run.clients.row[bad]].clone()
    record = run.round()
    assert (record.dropped, record.clients) == (1, 6) and torch.isfinite(run.state.x).all()
    assert torch.equal(run.clients.columns[0][run.clients.row[bad]], kept)
    fed.train.held.fill_(float("nan"))
    before = run.tensors()
    record = run.round()
    assert record.dropped == 6
    assert all(torch.equal(before[n], t) for n, t in run.tensors().items())
    assert run.device == CPU and len(SIZES) == 6


class Pixels(nn.Module):
    """A label for each of four places of a sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(-1, 3, 4)  # type: ignore[no-any-return]


def test_targets_with_a_label_for_every_place() -> None:
    import numpy as np

    from undrift.data.federation import federate
    from undrift.data.from_user import dataset_from

    random = np.random.default_rng(0)
    parts = [(random.normal(size=(n, 5)), random.integers(0, 3, (n, 4))) for n in (4, 2, 7)]
    fed = federate(dataset_from((parts, parts[0])), "sites", 3, 0, CPU)
    stacked, pool = (simulation(FedAvg(), Pixels(), fed, cohort=3, batch=4, execution=e) for e in ("stacked", "pool"))
    torch.testing.assert_close(path(stacked, 3), path(pool, 3), rtol=1e-12, atol=1e-12)
    assert 0 <= stacked.evaluate(torch.tensor([0]), last=True)["accuracy"] <= 1


def test_parts_that_do_not_fit_are_refused() -> None:
    from dataclasses import dataclass
    from typing import ClassVar

    from undrift.algorithms.base import LocalSGD
    from undrift.algorithms.gradma_s import ServerMemory

    @dataclass(frozen=True)
    class Differences(LocalSGD, ServerMemory):
        sends_updates: ClassVar[bool] = False

    with pytest.raises(BadSetting, match="own updates"):
        simulation(Differences(slots=6))


def test_a_cohort_that_does_not_fit_in_memory_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of clients stacked at a time follows from the memory there is; the result does not."""
    from undrift.simulate import choose, here

    whole = simulation(Scaffold(), normed(), cohort=6)
    expected = path(whole, 2)
    assert isinstance(whole.execution, Stacked) and whole.execution.chunk >= 6
    sizes: list[int] = []
    real = here.train

    def counting(*arguments: Any) -> Any:
        answers = real(*arguments)
        sizes.append(len(answers.loss))
        return answers

    tight = simulation(Scaffold(), normed(), cohort=6)
    first = LocalWork(tight.net, tight.data, 0, 0, *_table(tight), 8)
    need = choose.load_of(tight.state.x, tight.state.buffers, first).bytes
    monkeypatch.setattr(choose, "available_memory", lambda device: 5 * need)  # half of it is used: room for two clients
    monkeypatch.setattr(here, "train", counting)
    with pytest.warns(UserWarning, match="memory is short now: 2 clients are stacked at a time instead of 6"):
        torch.testing.assert_close(path(tight, 2), expected, rtol=1e-11, atol=1e-12)
    assert sizes == [2, 2, 2, 2, 2, 2]


def _table(run: Any) -> tuple[Tensor, Any]:
    ids, _ = run.sampling.invite(run.t)
    return ids, run.data.table(run.settings.plan, 0, 0, ids.numpy(), run.position[ids.numpy()])
