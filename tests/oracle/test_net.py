"""What the net makes of a user's module: BatchNorm, dropout, frozen and reused layers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small import path, simulation, tiny_mlp
from undrift.algorithms.fedavg import FedAvg
from undrift.core.errors import BadSetting
from undrift.oracle.layers import Context
from undrift.oracle.net import Net
from undrift.oracle.oracle import Batch, Oracle


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
    assert run.net.layout.names == ("lora_B.weight", "lora_B.bias") and run.net.layout.entries == 15
    before = run.model()
    record = run.round()
    after = run.model()
    assert record.bytes_up == 3 * 15 * 8
    assert torch.equal(before["lora_A.weight"], after["lora_A.weight"]) and not torch.equal(
        before["lora_B.weight"], after["lora_B.weight"]
    )
    copy.deepcopy(module).double().load_state_dict(after)
    with pytest.raises(BadSetting, match="no trainable parameter"):
        Net(nn.Flatten())


def test_parameters_are_in_memory_once() -> None:
    """In all copies of the module in a run, but not with the user's; a call puts a client's in their place and leaves them."""
    module = tiny_mlp().double()
    module[0].requires_grad_(False)  # type: ignore[index]
    net = Net(module, dtype=torch.float64).to(torch.device("cpu"))
    forms = [net.original, net.module(training=True), net.module(training=False)]
    frozen, trained = (
        [dict(m.named_parameters())[n].data_ptr() for m in forms] for n in ("lora_A.weight", "lora_B.weight")
    )
    assert len({*frozen}) == 1 and module[0].weight.data_ptr() not in frozen  # type: ignore[index]
    assert len({*trained}) == 1 and module[2].weight.data_ptr() not in trained  # type: ignore[index]
    before, (x, buffers) = copy.deepcopy(net.original.state_dict()), net.start()
    net(x + 1, buffers, torch.zeros(2, 5, dtype=torch.float64), Context(None, torch.tensor(0)))
    assert all(torch.equal(before[name], t) for name, t in net.original.state_dict().items())


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


def test_a_model_that_cannot_be_seeded_is_refused() -> None:
    with pytest.raises(BadSetting, match="nn.Dropout"):
        simulation(FedAvg(), FunctionalDropout(), execution="auto").round()


def test_an_untracked_gradient_leaves_the_statistics_alone() -> None:
    net = Net(normed(), dtype=torch.float64)
    x, buffers = net.start()
    batch = Batch(torch.randn(6, 5, dtype=torch.float64), torch.randint(0, 3, (6,)), None, torch.tensor(1))
    oracle = Oracle(net, batch, buffers)
    g = oracle.grad(x, track=False)
    assert torch.equal(oracle.buffers, buffers)
    assert torch.equal(oracle.grad(x), g), "one dropout mask for all gradients of a step"
    assert not torch.equal(oracle.buffers, buffers)


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


@pytest.mark.filterwarnings("ignore:the model's outputs do not depend on 2 of its parameters .unused")
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
