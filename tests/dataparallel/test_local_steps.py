"""Islands in a loop of one's own: on two real ranks they are the simulator's clients, for every kind of method."""

from __future__ import annotations

import copy
import os
import signal
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import undrift
from tests.dataparallel.cases import refused, vector
from tests.small import federation, path, simulation
from undrift.core.errors import BadSetting, LostRank, UndriftError, UnknownName
from undrift.core.names import names
from undrift.dataparallel.local_steps import LocalSteps
from undrift.jobs.registry import algorithm_class

SIZES, EVERY, ROUNDS = (20, 20), 4, 3
Case = tuple[dict[str, Any], dict[str, Any]]  # what `set` and the simulator have, and the simulator's local optimizer
SGD: dict[str, Any] = {}
HEAVY: dict[str, Any] = dict(optimizer="momentum", momentum=0.6)
ADAMW: dict[str, Any] = dict(optimizer="adamw", momentum=0.8, momentum2=0.95, epsilon=1e-3, weight_decay=0.1)
CASES: dict[str, Case] = {
    "diloco": (dict(lr=0.05), ADAMW),
    "fedavg": (dict(lr=0.1), SGD),
    "fedavgm": (dict(lr=0.1, beta1=0.7, nesterov=True), HEAVY),
    "fedprox": (dict(lr=0.1, mu=0.5), ADAMW),
    "scaffold": (dict(lr=0.1), SGD),
    "fedcm": (dict(lr=0.1, alpha=0.3), SGD),
    "fedmim": (dict(lr=0.1), HEAVY),
    "feddyn": (dict(lr=0.1), SGD),
    "domo": (dict(lr=0.1), HEAVY),
    "domo-s": (dict(lr=0.1), HEAVY),
    "gradma-s": (dict(lr=0.1, slots=2), SGD),
    "fedadam": (dict(lr=0.1), SGD),
    "fedavg norm": (dict(lr=0.1), SGD),
    "fedavg topk:5": (dict(lr=0.1), SGD),
    "fedavg rbgs:5": (dict(lr=0.1), SGD),
    "scaffold randk:3": (dict(lr=0.1), SGD),
    "fedavgm fp16": (dict(lr=0.1), HEAVY),
    "diloco int8": (dict(lr=0.05), ADAMW),
    "scaffold int4": (dict(lr=0.1), SGD),
    "streaming-diloco": (dict(lr=0.05, fragments=2, delay=1, alpha=0.3), ADAMW),
    "sparseloco": (dict(lr=0.05, ratio=3.0, chunk=16), ADAMW),
    "streaming-diloco at once": (dict(lr=0.05, fragments=3, delay=0, alpha=0.0), ADAMW),
}


def rounds(name: str) -> int:
    """So many that every fragment has been exchanged twice."""
    return max(ROUNDS, 2 * int(CASES[name][0].get("fragments", 1)))


def compression(name: str) -> str:
    return next((word for word in name.split()[1:] if ":" in word or word[-1].isdigit()), "")


def network(normed: bool = False) -> nn.Module:
    torch.manual_seed(4)
    middle: list[nn.Module] = [nn.BatchNorm1d(4)] if normed else []
    return nn.Sequential(nn.Linear(5, 4), *middle, nn.Tanh(), nn.Linear(4, 3)).double()


def samples(rank: int) -> tuple[Tensor, Tensor]:
    fed = federation(SIZES)
    ids = fed.members[fed.start[rank] : fed.start[rank] + fed.sizes[rank]]
    return fed.train.take(ids).double(), fed.train.targets[ids]


def local_optimizer(model: nn.Module, lr: float, how: dict[str, Any]) -> torch.optim.Optimizer:
    if how.get("optimizer") == "adamw":
        betas = (how["momentum"], how["momentum2"])
        return torch.optim.AdamW(model.parameters(), lr, betas, how["epsilon"], how["weight_decay"])
    return torch.optim.SGD(model.parameters(), lr, momentum=how.get("momentum", 0.0))


def fresh(name: str) -> bool:
    return name.startswith("domo")


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer, LocalSteps]:
    given, how = CASES[name]
    model = network("norm" in name)
    optimizer = local_optimizer(model, given["lr"], how)
    clears = {"optimizer": optimizer} if fresh(name) else {}
    every = EVERY * int(given.get("fragments", 1))
    how_sent: dict[str, Any] = {"compress": compression(name)} | clears
    return model, optimizer, undrift.LocalSteps(model, name.split()[0], every, given, **how_sent)


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, outer: LocalSteps, rank: int, correct: bool = True
) -> bool:
    inputs, targets = samples(rank)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    if correct:
        outer.correct()
    optimizer.step()
    return outer.step()


def walk(name: str, rank: int) -> dict[str, Any]:
    """The server's model after each round, and that of the module itself."""
    model, optimizer, outer = made(name)
    points, told = [], []
    for _ in range(rounds(name) * EVERY + outer.alg.late):
        told.append(learn(model, optimizer, outer, rank, correct=not outer.plain or rank == 0))
        if told[-1]:
            with outer.evaluating():
                points.append(vector(model))
    with outer.evaluating():
        statistics = [b.clone() for b in model.buffers()]
    return {"points": torch.stack(points), "told": told, "statistics": statistics, "sent": outer.sent}


def resumed(rank: int, folder: Path) -> dict[str, Any]:
    """From a checkpoint in the middle of a round, and right after one, against never having stopped."""
    found = {}
    for name in ("scaffold", "fedmim", "diloco", "scaffold int4", "streaming-diloco"):
        for stop in (EVERY + 2, 2 * EVERY, 2 * EVERY + 1):  # a fragment is under way after 2 * EVERY steps
            model, optimizer, outer = made(name)
            for _ in range(stop):
                learn(model, optimizer, outer, rank)
            whole, own = outer.whole_state_dict(), copy.deepcopy(optimizer.state_dict())
            if rank == 0:
                torch.save(whole, folder / f"{name}-{stop}.pt")
            other, again, going = made(name)
            nn.utils.vector_to_parameters(torch.zeros_like(vector(other)), other.parameters())
            going.load_state_dict(whole)
            again.load_state_dict(own)
            for _ in range(EVERY):
                learn(model, optimizer, outer, rank)
                learn(other, again, going, rank)
            with outer.evaluating(), going.evaluating():
                served = torch.equal(vector(model), vector(other))
            found[f"{name} {stop}"] = served and torch.equal(vector(model), vector(other)) and bool(vector(other).any())
    return found


def spoilt(rank: int) -> dict[str, Any]:
    """An island that is not finite is left out of a round."""
    model, optimizer, outer = made("fedavg")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for k in range(EVERY):
            if rank == 1 and k == EVERY - 1:
                next(model.parameters()).data.fill_(float("nan"))
            learn(model, optimizer, outer, rank)
        island = made("streaming-diloco")
        for k in range(2 * EVERY + 2):
            if rank == 1 and k == EVERY - 1:
                next(island[0].parameters()).data.fill_(float("nan"))
                island[1].state.clear()
            learn(*island, rank)
            if rank == 1 and k == EVERY:  # its moments are not finite either
                island[1].state.clear()
    late = {"streaming": vector(island[0]), "rounds": island[2].rounds}
    return {"x": vector(model), "told": [str(w.message) for w in told]} | late


def wrapped_later(rank: int) -> bool:
    """A framework's DDP around the model changes nothing: each island's gradients are its own."""
    model, optimizer, outer = made("diloco")
    ddp = DistributedDataParallel(model)
    points = []
    for _ in range(ROUNDS * EVERY):
        inputs, targets = samples(rank)
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
        if outer.step():
            points.append(vector(model))
    return torch.equal(torch.stack(points), walk("diloco", rank)["points"])


def disagreements(rank: int) -> dict[str, str]:
    model = network()
    return {
        "every": refused(lambda: LocalSteps(model, "fedavg", every=3 + rank)),
        "lr": refused(lambda: LocalSteps(model, "scaffold", set={"lr": 0.1 + rank})),
        "ddp": refused(lambda: LocalSteps(DistributedDataParallel(network()), "fedavg")),
    }


def on_rank(rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    signal.alarm(120)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found: dict[str, Any] = {name: walk(name, rank) for name in CASES}
    found |= {"resumed": resumed(rank, folder), "spoilt": spoilt(rank), "disagreements": disagreements(rank)}
    found["wrapped"] = wrapped_later(rank)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("islands")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(on_rank, (place, port), nprocs=2)
    return place


@pytest.fixture(scope="module")
def on_ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_islands_are_two_clients(name: str, on_ranks: list[dict[str, Any]]) -> None:
    given, how = CASES[name]
    keeps = {"keep_moments": True} if how and not fresh(name) else {}
    alg = algorithm_class(name.split()[0])(**(given | how | keeps))
    sent = compression(name)
    run = simulation(alg, network("norm" in name), federation(SIZES), cohort=2, steps=EVERY, batch=20, compress=sent)
    expected = path(run, rounds(name))
    start = vector(network("norm" in name))
    assert (expected[0] - start).norm() > 1e-2 * start.norm()
    for found in on_ranks:
        mine = found[name]
        late = run.alg.late
        assert mine["told"] == [False] * late + ([False] * (EVERY - 1) + [True]) * rounds(name)
        assert (mine["points"] - expected).norm() < 1e-10 * expected.norm()
        if "norm" in name:
            statistics = torch.cat([b.flatten().double() for b in mine["statistics"]])
            torch.testing.assert_close(statistics, run.state.buffers, rtol=1e-10, atol=1e-12)


def test_bytes_are_those_of_a_mean_or_of_all_answers(on_ranks: list[dict[str, Any]]) -> None:
    """Two islands in float64: a mean takes 2 vectors of 40 numbers from both together, and so do all rows."""
    for found in on_ranks:
        assert found["fedavg"]["sent"] == found["gradma-s"]["sent"] == ROUNDS * (2 * 40 * 8 + 2 * 8)
        assert found["scaffold"]["sent"] == ROUNDS * (2 * 2 * 40 * 8 + 2 * 8)


def test_compressed_bytes_are_those_of_what_travels(on_ranks: list[dict[str, Any]]) -> None:
    """Of 39 numbers; block and scattered entries that both draw are a mean, the others' own ones go to all."""
    flag = 2 * 8
    for name, each in (
        ("fedavg topk:5", 8 * (8 + 4)),
        ("fedavg rbgs:5", 8 * 8),
        ("scaffold randk:3", 2 * 13 * 8),
        ("fedavgm fp16", 39 * 2),
        ("diloco int8", 39 + 4),
        ("scaffold int4", 2 * (20 + 4)),
        ("sparseloco", 3 * (6 * 2 + 2 + 4 * 8)),
    ):
        assert {found[name]["sent"] for found in on_ranks} == {ROUNDS * (2 * each + flag)}, name
    for name, each, times in (("streaming-diloco", 20 * 8, 4), ("streaming-diloco at once", 14 * 8, 6)):
        assert {found[name]["sent"] for found in on_ranks} == {times * (2 * each + flag)}, name


def test_checkpoints_in_and_after_a_round(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        assert len(found["resumed"]) == 15 and all(found["resumed"].values()), found["resumed"]


def test_another_number_of_islands_goes_on_after_an_exchange(folder: Path, on_ranks: list[dict[str, Any]]) -> None:
    for name in ("scaffold", "diloco"):
        with_one = made(name)
        stored = torch.load(folder / f"{name}-{2 * EVERY}.pt")
        warned = (
            pytest.warns(UserWarning, match="made by 2 islands, now there are 1")
            if name == "scaffold"
            else warnings.catch_warnings()
        )
        with warned:
            with_one[2].load_state_dict(stored)
        expected = on_ranks[0][name]["points"][1]
        assert torch.equal(vector(with_one[0]), expected)
        assert learn(*with_one, 0) is False
        with pytest.raises(UndriftError, match="2 steps after an exchange, and their models differ.*save right after"):
            with_one[2].load_state_dict(torch.load(folder / f"{name}-{EVERY + 2}.pt"))
    with pytest.raises(UndriftError, match="is of Scaffold with every=4, not of DiLoCo with every=4"):
        made("diloco")[2].load_state_dict(torch.load(folder / f"scaffold-{2 * EVERY}.pt"))
    with pytest.raises(UndriftError, match="with every=4 and compress=int4, not of Scaffold with every=4"):
        made("scaffold")[2].load_state_dict(torch.load(folder / f"scaffold int4-{2 * EVERY}.pt"))
    streaming = made("streaming-diloco")
    with pytest.raises(UndriftError, match="2 islands while an exchange was under way, and their models differ"):
        streaming[2].load_state_dict(torch.load(folder / f"streaming-diloco-{2 * EVERY}.pt"))
    with pytest.warns(UserWarning, match="each begins anew"):
        streaming[2].load_state_dict(torch.load(folder / f"streaming-diloco-{2 * EVERY + 1}.pt"))
    assert torch.equal(vector(streaming[0]), on_ranks[0]["streaming-diloco"]["points"][1])
    assert learn(*streaming, 0) is False


def test_a_ddp_that_comes_later_averages_no_gradients(on_ranks: list[dict[str, Any]]) -> None:
    assert all(found["wrapped"] for found in on_ranks)


def test_an_island_that_is_not_finite_is_left_out(on_ranks: list[dict[str, Any]]) -> None:
    """The other one's model is the mean."""
    assert torch.equal(on_ranks[0]["spoilt"]["x"], on_ranks[1]["spoilt"]["x"])
    model, inputs, targets = network(), *samples(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(EVERY):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    assert (on_ranks[0]["spoilt"]["x"] - vector(model)).norm() < 1e-12
    assert on_ranks[0]["spoilt"]["told"] == []
    told = on_ranks[1]["spoilt"]["told"]
    assert len(told) == 2 and all("what island 1 has trained is not finite and was left out" in line for line in told)
    for found in on_ranks:  # a fragment's too: the island begins from the server's model
        assert found["spoilt"]["rounds"] == 2 and found["spoilt"]["streaming"].isfinite().all()


def test_islands_that_disagree_are_told(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        told = found["disagreements"]
        assert "disagree on every: it is 3 on rank 0 and 4 on rank 1" in told["every"]
        assert "disagree on lr: it is 0.1 on rank 0 and 1.1 on rank 1" in told["lr"]
        assert "give LocalSteps the model without DDP" in told["ddp"]


def left_alone(rank: int, folder: Path, port: int) -> None:
    """Rank 1 ends in the second round; rank 0 is told at the next exchange, which for fragments is under way."""
    torch.set_num_threads(1)
    signal.alarm(120)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    islands = [made("diloco"), made("streaming-diloco")]
    told = []
    for number in range(3 * EVERY):
        if rank == 1 and number == EVERY + 2:
            os._exit(0)
        for island in list(islands):
            try:
                learn(*island, rank)
            except LostRank as error:
                told.append(str(error))
                islands.remove(island)
    (folder / "told").write_text("\n".join(told))


def test_a_lost_rank_is_told_at_the_next_exchange(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(left_alone, (tmp_path, port), nprocs=2)
    told = (tmp_path / "told").read_text().splitlines()
    assert len(told) == 2 and all("rank 0 lost touch with the other 1" in line for line in told)


def test_muloco_is_diloco_around_torchs_muon() -> None:
    """Muon on matrices and AdamW on the rest, against plain loops with torch.optim.SGD's Nesterov as the outer optimizer."""

    def inner(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) == many] for many in (True, False))
        return [torch.optim.Muon(matrices, 0.02, momentum=0.9), torch.optim.AdamW(rest, 0.01)]

    ours, plain = network(), network()
    outer = LocalSteps(ours, "diloco", every=EVERY, set={"server_lr": 0.7, "beta1": 0.9})
    optimizers, theirs = inner(ours), inner(plain)
    x = [nn.Parameter(p.detach().clone()) for p in plain.parameters()]
    nesterov = torch.optim.SGD(x, 0.7, momentum=0.9, nesterov=True)
    inputs, targets = samples(0)
    for number in range(ROUNDS * EVERY):
        for model, steps in ((ours, optimizers), (plain, theirs)):
            model.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            for optimizer in steps:
                optimizer.step()
        if number % EVERY == EVERY - 1:
            for start, p in zip(x, plain.parameters(), strict=True):
                start.grad = start.detach() - p.detach()
            nesterov.step()
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(x), plain.parameters())
        assert outer.step() == (number % EVERY == EVERY - 1)
    assert (vector(ours) - vector(plain)).norm() < 1e-10 * vector(plain).norm()
    assert (vector(ours) - vector(network())).norm() > 1e-2


def test_mistakes_are_explained() -> None:
    model = network()
    for given, why in (
        (dict(every=0), "every must be a whole number of at least 1, not 0"),
        (dict(every=2.5), "every must be a whole number of at least 1, not 2.5"),
        (dict(every="10"), "every must be a whole number of at least 1, not '10'"),
        (dict(set={"server_lr": "big"}), "server_lr must be float, not 'big'"),
        (dict(set=[("server_lr", 1.0)]), "set takes a dict of fields"),
        (dict(algorithm="fedsam"), "has one gradient a step"),  # before anything is trained
        (dict(set={"weight_decay": 0.1}), "weight_decay belongs to your optimizer"),
        (dict(algorithm="scaffold"), "divides by the rate: give that of your optimizer"),
        (dict(algorithm="domo", set={"lr": 0.1}), "begins each round without momentum: give LocalSteps optimizer="),
        (dict(algorithm="mime"), "mime has a first exchange"),
        (dict(algorithm="fedsm"), "trains more than one model"),
        (dict(compress="int3"), "unknown value of compress"),
        (dict(compress="topk"), "compress takes rbgs:R"),
        (dict(algorithm="gradma-s", compress="int4"), "looks at each client's upload by itself"),
        (dict(algorithm="streaming-diloco", compress="int4"), "only a part of the model's entries by itself"),
        (dict(algorithm="streaming-diloco", every=10), "a multiple of the 4 fragments .*: 8 or 12, not 10"),
        (dict(algorithm="streaming-diloco", every=8, set={"delay": 2}), "more than the 2 steps of delay"),
        (
            dict(algorithm="scaffold", set={"lr": 0.1}, optimizer=torch.optim.SGD(model.parameters(), 0.2)),
            "which is 0.1 in set and 0.2 in the optimizer",
        ),
    ):
        with pytest.raises(UndriftError, match=why):
            LocalSteps(model, **given)  # type: ignore[arg-type]
    with pytest.raises(BadSetting, match="needs the model, an nn.Module, not a list"):
        LocalSteps(list(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="beta1"):
        LocalSteps(model, set={"beta": 0.1})
    model, optimizer, outer = made("scaffold")
    with pytest.raises(BadSetting, match="call correct\\(\\) between backward\\(\\) and optimizer.step"):
        learn(model, optimizer, outer, 0, correct=False)
    outer.correct()
    with pytest.raises(BadSetting, match="correct\\(\\) is called twice"):
        outer.correct()
    with outer.evaluating(), pytest.raises(BadSetting, match="would train the model to evaluate"):
        outer.step()
    with outer.evaluating(), pytest.raises(BadSetting, match="already"), outer.evaluating():
        pass


@pytest.mark.parametrize("name", names("algorithms"))
def test_every_method_runs_or_says_why_not(name: str) -> None:
    """One island alone; what cannot be done in a loop of one's own is refused before or in the first step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.6)
    start = vector(model)
    refusal = ""
    try:
        outer = LocalSteps(model, name, every=algorithm_class(name)().turns * 2, set={"lr": 0.05}, optimizer=optimizer)
        for _ in range(5):
            learn(model, optimizer, outer, 0)
    except BadSetting as error:
        refusal = str(error)
    reasons = ("one gradient a step", "which LocalSteps has not", "which your optimizer has")
    assert name not in CASES or not refusal
    assert any(why in refusal for why in reasons) if refusal else (vector(model) - start).norm() > 1e-3
    assert refusal or vector(model).isfinite().all()
