"""Runs packed into one program equal the same runs alone, and a sweep packs what it can."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests import small
from undrift import cli
from undrift.core import stopping
from undrift.core.errors import BadSetting
from undrift.core.names import names
from undrift.core.seals import write_sealed
from undrift.data.federation import Federation, federate
from undrift.jobs import packs
from undrift.jobs.config import RunConfig, from_mapping
from undrift.jobs.course import Progress
from undrift.jobs.folder import RunFolder
from undrift.jobs.registry import algorithm_class
from undrift.jobs.run import run
from undrift.jobs.sweep import Job, _programs, _run_program, plan
from undrift.round.record import RoundRecord
from undrift.simulate.packed import Pack, structure, varying
from undrift.simulate.program import Program
from undrift.simulate.simulation import Simulation

RUNS = 3  # and not as many as there are clients in a cohort, so that no dimension can be taken for another
STRUCTURE: dict[str, dict[str, Any]] = {
    "gradma-s": {"slots": 5},
    "gradma": {"slots": 5},
    "fedmim": {"alpha": (0.5, 0.2)},
}
VALUES = {"lr": 0.2, "weight_decay": 0.01, "server_lr": 0.9, "clip": 2.0}


def federations() -> list[Federation]:
    """The same samples dealt out under other seeds."""
    data = small.data()
    dealt = [federate(data, "dirichlet:0.5", 6, seed, small.CPU) for seed in range(RUNS)]
    return [dataclasses.replace(each, train=dealt[0].train, test=dealt[0].test) for each in dealt]


def algorithms(name: str, **fields: Any) -> list[Any]:
    """One a run, different in every real field that may differ."""
    kind = algorithm_class(name)
    start = kind(**{n: v for n, v in VALUES.items() if n in {f.name for f in dataclasses.fields(kind)}} | fields)
    made = []
    for r in range(RUNS):
        less = 1 - 0.1 * r
        other: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            value = getattr(start, field.name)
            if field.name in varying(start):
                several = isinstance(value, tuple)
                other[field.name] = tuple(v * less for v in value) if several else value * less
        made.append(dataclasses.replace(start, **other))
    assert len({structure(alg) for alg in made}) == 1
    return made


Make = Callable[[], list[Simulation]]


def maker(algs: list[Any], module: Callable[[int], nn.Module] = small.tiny_mlp, **settings: Any) -> Make:
    def make() -> list[Simulation]:
        each = enumerate(zip(algs, federations(), strict=True))
        return [small.simulation(a, module(r), fed, seed=r, cohort=4, **settings) for r, (a, fed) in each]

    return make


def both(make: Make, rounds: int) -> list[tuple[Simulation, list[RoundRecord], Simulation, list[RoundRecord]]]:
    """Every run alone, and all of them packed."""
    alone, packed = make(), make()
    pack = Pack(packed)
    records: list[list[RoundRecord]] = [[] for _ in packed]
    while pack.runs[0].t < rounds:
        made = pack.scored_rounds(rounds - pack.runs[0].t, last=True)
        for mine, more in zip(records, made, strict=True):
            assert more, "a run left the pack"
            mine += more
    assert pack.program is not None and pack.program.graphs, "nothing was packed"
    assert pack.program.state.x.shape[0] == RUNS
    plain = [[run.round(last=n + 1 == rounds) for n in range(rounds)] for run in alone]
    assert not torch.allclose(alone[0].state.x, alone[1].state.x, rtol=1e-3), "the runs must not be alike"
    return list(zip(alone, plain, packed, records, strict=True))


def agree(plain: Simulation, one: list[RoundRecord], packed: Simulation, two: list[RoundRecord]) -> float:
    """The largest difference between the two runs' tensors."""
    mine, other = plain.tensors(), packed.tensors()
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    for a, b in zip(one, two, strict=True):
        expected, found = ({n: v for n, v in r.as_dict().items() if n != "seconds"} for r in (a, b))
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            same = value if value is None else pytest.approx(value, rel=1e-8, abs=1e-11, nan_ok=True)
            assert found[name] == same, name
    return max(float((other[n].double() - t.double()).abs().max()) for n, t in mine.items() if t.numel())


APART = small.ADAPTERS  # choose what is trained
PACKABLE = [
    n for n in names("algorithms") if not (algorithm_class(n).personalises or algorithm_class(n).pools or n in APART)
]


@pytest.mark.parametrize("name", sorted({*names("algorithms")} - {*PACKABLE}))
def test_a_personal_method_is_not_packed(name: str, tmp_path: Path) -> None:
    assert packs.kind(RunConfig(algorithm=name), RunFolder(tmp_path)) is None


@pytest.mark.parametrize("name", PACKABLE)
def test_packed_runs_equal_the_same_runs_alone(name: str) -> None:
    make = maker(algorithms(name, **STRUCTURE.get(name, {})), eval_every=4)
    for pair in both(make, 6):
        agree(*pair)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "gradma-s", "gradma", "fedmim", "mime"])
@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 1.5, "lr_decay": 0.9},
        {"sampling": "bernoulli"},
        {"dropout_rate": 0.5, "weights": "size"},
        {"slow": (0.5, 0.4), "weights": "size", "lr_decay": 0.9},
        {"steps": 20},
        {"aggregate": "bound:0.1", "dropout_rate": 0.5},
    ],
    ids=str,
)
def test_ragged_rounds(name: str, settings: dict[str, Any]) -> None:
    slots = {"slots": 6} if "gradma" in name else {}
    for pair in both(maker(algorithms(name, **slots), eval_every=5, **settings), 5):
        agree(*pair)


@pytest.mark.filterwarnings("ignore:.* answers to keep its promise")
@pytest.mark.parametrize("rule", ["median", "trimmed:0.3", "krum:0:2", "geometric", "clip:0.5"])
def test_rules_do_not_mix_runs(rule: str, tmp_path: Path) -> None:
    for pair in both(maker(algorithms("mime"), eval_every=5, aggregate=rule, dropout_rate=0.3, weights="size"), 4):
        agree(*pair)
    assert packs.kind(RunConfig(aggregate=rule), RunFolder(tmp_path)) is not None
    assert packs.kind(RunConfig(attack="signflip:0.2"), RunFolder(tmp_path)) is None  # other attackers in each run


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mifa", {"wait": True}),
        ("fedmim+gradma-s", {"slots": 4, "qp_scope": "tensor", "order": "sampling"}),
        ("gradma-w", {"prev_first": "x0", "rho": 0.1}),
        ("fedprox", {"optimizer": "adam", "decay_biases": False}),
        ("domo", {"buffers": "average"}),
        ("fedadam", {"bias_correction": True, "v0": "tau2"}),
        ("scaffold", {"option": 1}),
    ],
    ids=str,
)
def test_options(name: str, fields: dict[str, Any]) -> None:
    for pair in both(maker(algorithms(name, **fields), eval_every=4, lr_drops=(2,)), 5):
        agree(*pair)


def test_batch_norm_and_dropout() -> None:
    def module(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 3))

    for pair in both(maker(algorithms("moon"), module, eval_every=4), 5):
        agree(*pair)


def test_constants_that_differ_are_refused() -> None:
    def module(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        made[0].requires_grad_(False)
        return made

    with pytest.raises(BadSetting, match="does not train"):
        Pack(maker(algorithms("fedavg"), module)()).scored_rounds(1, False)


def test_a_run_with_an_answer_that_is_not_finite_leaves_as_it_was() -> None:
    """One client of the second run is spoiled: that run is as before the stretch, the others go on."""
    alone, packed = (maker(algorithms("scaffold"), eval_every=3)() for _ in range(2))
    pack = Pack(packed)
    assert all(pack.scored_rounds(3, False))
    before = packed[1].tensors()
    spoilt = packed[1].state.x.clone()
    spoilt[0] = torch.nan
    good, packed[1].state = packed[1].state, packed[1].state._replace(x=spoilt)
    made = pack.scored_rounds(3, False)
    assert [len(records) for records in made] == [3, 0, 3]
    packed[1].state = good
    assert all(torch.equal(t, packed[1].tensors()[name]) for name, t in before.items())
    rest = Pack([packed[0], packed[2]])
    rest.scored_rounds(2, False)
    packed[1].rounds(1)
    for n, rounds in ((0, 8), (1, 4), (2, 8)):
        for _ in range(rounds):
            alone[n].round()
        for name, tensor in alone[n].tensors().items():
            torch.testing.assert_close(packed[n].tensors()[name], tensor, rtol=1e-9, atol=1e-11)


# Whole runs, with their folders.
SMALL = {
    "clients": 12, "cohort": 4, "steps": 2, "batch": 8, "model": "logreg", "rounds": 7, "eval_every": 2, "device": "cpu",
    "checkpoint_every": 3, "dtype": "float64", "execution": "stacked",
}  # fmt: skip


def configs(algorithm: str = "scaffold", **settings: Any) -> list[RunConfig]:
    rates = ((0, 0.1), (1, 0.2), (2, 0.05))
    return [from_mapping(SMALL | settings | {"algorithm": algorithm, "seed": s, "set": {"lr": r}}) for s, r in rates]


@pytest.fixture
def stretches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each stretch of rounds was made of."""
    sizes: list[int] = []
    real = Program.load
    monkeypatch.setattr(Program, "load", lambda self, *given: (sizes.append(len(self.alg.algs)), real(self, *given)))
    return sizes


def packed_run(chosen: list[RunConfig], out: Path, tell: Progress = lambda record, rounds: None) -> list[Path]:
    folders = [out / str(config.seed) for config in chosen]
    packs.run_packed(chosen, folders, [tell] * len(chosen))
    return folders


def same_run(config: RunConfig, folder: Path) -> None:
    """The folder holds what the run alone gives."""
    alone, stored = run(config), RunFolder(folder)
    assert stored.is_finished() and stored.last_checkpoint() == alone.records[-1]["round"]
    for a, b in zip(alone.records, small.read_rounds(folder), strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"seconds"}:
            value = None if isinstance(a[name], float) and math.isnan(a[name]) else a[name]
            assert b[name] == (value if value is None else pytest.approx(value, rel=1e-8, abs=1e-11)), name
    model = load_file(stored.model_file)
    assert model.keys() == alone.model.keys()
    for name, tensor in alone.model.items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-9, atol=1e-11)


def test_packed_runs_write_complete_folders(tmp_path: Path, stretches: list[int]) -> None:
    chosen = configs()
    for config, folder in zip(chosen, packed_run(chosen, tmp_path), strict=True):
        same_run(config, folder)
    assert stretches and set(stretches) == {3}


def test_an_interrupted_pack_goes_on_as_a_pack(tmp_path: Path, stretches: list[int]) -> None:
    chosen = configs()

    def interrupt(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed_run(chosen, tmp_path, interrupt)
    kinds = {packs.kind(c, RunFolder(tmp_path / str(c.seed))) for c in chosen}
    assert len(kinds) == 1 and RunFolder(tmp_path / "0").last_checkpoint() == 3
    assert kinds != {packs.kind(c, RunFolder(tmp_path / "none")) for c in chosen}, "another round is another pack"
    stretches.clear()
    for config, folder in zip(chosen, packed_run(chosen, tmp_path), strict=True):
        same_run(config, folder)
    assert set(stretches) == {3}


@pytest.mark.parametrize("when", [4, 7])
def test_a_pack_that_a_signal_stops_loses_nothing(when: int, tmp_path: Path) -> None:
    chosen, said, before = configs(checkpoint_every=100), [], signal.getsignal(signal.SIGTERM)

    def send(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == when and not stopping.stop_signal():
            signal.raise_signal(signal.SIGTERM)
            while not stopping.stop_signal():  # a thread hears it
                time.sleep(0.01)

    with pytest.raises(stopping.Stopped), stopping.heed_signals(said.append):
        packed_run(chosen, tmp_path, send)
    assert said == ["stopped by SIGTERM"] and signal.getsignal(signal.SIGTERM) == before
    reached = [RunFolder(tmp_path / str(config.seed)).last_checkpoint() for config in chosen]
    assert (
        reached == [len(small.read_rounds(tmp_path / str(config.seed))) for config in chosen] and min(reached) >= when
    )
    for config, folder in zip(chosen, packed_run(chosen, tmp_path), strict=True):
        same_run(config, folder)


@pytest.mark.filterwarnings("ignore:round .* no client's update was finite")
def test_runs_that_leave_a_pack_go_on_as_alone(tmp_path: Path, stretches: list[int]) -> None:
    """One run's answers are never finite, so that it has diverged after three rounds; one reaches its accuracy early."""
    chosen = configs("fedavg", model="mlp", partition="iid", dtype="float32", stop_at="accuracy=0.2")
    chosen[0] = dataclasses.replace(chosen[0], set={"lr": 1e29})
    folders = packed_run(chosen, tmp_path)
    assert small.read_rounds(folders[0])[-1]["dropped"] == 4
    rounds = [RunFolder(folder).last_checkpoint() for folder in folders]
    assert rounds[0] == 3 and len({*rounds[1:]}) > 1, "the case is of no use unless a run ends early"
    assert stretches[0] == 3 and 2 in stretches
    for config, folder in zip(chosen, folders, strict=True):
        alone = run(config)
        found = small.read_rounds(folder)
        assert [r["accuracy"] for r in found] == [r["accuracy"] for r in alone.records]


def test_what_is_packed_together(tmp_path: Path) -> None:
    def kind(algorithm: str = "fedmim", fields: Mapping[str, Any] = MappingProxyType({}), **settings: Any) -> Any:
        config = from_mapping(SMALL | settings | {"algorithm": algorithm, "set": fields})
        return packs.kind(config, RunFolder(tmp_path / "none"))

    assert kind() is not None
    for fields in ({"lr": 0.3}, {"alpha": [0.3, 0.1], "beta": [0.5, 0.0]}, {"server_lr": 0.5, "momentum": 0.1}):
        assert kind() == kind(fields=fields) == kind(fields=fields, seed=5, lr_decay=0.9)
    for fields in ({"alpha": [0.3]}, {"weight_decay": 0.1}, {"clip": 1.0}, {"optimizer": "adam"}):
        assert kind() != kind(fields=fields)
    for settings in ({"cohort": 3}, {"model": "mlp"}, {"rounds": 8}, {"weights": "size"}):
        assert kind() != kind(**settings)
    assert kind(colour=0.5) == kind(colour=0.5, fields={"lr": 0.3}) != kind(colour=0.5, seed=5)
    assert kind("moon") == kind("moon", {"lr": 0.3}) != kind("moon", {"mu": 0.5}), "mu meets samples, not vectors"
    assert kind("gradma-s") == kind("gradma-s", {"beta2": 0.1}) != kind("gradma-s", {"slots": 7})
    for settings in ({"execution": "pool"}, {"stop_at": "time=10m"}, {"client_state": "disk"}):
        assert kind(**settings) is None


def test_fields_of_classes_from_elsewhere_must_be_equal() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(algorithm_class("fedprox")):  # type: ignore[misc]
        strength: float = 0.5

    assert structure(Own()) == structure(Own(lr=0.3, mu=0.2)) != structure(Own(strength=0.1))


def test_a_pack_is_split_where_it_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configs()[0]
    most = []
    for free, processes in ((1 << 30, 1), (1 << 30, 2), (1 << 10, 1)):
        monkeypatch.setattr(packs, "available_memory", lambda device, free=free: free)
        most.append(packs.cost(config, processes).most)
    assert most[0] // 2 == most[1] > most[2] == 1
    monkeypatch.undo()
    assert packs.cost(dataclasses.replace(config, chunk=9), 1).most == 2
    assert [len(part) for part in packs.split(range(90), 40)] == [30, 30, 30]


def test_a_sweep_packs_when_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{name} = {json.dumps(value)}" for name, value in SMALL.items()]
    grid = '[sweep]\nalgorithms = ["fedavg", "gradma-s"]\nseeds = [0, 1]\n[sweep.grid]\nlr = [0.1, 0.2]\n'
    (tmp_path / "s.toml").write_text("\n".join([*lines, grid, "[sweep.only.fedavg]\nclip = [0.0, 1.0]"]))
    command = f"sweep {tmp_path / 's.toml'} --out {tmp_path / 'o'} --processes 1 --pack".split()
    assert cli.main(command) == 0
    told = capsys.readouterr().out
    assert told.count("packed: ") == 3 and "if run one after another" in told
    jobs, _ = plan(tmp_path / "s.toml")
    same_run(jobs[-1].config, tmp_path / "o" / jobs[-1].name)
    assert all(RunFolder(tmp_path / "o" / job.name).is_finished() for job in jobs)
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "o").rglob("rounds.jsonl")}
    assert cli.main(command) == 0
    assert "packed: " not in capsys.readouterr().out, "there is nothing left to pack"
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


def test_the_estimate_of_time_is_of_the_rounds_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = iter([9.0, 2.0, 3.0, 4.0])  # the first ones may be slow
    monkeypatch.setattr(packs, "time_round", lambda simulation: next(timed))
    jobs = [Job(f"run{n}", dataclasses.replace(config, rounds=6)) for n, config in enumerate(configs()[:2])]
    small.write_run(tmp_path / "run0", {}, [], run="it")
    (tmp_path / "run0/checkpoint").mkdir()
    write_sealed(tmp_path / "run0/checkpoint/round-000005.json", {"round": 5, "run": "it"})
    assert "in one program, " in (said := _programs(tmp_path, 1, jobs, print)[1])
    assert said.endswith(" 14 s if run one after another"), "one round and six, of two seconds each"


def test_a_pack_that_fails_is_run_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Pack) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Pack, "begin", fail)
    chosen = configs("fedavg", rounds=2)
    failed, note = _run_program(tmp_path, [Job(str(c.seed), c) for c in chosen], lambda news: None)
    assert not failed and "3 runs could not be packed" in note and "full" in note
    for config in chosen:
        same_run(config, tmp_path / str(config.seed))
