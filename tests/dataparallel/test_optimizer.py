"""Compressed data-parallel optimisers: real gloo ranks against plainly written references, and the papers' identities."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import undrift
from tests.dataparallel.cases import (
    CASES,
    DECAY,
    LR,
    MOMENTUM,
    PARALLEL,
    SHARED,
    STEPS,
    gradient,
    learn,
    network,
    samples,
    vector,
)
from tests.reference import dp as plain
from undrift import cli
from undrift.compress import Exchanged, count_kept, make_compressor
from undrift.core.errors import BadRunFolder, BadSetting, UnknownName
from undrift.dataparallel.def_ import Detached, GroupRates
from undrift.dataparallel.workers import Ranks, SimulatedWorkers

ROOT = Path(__file__).parents[2]


SIZES = [p.numel() for p in network().parameters()]


Outcome = dict[int, list[dict[str, Any]]]  # what each rank saved, by the number of ranks


def alone_on_the_network() -> list[str]:
    """A prefix that gives a command a loopback device of its own, where the user may have one."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return []
    trial = subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True)
    return ["unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"] if trial.returncode == 0 else []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of pytest-xdist, so that the ranks are run once."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    place.mkdir(exist_ok=True)
    return place


@pytest.fixture(scope="module")
def on_ranks(folder: Path) -> Outcome:
    """What two, three and sixteen real processes made of the cases; the three go on from what the two leave."""
    prefix = alone_on_the_network()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            done = subprocess.run(
                [*prefix, sys.executable, "-m", "tests.dataparallel.cases", str(folder), "2", "3", "4", "16"],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=400,
            )
            assert done.returncode == 0, done.stderr
            (folder / "done").touch()
    found = {n: [torch.load(folder / f"{n}-{rank}.pt") for rank in range(n)] for n in (2, 3, 4, 16)}
    for each in found[2] if not prefix else []:  # other programs' bytes would be counted too
        each["socket"] = None
    return found


def mask_of(settings: dict[str, Any]) -> plain.Mask:
    ratio, seed = settings["ratio"], SHARED["seed"]
    block, compressor = settings.get("block", "flat"), settings.get("compressor", "rbgs")
    parts = SIZES if block == "tensor" else [sum(SIZES)]
    if block == "shuffle":
        return plain.shuffle_mask(sum(SIZES), ratio, seed)
    if compressor in ("topk", "leader"):
        return (plain.top_mask if compressor == "topk" else plain.leader_mask)(parts, ratio)
    return (plain.random_mask if compressor == "randk" else plain.block_mask)(parts, ratio, seed)


@functools.cache
def reference(case: str, workers: int) -> tuple[Tensor, Tensor]:
    """The paths of x and of the model that is returned under "def"."""
    name, settings = CASES[case]
    decay, momentum = settings.get("weight_decay", DECAY), settings.get("momentum", MOMENTUM)
    common = (
        vector(network()), functools.partial(gradient, decay=decay), mask_of(settings), workers, STEPS, LR, momentum
    )  # fmt: skip
    if name == "PSync":
        found = plain.csea(*common)
    elif name == "EF21":
        found = plain.ef21(*common)
    elif name == "EF21SGDM":
        found = plain.ef21_sgdm(*common)
    else:
        lam = {"EF": 0.0, "SAEF": 1.0}.get(name, settings.get("lam", "auto"))
        lam = 0.6 if lam == "auto" and settings.get("compressor") == "topk" else lam  # which is not measured
        found = plain.error_feedback(lam, *common)
    return torch.stack(found[0]), torch.stack(found[1])


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


@pytest.mark.parametrize(("case", "workers"), [(c, w) for w in (2, 3) for c in CASES] + [("def", 4), ("def", 16)])
def test_real_ranks_equal_the_reference(on_ranks: Outcome, case: str, workers: int) -> None:
    x, y = reference(case, workers)
    for each in on_ranks[workers]:
        assert torch.equal(each[case]["x"], on_ranks[workers][0][case]["x"]), "x has the same bits on all ranks"
        assert apart(each[case]["x"], x) < 1e-12
        assert apart(each[case]["y"], y) < 1e-12
    assert apart(x[-1], x[0]) > 0.01, "something was learnt"


@pytest.mark.parametrize("workers", [2, 3])
def test_nothing_dropped_is_sgd(on_ranks: Outcome, workers: int) -> None:
    path = torch.stack(plain.sgd(vector(network()), gradient, workers, STEPS, LR, MOMENTUM))
    for case in CASES:
        if case.endswith("whole"):
            for which in ("x", "y"):
                assert apart(on_ranks[workers][0][case][which], path) < 1e-12, case
        elif "ef21" not in case:
            assert apart(on_ranks[workers][0][case]["x"], path) > 1e-3, f"{case} drops something"


@pytest.mark.parametrize("workers", [2, 3])
def test_ef21_sgdm_is_damped_momentum_where_nothing_is_dropped_and_ef21_without_momentum(
    on_ranks: Outcome, workers: int
) -> None:
    path = torch.stack(plain.damped_sgd(vector(network()), gradient, workers, STEPS, LR, MOMENTUM))
    found = on_ranks[workers][0]
    assert apart(found["ef21 sgdm all"]["x"], path) < 1e-12
    assert apart(found["ef21 sgdm"]["x"], path) > 1e-3
    assert torch.equal(found["ef21 sgdm plain"]["x"], found["ef21 plain"]["x"])


@pytest.mark.parametrize("workers", [2, 3])
def test_lambda_joins_the_methods(on_ranks: Outcome, workers: int) -> None:
    for each in on_ranks[workers]:
        assert torch.equal(each["def 0"]["x"], each["ef"]["x"])
        for which in ("x", "y"):
            assert torch.equal(each["def 1"][which], each["saef"][which])
            assert torch.equal(each["def 1"][which], each["psync"][which])
        assert apart(each["def"]["x"], each["ef"]["x"]) > 1e-3
        assert apart(each["def"]["x"], each["saef"]["x"]) > 1e-3


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("case", ["def", "def auto", "def topk", "def leader", "def tensor", "ef", "saef"])
def test_the_virtual_sequence_follows_the_mean_momentum(on_ranks: Outcome, case: str, workers: int) -> None:
    """y_{t+1} = y_t - eta mean_k m_k, whatever is dropped."""
    momenta = sum(each[case]["m"] for each in on_ranks[workers]) / workers
    y = torch.cat([vector(network())[None], on_ranks[workers][0][case]["y"]])
    assert apart(y[1:], y[:-1] - LR * momenta) < 1e-13


@pytest.mark.parametrize("workers", [2, 3])
def test_the_error_identity(on_ranks: Outcome, workers: int) -> None:
    """mean e - lambda e_k = (1 - C)(eta (mean g - lambda g_k) + mean e - lambda e_k), without momentum."""
    lam, mask = 0.3, plain.block_mask([sum(SIZES)], 7, SHARED["seed"])
    ranks = [each["def plain sgd"] for each in on_ranks[workers]]
    for t in range(1, STEPS):
        e, before = [r["own"][t] for r in ranks], [r["own"][t - 1] for r in ranks]
        g = [r["m"][t] for r in ranks]  # with mu = 0 the momentum is the gradient
        for k in range(workers):
            inner = LR * (sum(g) / workers - lam * g[k]) + sum(before) / workers - lam * before[k]
            wanted = torch.where(mask(t, inner), 0.0, inner)
            assert torch.allclose(sum(e) / workers - lam * e[k], wanted, rtol=0, atol=1e-15)


def test_bytes_are_those_of_the_block(on_ranks: Outcome) -> None:
    b, d = count_kept(sum(SIZES), 7), sum(SIZES)
    for workers, ranks in on_ranks.items():
        each = 8 * 2 * b * (workers - 1)  # 8 bytes a number in float64: 16 b (W - 1) / W on each of W ranks
        assert ranks[0]["def"]["sent"].tolist() == [each] * STEPS
        if workers < 4:
            assert ranks[0]["def randk"]["sent"].tolist() == [each] * STEPS
            whole = 8 * 2 * d * (workers - 1)
            assert ranks[0]["ef21"]["sent"].tolist() == [whole] + [each] * (STEPS - 1)
            assert (
                ranks[0]["def leader"]["sent"].tolist() == [each + (workers - 1) * 4 * b] * STEPS
            )  # and the leader's places
            assert ranks[0]["def topk"]["sent"].tolist() == [workers * (workers - 1) * b * (8 + 4)] * STEPS


def test_bytes_on_the_socket(on_ranks: Outcome) -> None:
    if on_ranks[2][0]["socket"] is None:
        pytest.skip("only root may give the ranks a loopback device of their own")
    seen = on_ranks[2][0]["socket"]
    assert seen["counted"] == 20 * 8 * count_kept(seen["parameters"], 16)  # 8 b (W - 1) / W in float32, W ranks
    assert 1.0 <= seen["socket"] / seen["counted"] < 1.03


def test_ranks_that_disagree_are_told(on_ranks: Outcome) -> None:
    for each in on_ranks[2]:
        told = each["disagreements"]
        assert "disagree on seed: it is 0 on rank 0 and 1 on rank 1" in told["seed"]
        assert "disagree on ratio: it is 64 on rank 0 and 65 on rank 1" in told["ratio"]
        assert "disagree on lam: it is 0.3 on rank 0 and 0.4 on rank 1" in told["lam"]
        assert "0.weight [6, 5] torch.float64 on rank 0 and 0.weight [7, 5]" in told["model"]
        assert "disagree on the step to go on from: it is 1 on rank 0 and 2 on rank 1" in told["step"]
        assert "disagree on the step to go on from: it is 2 on rank 0 and 0 on rank 1" in told["loaded by one"]
    for each in on_ranks[3]:
        assert "holds a run of 2 workers, but torchrun started 3 processes" in each["other workers"]


def test_checkpoints(on_ranks: Outcome) -> None:
    for each in on_ranks[2]:
        assert len(each["resumed"]) == 9
        assert all(each["resumed"].values()), each["resumed"]
    for rank, each in enumerate(on_ranks[3]):
        other = each["other number"]
        assert apart(other["y"], other["wanted"]) < 1e-15
        assert torch.equal(other["x"], on_ranks[3][0]["other number"]["x"])
        assert len(other["told"]) == (rank == 0)
        assert rank or "made by 2 ranks, now there are 3" in other["told"][0]
        assert "made by 2 ranks and lacks e/rank1" in other["refusal"]


def test_a_lost_rank_is_noticed(on_ranks: Outcome) -> None:
    *others, last = (each["lost"] for each in on_ranks[3])
    assert last == "silent"
    for text in others:
        seconds, _, message = text.partition(" ")
        assert message.count("lost touch with the other 2") == 2, "at the start and in a step"
        assert float(seconds) < 30


def test_ddp_with_accumulation_equals_a_plain_module(on_ranks: Outcome) -> None:
    for name in ("x", "z", "e", "rates"):
        for each in on_ranks[2]:
            assert torch.equal(each["plain"][name], each["ddp"][name])
    first, second = on_ranks[2]
    assert torch.equal(first["ddp"]["x"], second["ddp"]["x"])
    assert not torch.equal(first["ddp"]["e"], second["ddp"]["e"]), "each rank has gradients of its own"
    assert first["ddp"]["rates"].tolist() == pytest.approx([0.05, 0.0125])


def test_ddp_inside_another_module_keeps_gradients_local(on_ranks: Outcome) -> None:
    for each in on_ranks[2]:
        assert apart(each["wrapped ddp"]["found"], each["wrapped ddp"]["own"]) < 1e-14


def test_half_precision(on_ranks: Outcome) -> None:
    first, second = on_ranks[2]
    assert first["scaled"]["skipped"] == second["scaled"]["skipped"] == [t == 3 for t in range(6)]
    assert torch.equal(first["scaled"]["x"], second["scaled"]["x"])
    assert first["scaled"]["finite"]
    for each in (first["narrow"], second["narrow"]):
        assert torch.equal(each["x"], first["narrow"]["x"]) and each["x"].dtype == torch.float32
        assert torch.equal(each["z"], (each["x"] - 0.3 * each["e"]).bfloat16().float())


def test_simulated_workers_equal_real_ranks(on_ranks: Outcome) -> None:
    """The same lines on vectors [W, d]: bit for bit with two workers."""
    for workers, ranks in on_ranks.items():
        for case in (
            ("def", "def tensor", "def topk", "def auto", "def auto leader", "saef") if workers < 4 else ("def",)
        ):
            settings = CASES[case][1]
            method = Detached({"saef": 1.0}.get(case, settings.get("lam", "auto")))
            made = make_compressor(
                settings.get("compressor", "rbgs"), settings.get("block", "flat"), 7, SHARED["seed"], SIZES
            )
            together = SimulatedWorkers(workers)
            state = method.start(vector(network()), together)
            z = state.x.expand(workers, -1).clone()
            for t in range(STEPS):
                g = torch.stack([gradient(t, k, z[k], 0.0) for k in range(workers)]).add_(z, alpha=DECAY)
                method.step(state, g, [GroupRates(slice(0, sum(SIZES)), LR, MOMENTUM)], t, made, together)
                method.point(state, z)
                seen, wanted = state.x, ranks[0][case]["x"][t]
                assert apart(seen, wanted) < 1e-12
                assert workers > 2 or torch.equal(seen, wanted), (case, t)
            assert together.sent == int(ranks[0][case]["sent"].sum())


def stored(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Any]]]:
    """A run folder's model, checkpoint and records."""
    checkpoint = max((folder / "checkpoint").glob("*.safetensors"))
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    records = [{k: v for k, v in line.items() if k not in ("seconds", "check")} for line in lines]
    return load_file(folder / "model.safetensors"), load_file(checkpoint), records


@pytest.mark.parametrize("workers", [2, 3, 4, 16])
def test_undrift_dp_on_real_ranks_equals_simulated_workers(
    on_ranks: Outcome, folder: Path, workers: int, tmp_path: Path
) -> None:
    """The ranks were stopped half way and resumed; the simulation is one run."""
    assert all(each["dp"] == 0 for each in on_ranks[workers])
    command = ["dp", *PARALLEL, "--workers", str(workers), "--rounds", "4", "--out", str(tmp_path / "one")]
    assert cli.main(command) == 0
    (model, state, records), (other, their_state, their_records) = (
        stored(tmp_path / "one"),
        stored(folder / f"dp{workers}"),
    )
    assert state.keys() == their_state.keys()
    assert {n for n in state if not n.startswith("best/")} == {"x", "m", "e", "products", "buffers"}
    for name, tensor in (model | state).items():
        theirs = (other | their_state)[name]
        assert tensor.shape == theirs.shape
        assert torch.equal(tensor, theirs) if workers == 2 else apart(tensor, theirs) < 1e-12, name
    assert len(records) == 4 and state["e"].shape[0] == workers and state["e"].norm() > 0
    for mine, theirs_ in zip(records, their_records, strict=True):
        assert mine.keys() == theirs_.keys()
        for name, value in mine.items():
            assert value == theirs_[name] or value == pytest.approx(theirs_[name], rel=1e-10), name
    d = sum(tensor.numel() for tensor in model.values())
    assert {r["bytes_up"] for r in records} == {
        5 * (8 * 2 + 4) * (workers - 1) * count_kept(d, 16)
    }  # and a leader's places
    assert records[-1]["accuracy"] == records[-1]["y_accuracy"] and records[0]["accuracy"] is None


@pytest.mark.parametrize(
    "settings", [{}, {"compressor": "topk"}, {"compressor": "randk"}, {"compressor": "rbgs", "block": "shuffle"}]
)
def test_one_worker_with_lambda_one_walks_the_sgd_path(settings: dict[str, Any]) -> None:
    """y is momentum SGD's path for any C, without a process group; and x_{t+1} = x_t + C(y_{t+1} - x_t)."""
    model, other = network(), network()
    optimizer = undrift.DEF(model, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, ratio=7, lam=1.0, **settings)
    sgd = torch.optim.SGD(other.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for t in range(STEPS):
        before = optimizer.vectors.x.clone()
        learn(model, optimizer, t, 0)
        learn(other, sgd, t, 0)
        with optimizer.evaluating("def"):
            y = vector(model)
        assert apart(y, vector(other)) < 1e-13
        moved = optimizer.vectors.x != before
        assert int(moved.sum()) in (9, 3 if settings.get("block") == "shuffle" else 9)  # ceil(57 / 7), and a last block
        assert torch.allclose(optimizer.vectors.x[moved], y[moved], rtol=0, atol=1e-14)
    with optimizer.evaluating("def-a"):
        assert torch.equal(vector(model), optimizer.vectors.x)


class Scaled:
    """C(v) = delta v."""

    def __init__(self, delta: float) -> None:
        self.delta = delta

    def exchange(self, p: Tensor, t: int, workers: Any, fill: Any, *_: Any) -> Exchanged:
        fill([slice(0, len(p))])
        c = self.delta * p
        p -= c
        return Exchanged([slice(0, len(c))], [workers.mean(c.clone())])


def test_one_worker_with_a_scaling_compressor_averages_iterates() -> None:
    """SGD-IA: x_t = (1 - delta)^t y_0 + sum_s delta (1 - delta)^{t - s} y_s, where y is SGD's path."""
    delta, alone, method = 0.25, Ranks(), Detached(1.0)
    state = method.start(vector(network()), alone)
    z = state.x.clone()
    y = [state.x.clone(), *plain.sgd(state.x.clone(), gradient, 1, STEPS, LR, 0.0)]
    for t in range(STEPS):
        method.step(state, gradient(t, 0, z), [GroupRates(slice(0, len(z)), LR, 0.0)], t, Scaled(delta), alone)
        method.point(state, z)
        weights = [(1 - delta) ** (t + 1)] + [delta * (1 - delta) ** (t + 1 - s) for s in range(1, t + 2)]
        assert apart(state.x, sum(w * v for w, v in zip(weights, y, strict=False))) < 1e-13


def test_averaged_errors_are_equal_and_keep_y() -> None:
    method, together = Detached(1.0, "x", average_every=4), SimulatedWorkers(3)
    state = method.start(vector(network()), together)
    made = make_compressor("rbgs", "flat", 7, 0, SIZES)
    z, momenta = state.x.expand(3, -1).clone(), torch.zeros(3, sum(SIZES), dtype=torch.float64)
    y = state.x.clone()
    for t in range(8):
        g = torch.stack([gradient(t, k, z[k]) for k in range(3)])
        momenta = MOMENTUM * momenta + g
        method.step(state, g, [GroupRates(slice(0, sum(SIZES)), LR, MOMENTUM)], t, made, together)
        method.point(state, z)
        y = y - LR * momenta.mean(0)
        assert apart(method.model(state, together, "y"), y) < 1e-13
        assert torch.equal(state.e[0], state.e[1]) == ((t + 1) % 4 == 0)


def test_lambda_auto_finds_the_common_part() -> None:
    """Workers that agree get lambda = 1; W workers with independent noise come near 1 / 2, half way to the best one's 1 / W."""
    d, workers = 20_000, 4
    made, method = make_compressor("rbgs", "flat", 5, 0, [d]), Detached("auto")
    for noise, wanted in ((0.0, 1.0), (1.0, 0.5 + 0.5 / workers), (0.5, None)):
        together = SimulatedWorkers(workers)
        state = method.start(torch.zeros(d), together)
        random = torch.Generator().manual_seed(0)
        for t in range(30):
            common = torch.randn(d, generator=random)
            g = (1 - noise) * common + noise * torch.randn(workers, d, generator=random)
            method.step(state, g, [GroupRates(slice(0, d), 0.1, 0.0)], t, made, together)
        lam = method.estimate(state)
        mean = state.e.mean(0)
        best = (state.e @ mean).unsqueeze(-1) / state.e.square().sum(-1, keepdim=True)  # of the whole errors
        assert torch.allclose(lam, (1 + best) / 2, atol=0.03)
        assert wanted is None or torch.allclose(lam, torch.full_like(lam, wanted), atol=0.03)
        assert torch.allclose(method.point(state, torch.empty_like(state.e)), state.x - lam * state.e, atol=1e-6)


def test_a_checkpoint_that_is_refused_changes_nothing() -> None:
    trained, fresh = (undrift.DEF(network(), lr=lr, momentum=0.9) for lr in (0.1, 0.2))
    state = trained.state_dict()
    state["state"] = {name: value for name, value in state["state"].items() if name != "m/rank0"} | {
        "x": state["state"]["x"] + 1
    }
    before = fresh.state_dict()
    with pytest.raises(BadRunFolder, match="lacks"):
        fresh.load_state_dict(state)
    after = fresh.state_dict()
    assert torch.equal(before["state"]["x"], after["state"]["x"])
    assert after["param_groups"][0]["lr"] == 0.2


def test_a_model_loaded_after_the_optimizer_counts() -> None:
    model = network()
    optimizer = undrift.DEF(model, lr=LR, lam=1.0, ratio=7)
    other = network(seed=5)
    model.load_state_dict(other.state_dict())
    assert torch.equal(optimizer.state_dict()["state"]["x"], vector(other))
    with optimizer.evaluating("def"):
        assert torch.equal(vector(model), vector(other))
    assert torch.equal(vector(model), vector(other))
    sgd = torch.optim.SGD(other.parameters(), lr=LR)
    learn(model, optimizer, 0, 0)
    learn(other, sgd, 0, 0)
    with optimizer.evaluating():
        assert apart(vector(model), vector(other)) < 1e-14


def test_frozen_and_unused_parameters_stay() -> None:
    model = nn.ModuleDict({"used": nn.Linear(5, 3), "idle": nn.Linear(5, 3), "frozen": nn.Linear(5, 3)}).double()
    model["frozen"].requires_grad_(False)
    before = {n: p.clone() for n, p in model.named_parameters()}
    optimizer = undrift.DEF(model, lr=LR, weight_decay=0.1, ratio=1)
    assert len(optimizer.vectors.x) == 36
    inputs, targets = samples(0, 0)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model["used"](inputs), targets).backward()
        optimizer.step()
    assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == {"used.weight", "used.bias"}


MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: undrift.DEF(network(), lr=0.1, lam=1.5), BadSetting, "lam must lie in [0, 1] or be 'auto', not 1.5"),
    (lambda: undrift.DEF(network(), lr=0.1, ratio=0.5), BadSetting, "ratio must be a number of at least 1"),
    (lambda: undrift.DEF(network(), lr=-1.0), BadSetting, "lr must be a number of at least 0"),
    (lambda: undrift.DEF(network(), lr=0.1, compressor="rgbs"), UnknownName, "did you mean 'rbgs'?"),
    (lambda: undrift.DEF(network(), lr=0.1, block="tensors"), UnknownName, "did you mean 'tensor'?"),
    (lambda: undrift.DEF(network(), lr=0.1, compressor="topk", block="shuffle"), BadSetting, "use flat or tensor"),
    (lambda: undrift.DEF([nn.Parameter(torch.ones(2, dtype=torch.cfloat))], lr=0.1), BadSetting, "is complex"),
    (lambda: undrift.EF(network(), lr=0.1).add_param_group({"params": [nn.Parameter(torch.ones(1))]}), BadSetting, "later"),
    (lambda: undrift.EF(network(), lr=0.1).load_state_dict(undrift.DEF(network(), lr=0.1).state_dict()), BadRunFolder, "DEF"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "message"), MISTAKES)
def test_mistakes_are_explained(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as told:
        make()
    assert message in str(told.value)


def test_weights_to_evaluate_are_named_and_not_trained() -> None:
    optimizer = undrift.DEF(network(), lr=0.1)
    with pytest.raises(UnknownName, match="did you mean 'def-a'"), optimizer.evaluating("defa"):
        pass
    with optimizer.evaluating(), pytest.raises(BadSetting, match="leave `with evaluating"):
        optimizer.step()
    with pytest.raises(ValueError), optimizer.evaluating("def"):
        raise ValueError
    optimizer.step()  # an error inside does not leave it in there


def test_the_optimizers_are_there_without_being_imported_first() -> None:
    module = "undrift.dataparallel.optimizer"
    code = f"import undrift, sys; assert {module!r} not in sys.modules; undrift.DEF; assert 'DEF' in undrift.__all__"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
