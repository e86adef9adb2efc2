"""DSP and its baselines in one process, against references written from their definitions."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pipeline.cases import batches, build, factor, modules, nesterov, plain_sgd, rate, sgd
from tests.reference.dsp import Reference
from undrift.core.errors import BadSetting
from undrift.core.streams import Purpose, stream
from undrift.pipeline import DSP, SUM, Schedule
from undrift.pipeline.block import PipelineBlock
from undrift.pipeline.ddg import StashingBlock
from undrift.pipeline.dni import SyntheticBlock, predictor
from undrift.pipeline.engines import METHODS
from undrift.pipeline.simulator import Simulator

CPU = torch.device("cpu")
QUEUES = ["0,0,0;0,0,0", "0,0,0;2,1,0", "1,1,0;4,2,0", "2,2,0;6,3,0", "3,3,0;10,5,0", "1,1,0;5,3,1"]


def simulator(
    made: list[nn.Module], queues: str, optimizer: Any = sgd, kind: type[PipelineBlock] = PipelineBlock, **options: Any
) -> Simulator:
    schedule, last = Schedule.parse(queues), len(made) - 1
    blocks = [
        kind(module, k, schedule.m[k], optimizer, F.cross_entropy if k == last else None, options.get("rate", factor))
        for k, module in enumerate(made)
    ]
    return Simulator(blocks, schedule, CPU)


def fed(run: Simulator, data: Iterable[tuple[Tensor, Tensor]]) -> Simulator:
    for x, y in data:
        run.step(x, y)
    run.flush()
    return run


def flat(made: Iterable[nn.Module]) -> Tensor:
    return torch.cat([p.detach().flatten() for module in made for p in module.parameters()])


@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("how", ["plain", "momentum", "nesterov", "sum 0", "sum 1"])
def test_dsp_is_equation_1_6_bit_for_bit(queues: str, how: str) -> None:
    """SGD, heavy ball, Nesterov, SUM; weight decay, BatchNorm, dropout and a rate that drops."""
    made, schedule, data = modules(3), Schedule.parse(queues), batches()
    s = float(how[-1]) if how.startswith("sum") else None
    optimizer = {"plain": plain_sgd, "momentum": sgd, "nesterov": nesterov}.get(
        how, lambda parameters: SUM(parameters, lr=0.1, beta=0.9, s=s or 0.0, weight_decay=1e-2)
    )
    settings: dict[str, Any] = (
        {} if how == "plain" else {"momentum": 0.9, "weight_decay": 1e-2, "nesterov": how == "nesterov", "s": s}
    )
    rates = [rate(n) for n in range(len(data))]
    expected = Reference(made, schedule.p, schedule.m, [[b] for b in data], F.cross_entropy, rates, **settings)
    fed(simulator(made, queues, optimizer), data)
    for k, module in enumerate(made):
        for name, weight in expected.parameters()[k].items():
            assert torch.equal(module.get_parameter(name), weight), (k, name)
        for (name, mine), other in zip(module.named_buffers(), expected.modules[k].buffers(), strict=True):
            assert torch.equal(mine, other), (k, name)  # statistics are tracked once
            if name.endswith("num_batches_tracked"):
                assert int(mine) == len(data)


def test_without_staleness_it_is_autograd_bit_for_bit() -> None:
    """BP as PyTorch does it, on the whole model at once, with the same dropout masks."""
    made, data = modules(3), batches()
    whole = nn.ModuleList(copy.deepcopy(made))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    for n, (h, y) in enumerate(data):
        optimizer.param_groups[0]["lr"] = rate(n)
        for k, module in enumerate(whole):
            torch.manual_seed(stream(0, Purpose.DROPOUT, n, k) >> 1)
            h = module(h)
        optimizer.zero_grad()
        F.cross_entropy(h, y).backward()
        optimizer.step()
    fed(simulator(made, "0,0,0;0,0,0"), data)
    assert all(
        torch.equal(a, b)
        for a, b in zip(nn.ModuleList(made).state_dict().values(), whole.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("m", [0, 3])
def test_one_block_is_sgd_or_delayed_replay(m: int) -> None:
    made, data = modules(3, plain=True), batches(10)
    (block,) = [nn.Sequential(*made)]
    x = {name: w.detach().clone() for name, w in block.named_parameters()}
    versions = []
    for n in range(len(data) + m):
        if n >= m:
            inputs, y = data[n - m]
            weights = {name: w.clone().requires_grad_() for name, w in x.items()}
            error_at = (
                torch.func.functional_call(block, versions[n - m] if m else x, (inputs,)).detach().requires_grad_()
            )
            (error,) = torch.autograd.grad(F.cross_entropy(error_at, y), error_at)
            out = torch.func.functional_call(block, weights, (inputs,))
            grads = torch.autograd.grad(out, list(weights.values()), error)
            versions.append(x)
            x = {name: w - 0.1 * g for (name, w), g in zip(x.items(), grads, strict=True)}
        else:
            versions.append(x)
    fed(simulator([block], f"0;{m}", plain_sgd, rate=None), data)
    for name, weight in x.items():
        torch.testing.assert_close(block.get_parameter(name).detach(), weight, rtol=1e-13, atol=1e-13)


def test_fr_is_dsp_with_its_queues_and_the_others_differ() -> None:
    """The numbers depend on m alone; every other m gives another model."""
    found = {}
    for queues in ("0,0,0;2,1,0", "0,0,0;4,2,0", "1,1,0;4,2,0", "0,0,0;0,0,0", "2,2,0;6,3,0", "1,1,0;6,3,0"):
        found[queues] = flat(module for module in fed_modules(queues))
    named = build("fr", 3)
    assert isinstance(named, Simulator)
    fed(named, batches())
    assert torch.equal(flat(block.module for block in named.blocks), found["0,0,0;2,1,0"])
    assert torch.equal(found["0,0,0;4,2,0"], found["1,1,0;4,2,0"])
    assert torch.equal(found["2,2,0;6,3,0"], found["1,1,0;6,3,0"])
    different = [found[q] for q in ("0,0,0;2,1,0", "1,1,0;4,2,0", "0,0,0;0,0,0", "2,2,0;6,3,0")]
    for i, one in enumerate(different):
        for other in different[:i]:
            assert (one - other).abs().max() > 1e-4


def fed_modules(queues: str) -> list[nn.Module]:
    made = modules(3)
    fed(simulator(made, queues), batches())
    return made


@pytest.mark.parametrize("queues", ["1,1,0;4,2,0", "3,3,0;10,5,0"])
def test_the_order_of_blocks_in_a_timestamp_does_not_matter(queues: str) -> None:
    made = modules(3)

    class Reversed(Simulator):
        def forward_order(self) -> Iterable[int]:
            return reversed(range(3))

        def backward_order(self) -> Iterable[int]:
            return range(3)

    schedule = Schedule.parse(queues)
    losses = [None, None, F.cross_entropy]
    blocks = [PipelineBlock(module, k, schedule.m[k], sgd, losses[k], factor) for k, module in enumerate(made)]
    fed(Reversed(blocks, schedule, CPU), batches())
    assert torch.equal(flat(made), flat(fed_modules(queues)))


def test_at_rate_zero_the_gradient_is_backpropagation_s() -> None:
    made = modules(3, plain=True)
    run = simulator(made, "1,1,0;4,2,0", plain_sgd, rate=lambda n: 0.0)
    for n, (x, y) in enumerate(batches()):
        run.step(x, y, probe=n == 8)
    assert run.differences == {0: 0.0, 1: 0.0, 2: 0.0}
    moving = simulator(modules(3, plain=True), "1,1,0;4,2,0", plain_sgd)
    for n, (x, y) in enumerate(batches()):
        moving.step(x, y, probe=n == 8)
    assert moving.differences[0] > moving.differences[1] > moving.differences[2] == 0.0


def test_the_measured_difference_is_that_of_the_definition() -> None:
    """BP's gradient at the forward parameters x_j^{t_j}, all kept by the reference, against DSP's."""
    schedule, data, n = Schedule.parse("1,1,0;4,2,0"), batches(), 9
    made = modules(3, plain=True)
    rates = [rate(i) for i in range(len(data))]
    known = Reference(made, schedule.p, schedule.m, [[b] for b in data], F.cross_entropy, rates)
    weights = [{name: w.clone().requires_grad_() for name, w in known.x[k][n + known.F[k]].items()} for k in range(3)]
    h = data[n][0]
    for k in range(3):
        h = torch.func.functional_call(made[k], weights[k], (h,))
    F.cross_entropy(h, data[n][1]).backward()
    run = simulator(made, "1,1,0;4,2,0", plain_sgd)
    for i, (x, y) in enumerate(data):
        run.step(x, y, probe=i == n)
    for k in range(3):
        apart = [known.gradients[n, k][name] - w.grad for name, w in weights[k].items() if w.grad is not None]
        count = sum(a.numel() for a in apart)
        norm = float(torch.cat([a.flatten() for a in apart]).norm())
        assert run.differences[k] == pytest.approx(norm / count, rel=1e-9, abs=1e-18)


def test_ddg_is_delayed_backpropagation() -> None:
    """x_k^{t+1} = x_k^t - alpha grad_k f(x^{t-d}; batch t-d) with d = K - 1 - k, from whole-model gradients."""
    made, data = modules(3, plain=True), batches()
    x = [{name: w.detach().clone() for name, w in module.named_parameters()} for module in made]
    history: list[list[dict[str, Tensor]]] = []
    for t in range(len(data) + 2):
        history.append(x)
        new = []
        for k in range(3):
            n = t - (2 - k)
            if 0 <= n < len(data):
                weights = [{name: w.clone().requires_grad_() for name, w in each.items()} for each in history[n]]
                h = data[n][0]
                for module, own in zip(made, weights, strict=True):
                    h = torch.func.functional_call(module, own, (h,))
                grads = torch.autograd.grad(F.cross_entropy(h, data[n][1]), list(weights[k].values()))
                new.append(
                    {name: torch.add(w, g, alpha=-rate(n)) for (name, w), g in zip(x[k].items(), grads, strict=True)}
                )
            else:
                new.append(x[k])
        x = new
    fed(simulator(made, "0,0,0;2,1,0", plain_sgd, StashingBlock), data)
    for k, module in enumerate(made):
        for name, weight in x[k].items():
            assert torch.equal(module.get_parameter(name), weight), (k, name)


def test_dni_follows_its_definition() -> None:
    """All blocks step along predicted gradients at once; each predictor learns what the block above really sent."""
    made, data = modules(3, plain=True), batches()
    run = build("dni plain", 3)
    assert isinstance(run, Simulator)
    first = [predictor(torch.zeros(1, 8, dtype=torch.float64)) for _ in range(2)]
    mine = copy.deepcopy(made)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in mine]
    for n, (x, y) in enumerate(data):
        run.step(x, y)
        if n == 0:  # the predictors are random: take over their first weights
            for k, phi in enumerate(first):
                torch.manual_seed(stream(0, Purpose.DROPOUT, 1 << 32, k) >> 1)
                phi.load_state_dict(predictor(torch.zeros(1, 8, dtype=torch.float64)).state_dict())
            phis = [torch.optim.SGD(phi.parameters(), lr=0.1) for phi in first]
        for optimizer in (*optimizers, *phis):
            optimizer.param_groups[0]["lr"] = rate(n)
        inputs, outputs, h = [], [], x
        for module in mine:
            inputs.append(h.detach().requires_grad_())
            outputs.append(module(inputs[-1]))
            h = outputs[-1]
        for k in range(3):
            optimizers[k].zero_grad()
            error = None if k == 2 else first[k](outputs[k].detach()).detach()
            torch.autograd.backward(F.cross_entropy(outputs[k], y) if k == 2 else outputs[k], error)
        for optimizer in optimizers:
            optimizer.step()
        for k in range(2):
            phis[k].zero_grad()
            error = inputs[k + 1].grad
            assert error is not None
            (first[k](outputs[k].detach()) - error).square().mean().backward()
            phis[k].step()
    torch.testing.assert_close(flat(block.module for block in run.blocks), flat(mine), rtol=1e-11, atol=1e-12)
    assert (flat(mine) - flat(fed_plain("0,0,0;0,0,0"))).abs().max() > 1e-3


def fed_plain(queues: str) -> list[nn.Module]:
    made = modules(3, plain=True)
    fed(simulator(made, queues, plain_sgd), batches())
    return made


def test_the_predictor_is_the_thesis_one() -> None:
    phi = predictor(torch.zeros(2, 16, 8, 8))
    layers = [layer for layer in phi if isinstance(layer, nn.Conv2d)]
    assert [(c.kernel_size, c.padding, c.out_channels) for c in layers] == [((5, 5), (2, 2), 16)] * 3
    assert [type(layer).__name__ for layer in phi] == ["Conv2d", "BatchNorm2d", "ReLU"] * 2 + ["Conv2d"]
    assert not phi(torch.randn(2, 16, 8, 8)).detach().any()


@pytest.mark.parametrize(("method", "micro"), [("gpipe", 1), ("gpipe", 4), ("1f1b", 3), ("1f1b", 4)])
def test_micro_batches_give_backpropagation(method: str, micro: int) -> None:
    """Without BatchNorm and dropout the mean of equal micro-batches' gradients is the batch's."""
    run = build(f"{method} {micro}", 3)
    for x, y in batches():
        run.step(x, y)
    made = modules(3, plain=True)
    fed(simulator(made, "0,0,0;0,0,0"), batches())
    found = torch.cat([t.flatten() for n, t in run.tensors().items() if ".module." in n])
    torch.testing.assert_close(found, flat(made), rtol=1e-11, atol=1e-12)
    with pytest.raises(BadSetting, match="does not divide into 5"):
        build(f"{method} 5", 3).step(*batches(1)[0])


def test_every_method_has_a_line_in_this_file_or_is_plain_backpropagation() -> None:
    assert set(METHODS) == {"bp", "bp-k", "fr", "ddg", "dni", "gpipe", "1f1b", "dsp"}


def test_stored_tensors_are_the_queue_lengths() -> None:
    """After a forward: 1 + m inputs, 1 + p outputs and the q error gradients that came before this timestamp."""
    run = simulator(modules(3), "3,3,0;10,5,0")
    for x, y in batches(20):
        run.step(x, y)
    # block 2 backwards what it forwards: there is only its one input
    assert [count for count, _ in run.stored] == [11 + 4 + 2, 6 + 4 + 2, 1]
    assert run.stored[0][1] == 11 * 12 * 6 * 8 + 6 * 12 * 8 * 8
    assert run.bytes_up == (20 + 17) * 12 * 8 * 8  # block 1 is 3 timestamps behind


def test_dni_stores_the_output_and_the_gradient_that_wait() -> None:
    """Block 0: its output, which is also on its way up; block 1: that and the gradient for block 0; block 2: its input."""
    run = simulator(modules(3), "0,0,0;0,0,0", kind=SyntheticBlock)
    run.step(*batches(1)[0])
    assert run.stored == [(1, 12 * 8 * 8), (2, 2 * 12 * 8 * 8), (1, 12 * 8 * 8)]


def test_every_block_updates_once_a_batch_and_m_times_in_between() -> None:
    made, seen = modules(3), []
    run = simulator(made, "1,1,0;4,2,0")
    updates = [0, 0, 0]
    at_forward: dict[tuple[int, int], int] = {}
    for k, block in enumerate(run.blocks):
        real_forward, real_update = block.forward, block.update

        def forward(n: int, h: Tensor, target: Any = None, k: int = k, real: Any = real_forward) -> Any:
            at_forward[k, n] = updates[k]
            return real(n, h, target)

        def update(n: int, k: int = k, real: Any = real_update) -> None:
            seen.append((k, n, updates[k] - at_forward[k, n]))
            updates[k] += 1
            real(n)

        block.forward, block.update = forward, update  # type: ignore[method-assign, assignment]
    fed(run, batches())
    assert updates == [22, 22, 22]
    assert all(between == min((4, 2, 0)[k], n) for k, n, between in seen)


@pytest.mark.parametrize(("s", "options"), [(0.0, {"momentum": 0.9}), (1.0, {"momentum": 0.9, "nesterov": True})])
def test_sum_is_torch_s_momentum_at_a_constant_rate(s: float, options: dict[str, Any]) -> None:
    mine, theirs = (torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_() for _ in range(2))
    ours = SUM([mine], lr=0.05, beta=0.9, s=s, weight_decay=0.1)
    other = torch.optim.SGD([theirs], lr=0.05, weight_decay=0.1, **options)
    for n in range(30):
        for x, optimizer in ((mine, ours), (theirs, other)):
            optimizer.zero_grad()
            ((x - 1).pow(4).sum() * (1 + n % 3)).backward()
            optimizer.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_sum_with_a_large_s_is_sgd_and_with_changing_rates_is_equation_1_4() -> None:
    x = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    z, before = x.detach().clone(), x.detach().clone()
    w = x.detach().clone().requires_grad_()
    many, plain = SUM([x], lr=0.02, beta=0.8, s=5.0), torch.optim.SGD([y], lr=0.1)
    one = SUM([w], lr=0.1, beta=0.7, s=1.0)
    for n in range(20):
        for v, optimizer in ((x, many), (y, plain)):
            optimizer.zero_grad()
            (v**2).sum().backward()
            optimizer.step()
        alpha = one.param_groups[0]["lr"] = 0.1 / (1 + n)
        one.zero_grad()
        (w**2).sum().backward()
        one.step()
        G = 2 * z
        y_s = z - alpha * G
        z, before = z - alpha * G + 0.7 * (y_s - before), y_s
    torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(w.detach(), z, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("queues", "above", "kind"),
    [
        ("1,1,0;4,2,0", "1,0;2,0", PipelineBlock),
        ("0,0,0;2,1,0", "0,0;1,0", PipelineBlock),
        ("0,0,0;0,0,0", "0,0;0,0", PipelineBlock),
        ("0,0,0;2,1,0", "0,0;1,0", StashingBlock),
    ],
)
def test_a_first_block_with_nothing_to_train_is_passed_through(
    queues: str, above: str, kind: type[PipelineBlock]
) -> None:
    """A layer without parameters, and one that is frozen: the blocks above train as if they were alone."""
    frozen = nn.Linear(6, 6).double().requires_grad_(False)
    data = batches()
    for first in (nn.Flatten(), frozen):
        made, alone = modules(2, plain=True), modules(2, plain=True)
        run = simulator([first, *made], queues, kind=kind)
        for n, (x, y) in enumerate(data):
            run.step(x, y, probe=n == 12)
        run.flush()
        fed(simulator(alone, above, kind=kind), [(first(x), y) for x, y in data])
        assert torch.equal(flat(made), flat(alone)) and not torch.equal(flat(made), flat(modules(2, plain=True)))
        assert run.differences[0] == 0.0


def test_an_in_place_first_layer_is_refused() -> None:
    made = [
        nn.Linear(6, 8).double(),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 4)).double(),
        nn.Linear(4, 4).double(),
    ]
    run = simulator(made, "1,1,0;4,2,0")
    with pytest.raises(BadSetting, match="block 1 changes its input in place"):
        fed(run, batches())


def test_the_public_class() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    start = copy.deepcopy(model.state_dict())
    data = batches(60)
    hard = [(x, (x[:, :4] * 3).argmax(1)) for x, _ in data]
    dsp = DSP(model, cuts=[2, "4"], p=(1, 1, 0), m=(4, 2, 0), optimizer=sgd)
    losses = [dsp.step(batch) for batch in hard]
    assert [loss is None for loss in losses[:4]] == [True, True, False, False]
    before, half = dsp.evaluate(hard[:5]), dsp.state_dict()
    assert len(dsp.flush()) == 2
    assert before["accuracy"] > 0.6
    assert dsp.model_state().keys() == start.keys()
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in dsp.model_state().items())
    other = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    again = DSP(other, cuts=[2, 4], p=(1, 1, 0), m=(4, 2, 0), optimizer=sgd)
    again.load_state_dict(half)
    assert again.evaluate(hard[:5]) == before, "the state is the one before the flush"
    assert len(again.flush()) == 2
    after = dsp.state_dict()
    assert after.keys() == again.state_dict().keys()
    assert all(torch.equal(t, after[name]) for name, t in again.state_dict().items())


def test_a_state_of_other_queues_or_blocks_is_refused_and_changes_nothing() -> None:
    def built(cuts: list[int], p: tuple[int, ...], m: tuple[int, ...]) -> DSP:
        layers = nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
        return DSP(nn.Sequential(*layers).double(), cuts=cuts, p=p, m=m, optimizer=sgd)

    dsp = built([2, 4], (1, 1, 0), (4, 2, 0))
    for batch in batches(6):
        dsp.step(batch)
    state = dsp.state_dict()
    for other in (built([2, 4], (2, 2, 0), (6, 3, 0)), built([2], (1, 0), (2, 0))):
        before = other.state_dict()
        with pytest.raises(BadSetting, match="3 blocks with the queue lengths 1,1,0;4,2,0, and this pipeline has"):
            other.load_state_dict(state)
        assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())
        with pytest.raises(BadSetting, match="no state of a pipeline"):
            other.load_state_dict(dsp.model_state())


def test_the_state_resumes_in_the_middle() -> None:
    data = batches()
    straight, first = build("dsp 3,3,0;10,5,0", 3), build("dsp 3,3,0;10,5,0", 3)
    for x, y in data:
        straight.step(x, y)
    for x, y in data[:12]:
        first.step(x, y)
    state = {name: t.clone() for name, t in first.tensors().items()}
    assert sum(".input." in name for name in state) == 10 + 5
    second = build("dsp 3,3,0;10,5,0", 3)
    second.restore(state)
    for x, y in data[12:]:
        second.step(x, y)
    end, other = second.tensors(), straight.tensors()
    assert end.keys() == other.keys()
    assert all(torch.equal(end[name], other[name]) for name in other)


class Slowing(torch.optim.Optimizer):
    """Somebody's own optimiser, which keeps plain numbers for each parameter."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for x in self.param_groups[0]["params"]:
            state = self.state[x]
            state["count"], state["product"] = state.get("count", 0) + 1, state.get("product", 1.0) * 0.97
            x -= 0.1 * state["product"] * (1 - 0.9 ** state["count"]) * x.grad


def test_numbers_of_an_own_optimiser_resume_as_numbers() -> None:
    """In float32, where the digits of a number beyond those of a tensor show."""
    data = batches(dtype=torch.float32)
    straight, stopped, resumed = (
        DSP(modules(2, dtype=torch.float32), p=(1, 0), m=(2, 0), optimizer=Slowing) for _ in range(3)
    )
    for batch in data:
        straight.step(batch)
    for batch in data[:9]:
        stopped.step(batch)
    resumed.load_state_dict(stopped.state_dict())
    for batch in data[9:]:
        resumed.step(batch)
    end, other = resumed.state_dict(), straight.state_dict()
    assert end.keys() == other.keys()
    assert all(torch.equal(end[name], other[name]) for name in other)


def test_a_batch_s_tensors_may_be_filled_anew() -> None:
    data = batches()
    fresh, reused = (DSP(modules(3), p=(1, 1, 0), m=(4, 2, 0), optimizer=sgd) for _ in range(2))
    x, y = (tensor.clone() for tensor in data[0])
    for batch in data:
        fresh.step(batch)
        reused.step((x.copy_(batch[0]), y.copy_(batch[1])))
    fresh.flush()
    reused.flush()
    assert all(torch.equal(t, reused.model_state()[name]) for name, t in fresh.model_state().items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cuts": [2]}, "for 3 blocks, and the model has 2"),
        ({"cuts": [2, 9]}, "between 1 and 4"),
        ({"cuts": ["two"]}, "no layer 'two'"),
        ({}, "give cuts"),
        ({"cuts": [2, 4], "p": (1, 0, 0)}, "p_1 must be at least 1 .*nearest: 1,1,0;4,2,0"),
        ({"cuts": [2, 4], "m": None}, "both"),
        ({"cuts": [2, 4], "blocks": 2}, "blocks is 2"),
        ({"cuts": [2, 4], "optimizer": None}, "torch.optim.SGD"),
        (
            {"cuts": [2, 4], "optimizer": plain_sgd([nn.Parameter(torch.ones(1))])},
            "makes an optimiser: .*torch.optim.SGD",
        ),
        ({"cuts": 2}, r"a list of layers, such as \[2\], not 2"),
        ({"cuts": "2,4"}, "a list of layers"),
    ],
)
def test_mistakes_are_explained(options: dict[str, Any], said: str) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    with pytest.raises(BadSetting, match=said):
        DSP(model, **({"p": (1, 1, 0), "m": (4, 2, 0), "optimizer": sgd} | options))


def test_after_a_step_that_failed_a_stored_state_leads_on() -> None:
    data = batches()
    straight, failing = (DSP(modules(3), p=(1, 1, 0), m=(4, 2, 0), optimizer=sgd) for _ in range(2))
    for batch in data[:9]:
        straight.step(batch)
        failing.step(batch)
    kept = failing.state_dict()
    with pytest.raises(RuntimeError):
        failing.step((data[9][0][:, :2], data[9][1]))  # which the first layer does not take
    for again in (lambda: failing.step(data[9]), failing.flush):
        with pytest.raises(BadSetting, match="load_state_dict a state from before it"):
            again()
    failing.load_state_dict(kept)
    for batch in data[9:]:
        straight.step(batch)
        failing.step(batch)
    end, other = failing.state_dict(), straight.state_dict()
    assert end.keys() == other.keys()
    assert all(torch.equal(end[name], other[name]) for name in other)


def test_the_rate_multiplies_that_of_each_parameter_group() -> None:
    """A group with rate zero stays, and another keeps its share."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()

    def groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        weight, bias = parameters
        return torch.optim.SGD([{"params": [weight], "lr": 0.0}, {"params": [bias], "lr": 0.2}])

    before = [p.detach().clone() for p in layers.parameters()]
    dsp = DSP(layers, cuts=[1], optimizer=groups, rate=lambda n: 0.5)
    random = torch.Generator().manual_seed(1)
    dsp.step((torch.randn(6, 5, dtype=torch.float64, generator=random), torch.randint(0, 3, (6,), generator=random)))
    dsp.flush()
    after = dsp.model_state()
    assert torch.equal(after["0.weight"], before[0]) and torch.equal(after["1.weight"], before[2])
    assert not torch.equal(after["1.bias"], before[3])
    rates = {g["lr"] for block in dsp.engine.blocks for g in block.optimizer.param_groups}
    assert rates == {0.0, 0.1}
