"""Stacked, chunked, pooled or alone, a client ends at the same model; and what the net makes of a user's module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small import CPU, SIZES, federation, path, simulation, tiny_mlp
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.gradma_s import GradMAS
from undrift.algorithms.scaffold import Scaffold
from undrift.core.errors import BadSetting
from undrift.kernels.linear_stacked import product
from undrift.oracle.net import Context, Net
from undrift.oracle.oracle import Batch, Oracle, View
from undrift.round.who import Attendance
from undrift.simulate.here import AskHere, Pool, Stacked
from undrift.simulate.work import LocalWork


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Linear(8, 6),
        nn.BatchNorm1d(6, momentum=None),
        nn.Linear(6, 3),
    )


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


def test_batchnorm_is_pytorchs_own() -> None:
    """Outputs, gradients and running statistics in training, and evaluation mode, against nn.BatchNorm1d."""
    module = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.BatchNorm1d(3, momentum=None, affine=False)
    ).double()
    net, x = Net(module, dtype=torch.float64), torch.randn(16, 5, dtype=torch.float64)
    point, buffers = net.start()
    theirs = copy.deepcopy(module)
    for _ in range(3):
        found, buffers = net(point, buffers, x, Context(None, torch.tensor(0)))
        masked, _ = net(
            point,
            buffers,
            torch.cat([x, torch.full_like(x, 1e6)]),
            Context(torch.tensor([1.0] * 16 + [0.0] * 16).double(), torch.tensor(0)),
        )
        expected = theirs(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(masked[:16], expected)
    state = net.state_dict(point, buffers)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(state[name], tensor)
    torch.testing.assert_close(net(point, buffers, x, None)[0], theirs.eval()(x))


def test_dropout_keeps_the_right_share_and_does_not_depend_on_the_batch() -> None:
    net = Net(nn.Sequential(nn.Linear(4, 1000, bias=False), nn.Dropout(0.3)))
    point, buffers = torch.ones(4000), torch.zeros(0)
    x = torch.ones(50, 4)
    out, _ = net(point, buffers, x, Context(None, torch.tensor(123)))
    assert abs((out == 0).double().mean() - 0.3) < 0.01
    assert torch.allclose(out[out != 0], torch.tensor(4 / 0.7))
    fewer, _ = net(point, buffers, x[:7], Context(None, torch.tensor(123)))
    assert torch.equal(fewer, out[:7])
    assert not torch.equal(net(point, buffers, x, Context(None, torch.tensor(124)))[0], out)
    assert torch.equal(net(point, buffers, x, None)[0], torch.full((50, 1000), 4.0))


def test_only_trainable_parameters_enter_x_and_the_wire() -> None:
    module = tiny_mlp()
    for p in module[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    run = simulation(FedAvg(), module)
    assert run.net.layout.names == ("2.weight", "2.bias") and run.net.layout.entries == 15
    before = run.model()
    record = run.round()
    after = run.model()
    assert record.bytes_up == 3 * 15 * 8
    assert torch.equal(before["0.weight"], after["0.weight"]) and not torch.equal(before["2.weight"], after["2.weight"])
    copy.deepcopy(module).double().load_state_dict(after)
    with pytest.raises(BadSetting, match="no trainable parameter"):
        Net(nn.Flatten())


def test_the_users_module_is_left_alone() -> None:
    module = normed()
    before = copy.deepcopy(module.state_dict())
    simulation(FedAvg(), module).round()
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert isinstance(module[1], nn.BatchNorm1d) and isinstance(module[3], nn.Dropout)  # type: ignore[index]


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.dropout(x, 0.5))  # type: ignore[no-any-return]


class Branching(nn.Module):
    """Python branches on data: vmap cannot stack it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x if bool((x.sum() > 0).item()) else -x)  # type: ignore[no-any-return]


def test_a_model_that_cannot_be_seeded_is_refused() -> None:
    with pytest.raises(BadSetting, match="nn.Dropout"):
        simulation(FedAvg(), FunctionalDropout(), execution="auto").round()


def test_a_model_that_cannot_be_stacked_runs_in_the_pool() -> None:
    run = simulation(FedAvg(), Branching(), execution="auto")
    run.round()
    assert isinstance(run.execution, Pool)


def test_auto_settles_on_an_execution_and_counts_only_real_work() -> None:
    run = simulation(FedAvg(), execution="auto")
    assert run.round().gradients == 9
    assert run.execution is not None


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


def test_an_untracked_gradient_leaves_the_statistics_alone() -> None:
    net = Net(normed(), dtype=torch.float64)
    x, buffers = net.start()
    batch = Batch(torch.randn(6, 5, dtype=torch.float64), torch.randint(0, 3, (6,)), None, torch.tensor(1))
    oracle = Oracle(net, batch, buffers)
    g = oracle.grad(x, track=False)
    assert torch.equal(oracle.buffers, buffers)
    assert torch.equal(oracle.grad(x), g), "one dropout mask for all gradients of a step"
    assert not torch.equal(oracle.buffers, buffers)


@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5)])
@pytest.mark.parametrize("biased", [True, False])
def test_the_stacked_linear_layer_is_vmaps(shape: tuple[int, ...], biased: bool) -> None:
    """The batched kernel against its plain form, forward and backward, also with a shared input."""
    w = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 4, dtype=torch.float64, requires_grad=True) if biased else None
    for x, dim in (
        (torch.randn(3, *shape, dtype=torch.float64, requires_grad=True), 0),
        (torch.randn(shape, dtype=torch.float64), None),
    ):
        inputs = [t for t in (x, w, b) if t is not None and t.requires_grad]
        dims = (dim, 0, 0 if biased else None)
        plain, ours = (torch.vmap(f, in_dims=dims)(x, w, b) for f in (F.linear, product))
        torch.testing.assert_close(ours, plain)
        probe = torch.randn_like(plain)
        for mine, theirs in zip(
            torch.autograd.grad((ours * probe).sum(), inputs),
            torch.autograd.grad((plain * probe).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs)


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


class Reused(nn.Module):
    """One BatchNorm and one Dropout in two places, one BatchNorm that is never used, one put in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm, self.drop, self.unused, self.still = (
            nn.BatchNorm1d(6),
            nn.Dropout(0.5),
            nn.BatchNorm1d(6),
            nn.BatchNorm1d(6),
        )
        self.layers = nn.Sequential(
            self.first, self.norm, self.drop, self.second, self.norm, self.drop, self.still, self.head
        )
        self.still.running_mean.fill_(0.3)
        self.still.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def test_layers_that_are_reused_unused_or_frozen() -> None:
    runs = [simulation(FedAvg(), Reused(), cohort=3, execution=e) for e in ("stacked", "pool")]
    first, second = (torch.cat([path(run, 2)[-1], run.state.buffers]) for run in runs)
    torch.testing.assert_close(first, second, rtol=1e-11, atol=1e-12)
    state = runs[0].model()
    assert (
        int(state["norm.num_batches_tracked"]) == 2 * 2 * 3
    )  # twice in each of 3 steps of 2 rounds, the maximum over clients
    assert int(state["unused.num_batches_tracked"]) == int(state["still.num_batches_tracked"]) == 0
    torch.testing.assert_close(state["still.running_mean"], Reused().still.running_mean.double())
    Reused().double().load_state_dict(state)


def test_a_reused_batchnorm_is_pytorchs_own() -> None:
    module = Reused().double()
    module.drop.p = 0.0
    net, x = Net(module, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    point, buffers = net.start()
    theirs = copy.deepcopy(module)
    for _ in range(2):
        outputs, buffers = net(point, buffers, x, Context(None, torch.tensor(0)))
        torch.testing.assert_close(outputs, theirs(x))
    state = net.state_dict(point, buffers)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(state[name], tensor)


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
    need = choose.bytes_per_client(tight.net, tight.state.x, tight.state.buffers, first)
    monkeypatch.setattr(choose, "available_memory", lambda device: 5 * need)  # half of it is used: room for two clients
    monkeypatch.setattr(here, "train", counting)
    torch.testing.assert_close(path(tight, 2), expected, rtol=1e-11, atol=1e-12)
    assert sizes == [2, 2, 2, 2, 2, 2]


def _table(run: Any) -> tuple[Tensor, Any]:
    ids, _ = run.sampling.invite(run.t)
    return ids, run.data.table(run.settings.plan, 0, 0, ids.numpy(), run.position[ids.numpy()])


class Moody(nn.Module):
    """Another output in evaluation mode, a hook, spectral norm, and a look at a layer's attributes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.utils.spectral_norm(nn.Linear(5, 4))
        self.head = nn.Linear(4, 3)
        self.head.register_forward_hook(lambda module, inputs, output: 2 * output)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)[:, : self.head.in_features]
        return self.head(h) if self.training else 0 * self.head(h)


def test_hooks_attributes_and_modes_of_a_module_are_kept() -> None:
    module = Moody()
    module.first.eval()  # spectral norm's own power iteration changes a buffer in training
    net, x = Net(module, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    point, buffers = net.start()
    assert "first.weight_orig" in net.layout.names
    outputs, _ = net(point, buffers, x, Context(None, torch.tensor(0)))
    torch.testing.assert_close(outputs, copy.deepcopy(module).double()(x))
    assert torch.equal(net(point, buffers, x, None)[0], torch.zeros(6, 3, dtype=torch.float64))


class Rows(nn.Module):
    """BatchNorm over samples times places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm, self.head = nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.fc(x.reshape(-1, 1))).view(len(x), -1))  # type: ignore[no-any-return]


def test_batchnorm_over_several_rows_of_a_sample() -> None:
    stacked, pool = (simulation(FedAvg(), Rows(), cohort=4, execution=e) for e in ("stacked", "pool"))
    torch.testing.assert_close(path(stacked, 3), path(pool, 3), rtol=1e-11, atol=1e-12)


def test_branches_drop_what_the_whole_pass_drops() -> None:
    """At x_t the frozen rest of the model continues the local blocks to the same outputs, dropout included."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5)),
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
        nn.Linear(8, 3),
    )
    net, x = Net(module, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    point, buffers = net.start()
    context = Context(None, torch.tensor(5))
    outputs, _ = net.trace(point, buffers, x, context)
    torch.testing.assert_close(net(point, buffers, x, context)[0], outputs[-1])
    for block in (1, 2):
        torch.testing.assert_close(net.onward(block, point, buffers, outputs[block - 1], context), outputs[-1])
