"""Methods for adapters: what a mean of B_i A_i is, and what becomes of it in each method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from tests.small import QUICK, adapted, path, simulation, tiny_mlp
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.ffa_lora import FFALoRA
from undrift.algorithms.rolora import RoLoRA
from undrift.core.errors import BadSetting
from undrift.core.layout import factor
from undrift.core.trees import nbytes
from undrift.jobs.registry import compose
from undrift.oracle.net import Net
from undrift.round import order
from undrift.simulate.simulation import Simulation

LR: dict[str, Any] = {"lr": 0.3}


def warm(seed: int = 0) -> nn.Module:
    """Adapters in the middle of a run: B is not zero any more."""
    module = adapted(seed)
    for name, p in module.named_parameters():
        if factor(name) == "B":
            nn.init.normal_(p, std=0.3)
    return module


def products(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """B A of each adapter."""
    pairs = {n: n.replace("lora_A", "lora_B") for n in tensors if factor(n) == "A"}
    return {a: tensors[b] @ tensors[a] for a, b in pairs.items()}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the clients of each round sent."""
    seen: list[Any] = []
    plain = order.reply_to

    def look(alg: Any, companion: Any, answers: Any, cohort: Any) -> Any:
        seen.append((answers, cohort))
        return plain(alg, companion, answers, cohort)

    monkeypatch.setattr(order, "reply_to", look)
    return seen


def whole(run: Simulation, x: Tensor) -> dict[str, Tensor]:
    """All tensors of the model with the vector x."""
    return run.net.state_dict(x, run.state.buffers)


def clients_after(run: Simulation, before: Tensor, answers: Any, cohort: Any) -> list[dict[str, Tensor]]:
    """The clients' models x_i^K."""
    alg, rows = run.alg, []
    for s in range(len(cohort.ids)):
        one = cohort._replace(weight=torch.ones(1, 1, dtype=torch.float64))
        up = type(answers.up)(*(v[s : s + 1] for v in answers.up))
        rows.append(whole(run, before - alg.gather(run.state.companion, up, one)[0]))
    return rows


def parted(alg: Any, answers: list[Any], rounds: int = 4, **settings: Any) -> list[float]:
    """How far, in each round, the server's product is from the mean of the clients', beside how far the round moved it."""
    run, found = simulation(alg, warm(), weights="size", **settings), []
    for t in range(rounds):
        before = run.state.x.clone()
        run.round()
        theirs = [products(each) for each in clients_after(run, before, *answers[t])]
        weight = answers[t][1].weight.flatten()
        off = moved = 0.0
        for name, now in products(whole(run, run.state.x)).items():
            mean = sum(w * each[name] for w, each in zip(weight, theirs, strict=True))
            assert isinstance(mean, Tensor)
            off += float((now - mean).norm())
            moved += float((now - products(whole(run, before))[name]).norm())
        found.append(off / moved)
    return found


@pytest.mark.parametrize("execution", ["stacked", "pool"])
def test_the_mean_of_products_is_the_product_of_the_server(execution: str, answers: list[Any]) -> None:
    for alg in (FFALoRA(**LR), RoLoRA(**LR)):
        answers.clear()
        assert max(parted(alg, answers, execution=execution)) < 1e-12


def test_plain_averages_are_off_by_the_covariance_of_the_factors(answers: list[Any]) -> None:
    """mean(B_i A_i) - mean(B_i) mean(A_i) = mean((B_i - mean B)(A_i - mean A)); with one client, or one A, it is nothing."""
    assert min(parted(FedAvg(**LR), answers)) > 1e-3
    run = simulation(FedAvg(**LR), warm())
    answers.clear()
    before = run.state.x.clone()
    run.round()
    theirs, now = clients_after(run, before, *answers[0]), whole(run, run.state.x)
    for name, product in products(now).items():
        b = name.replace("lora_A", "lora_B")
        each = [products(one)[name] for one in theirs]
        spread = [(one[b] - now[b]) @ (one[name] - now[name]) for one in theirs]
        torch.testing.assert_close(torch.stack(each).mean(0) - product, torch.stack(spread).mean(0))
    answers.clear()
    assert max(parted(FedAvg(**LR), answers, cohort=1)) < 1e-12
    frozen = warm()
    for name, p in frozen.named_parameters():
        p.requires_grad_(p.requires_grad and factor(name) != "A")
    run, answers[:] = simulation(FedAvg(**LR), frozen), []
    before = run.state.x.clone()
    run.round()
    theirs = [products(each) for each in clients_after(run, before, *answers[0])]
    for name, product in products(whole(run, run.state.x)).items():
        torch.testing.assert_close(torch.stack([each[name] for each in theirs]).mean(0), product)


def test_ffa_lora_is_fedavg_under_a_frozen_a_bit_for_bit() -> None:
    frozen = warm()
    for name, p in frozen.named_parameters():
        p.requires_grad_(p.requires_grad and factor(name) != "A")
    assert torch.equal(path(simulation(FFALoRA(**LR), warm()), 4), path(simulation(FedAvg(**LR), frozen), 4))
    moving = simulation(FedAvg(**LR), warm())
    assert moving.net.layout.entries > simulation(FFALoRA(**LR), warm()).net.layout.entries


def test_the_given_module_stays_trainable() -> None:
    module = warm()
    simulation(FFALoRA(**LR), module).round()
    assert sum(p.requires_grad for p in module.parameters()) == 6  # two A, two B, and the head's two


def test_rolora_is_ffa_lora_in_its_first_round_and_moves_a_in_its_second() -> None:
    ours, other = simulation(RoLoRA(**LR), warm()), simulation(FFALoRA(**LR), warm())
    start = whole(ours, ours.state.x)
    for turn, (moving, still) in enumerate(("BA", "AB", "BA")):
        before = whole(ours, ours.state.x)
        ours.round()
        now = whole(ours, ours.state.x)
        for name in now:
            same = torch.equal(now[name], before[name])
            assert same == (factor(name) == still or "base_layer" in name), (turn, name, moving)
        if turn == 0:
            other.round()
            theirs = whole(other, other.state.x)
            for name in now:
                torch.testing.assert_close(now[name], theirs[name], rtol=1e-14, atol=1e-14)
    assert start.keys() == whole(ours, ours.state.x).keys()


def test_a_fresh_adapter_has_no_gradient_in_a() -> None:
    """Why B is first: under B = 0 a round on A changes nothing."""
    run = simulation(RoLoRA(**LR), adapted())
    run.whole = run.alg = RoLoRA(**LR, phase=1)
    before = whole(run, run.state.x)
    object.__setattr__(run, "enter", lambda: 1)
    run.round()
    now = whole(run, run.state.x)
    assert all(torch.equal(now[name], before[name]) for name in now if factor(name))


def test_bytes_are_those_of_what_moves() -> None:
    a, b, head = (2 * 5 + 2 * 4), (4 * 2 + 4 * 2), (4 * 3 + 3)
    ours, frozen, plain = (simulation(kind(**LR), warm(), cohort=2) for kind in (RoLoRA, FFALoRA, FedAvg))
    records = [ours.round() for _ in range(2)]
    assert [r.bytes_up for r in records] == [2 * 8 * (b + head), 2 * 8 * (a + head)]
    assert [r.bytes_down for r in records] == [2 * 8 * (a + b + head)] * 2
    record = frozen.round()
    assert (record.bytes_down, record.bytes_up) == (2 * 8 * (b + head),) * 2
    assert (
        plain.round().bytes_up
        == 2 * 8 * (a + b + head)
        == 2 * nbytes(plain.net.without_padding(plain.state.x, "model"))
    )


def test_a_model_without_adapters_is_refused_in_one_line() -> None:
    bare = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    for alg in (FFALoRA(), RoLoRA()):
        with pytest.raises(BadSetting, match="has no tensors lora_A and lora_B; give --lora r=8"):
            simulation(alg, bare).round()
    assert len(Net(tiny_mlp(), trains=FFALoRA().trains).layout.names) == 2


def test_what_would_move_the_fixed_factor_is_refused() -> None:
    """An error that compression keeps for later would move A in a round of B; a momentum of both goes with it, as asked."""
    for spec in ("topk:4", "int8", "fp16"):
        with pytest.raises(BadSetting, match="changes what it sends in its second phase; leave compress out"):
            simulation(RoLoRA(**LR), warm(), compress=spec)
        simulation(FFALoRA(**LR), warm(), compress=spec).round()
    with pytest.raises(BadSetting, match="own updates"):
        simulation(compose("rolora", "gradma-s")(**LR), warm())
    assert path(simulation(compose("ffa-lora", "gradma-s")(**LR), warm()), 2).isfinite().all()


def test_noise_for_privacy_is_on_b_alone() -> None:
    private: dict[str, Any] = {
        "privacy_clip": 1.0,
        "privacy_noise": 1.0,
        "sampling": "bernoulli",
        "clients": 8,
        "cohort": 4,
    }
    settings = QUICK | private | {"rounds": 2, "model": "tests.small:adapted_logreg"}
    noisy = undrift.run(settings, algorithm="ffa-lora").model
    start = undrift.run(
        QUICK | {"rounds": 1, "model": "tests.small:adapted_logreg"}, algorithm="ffa-lora", lr=1e-30
    ).model
    same = {name for name in start if torch.equal(start[name], noisy[name])}
    assert same == {name for name in start if factor(name) != "B"} and len(same) < len(start)
    with pytest.raises(BadSetting, match="RoLoRA cannot be made private: its clients send more than their update"):
        undrift.run(settings, algorithm="rolora")


@pytest.mark.parametrize("kind", [FFALoRA, RoLoRA])
def test_both_learn(kind: Any) -> None:
    run = simulation(kind(), adapted(), cohort=6)
    losses = [run.round().train_loss for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
