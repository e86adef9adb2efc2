"""The commands that train: the same flags for the same things, one start, one loop and one schedule of rates."""

from __future__ import annotations

import argparse
import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import undrift
from undrift import cli
from undrift.cli.parser import command_parsers
from undrift.core.errors import BadSetting, UndriftError
from undrift.core.rates import RateSchedule
from undrift.core.seals import seal_toml, unseal_toml
from undrift.dataparallel import command as parallel
from undrift.dataparallel.training import ParallelTraining
from undrift.deploy import settings as deployment
from undrift.jobs import course, start
from undrift.jobs.config import JobConfig, RunConfig
from undrift.jobs.protocol import Run
from undrift.pipeline import pipe_config as pipeline
from undrift.pipeline.train import run_pipe
from undrift.simulate.settings import Settings

PACKAGE = Path(undrift.__file__).parent
COMMANDS = ("run", "deploy", "dataparallel", "pipe")
# Where a round is a pass over the samples, or a checkpoint is large or needed, another default is better; the help says why.
DIFFER = ("rounds", "eval_every", "checkpoint_every")
SMALL = {"workers": 2, "rounds": 2, "steps": 2, "batch": 4, "model": "logreg"}


def options(command: str) -> dict[str, argparse.Action]:
    return {option: a for a in command_parsers()[command]._actions for option in a.option_strings}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(JobConfig)])
def test_all_commands_have_the_same_flags_with_the_same_defaults_and_help(field: str) -> None:
    flag = f"--{field.replace('_', '-')}"
    found = [options(command)[flag] for command in COMMANDS]
    assert len({(type(a), a.type, a.nargs) for a in found}) == 1
    if field not in DIFFER:
        assert len({(a.help, str(a.metavar)) for a in found}) == 1
    for command in COMMANDS:
        assert {"--out", "--resume"} <= options(command).keys()


def test_there_is_one_place_that_makes_a_course_and_one_loop() -> None:
    files = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert [path.name for path, text in files.items() if re.search(r"(?<!class )\bCourse\(", text)] == ["start.py"]
    assert {path.name for path, text in files.items() if ".ahead()" in text} == {"course.py", "packs.py"}
    kinds = ("Simulation", "Training", "Deployment")
    for path in (course.__file__, start.__file__):
        assert not any(f"isinstance({name}" in Path(path).read_text() for name in ("run", "simulation", "self.run"))
        assert not any(kind in Path(path).read_text() for kind in kinds)


def test_every_start_makes_one_course(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Run] = []

    class Counted(course.Course[Any, Any]):
        def __init__(self, run: Run, *given: Any) -> None:
            made.append(run)
            super().__init__(run, *given)

    monkeypatch.setattr(start, "Course", Counted)
    undrift.run(rounds=1, clients=4, cohort=2, model="logreg")
    parallel.run_parallel(SMALL)
    run_pipe(rounds=1, steps=2, batch=8, cuts="hidden2")
    assert [type(run).__module__ for run in made] == [
        "undrift.simulate.simulation", "undrift.dataparallel.training", "undrift.pipeline.train",
    ]  # fmt: skip


def test_rates_are_one_schedule() -> None:
    how = {"warmup": 2.0, "lr_decay": 0.5, "lr_drops": "2", "lr_drop": 0.1}
    run = Settings(4, None, warmup=2.0, lr_decay=0.5, lr_drops=(2,), lr_drop=0.1)  # type: ignore[arg-type]
    assert [run.schedule(t) for t in range(3)] == [0.5, 0.5, 0.25 * 0.1]
    pipe = pipeline.PipeConfig(lr=4.0, **how)
    assert [pipe.rate(n, 4) for n in (0, 3, 7, 8)] == [0.5, 2.0, 2.0, 4.0 * 0.25 * 0.1]
    config = parallel.resolve(parallel.from_mapping(SMALL | how | {"lr": 4.0}))
    training = ParallelTraining(config)
    assert [training.rate(n) for n in (0, 1)] == [0.0, 1.0]
    assert config.schedule == RateSchedule(2.0, 0.5, (2,), 0.1)


@pytest.mark.parametrize("kind", [RunConfig, parallel.ParallelConfig, pipeline.PipeConfig])
def test_a_schedule_that_the_run_does_not_reach_is_remarked_on(kind: Any) -> None:
    assert kind(rounds=20, lr_drops="10,19", warmup=20.0).remarks() == []
    late, cold = kind(rounds=20, lr_drops="10,20", warmup=21.0).remarks()
    assert "does not drop after round 20" in late and "the full rate is never reached" in cold


def test_a_warm_up_changes_a_simulation_only_at_its_beginning() -> None:
    small: dict[str, Any] = {"rounds": 2, "clients": 4, "cohort": 2, "model": "logreg", "execution": "stacked"}
    plain, warm, at_once = (undrift.run(small, warmup=w) for w in (0.0, 2.0, 1.0))
    assert plain.records[0]["consistency"] > warm.records[0]["consistency"]
    assert all(torch.equal(tensor, at_once.model[name]) for name, tensor in plain.model.items())


def test_a_methods_fields_can_be_set(tmp_path: Path) -> None:
    common = ["--workers", "2", "--rounds", "1", "--steps", "2", "--batch", "4", "--model", "logreg"]
    own = ["--set", "lam=0.5", "--set", "ratio=8", "--set", "compressor=randk", "--set", "lr=0.2"]
    flags = ["--lam", "0.5", "--ratio", "8", "--compressor", "randk", "--lr", "0.2"]
    assert cli.main(["dataparallel", *common, *own, "--out", str(tmp_path / "set")]) == 0
    assert cli.main(["dp", *common, *flags, "--out", str(tmp_path / "flags")]) == 0
    a, b = (tomllib.loads((tmp_path / name / "run.toml").read_text()) for name in ("set", "flags"))
    assert a == b and a["lam"] == "0.5" and a["ratio"] == 8.0 and a["compressor"] == "randk"
    assert cli.main(["dp", "--out", str(tmp_path / "set"), "--resume", "--rounds", "2", "--set", "lam=0.5"]) == 0
    assert cli.main(["dp", "--out", str(tmp_path / "set"), "--resume", "--set", "lam=0.6"]) == 2


def test_pipes_fields_can_be_set(tmp_path: Path) -> None:
    common = ["pipe", "--rounds", "1", "--steps", "4", "--batch", "8"]
    assert cli.main([*common, "--set", "cuts=hidden2", "--set", "queues=1,0;2,0", "--out", str(tmp_path / "a")]) == 0
    assert cli.main([*common, "--cuts", "hidden2", "--queues", "1,0;2,0", "--out", str(tmp_path / "b")]) == 0
    a, b = (tomllib.loads((tmp_path / name / "run.toml").read_text()) for name in "ab")
    assert a == b and a["set"]["queues"] == "1,0;2,0"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["dp", "--lam", "0.5", "--set", "lam=0.5"], "--lam and --set lam are the same setting"),
        (["dp", "--set", "mu=1"], "unknown field of def 'mu'"),
        (["dp", "--compile", "yes"], "unknown value of compile 'yes'"),
        (["dp", "--execution", "turns"], "unknown value of execution 'turns'"),
        (["pipe", "--set", "mu=1"], "unknown field of dsp 'mu'"),
        (["pipe", "--execution", "stacked"], "leave --execution at auto, not stacked"),
        (["pipe", "--execution", "pool"], "leave --execution at auto, not pool"),
        (["pipe", "--compile", "on"], "leave --compile at auto, or off"),
        (["deploy", "local", "--execution", "pool"], "leave --execution at auto, not pool"),
        (["deploy", "local", "--compile", "on"], "leave --compile at auto, or off"),
        (["deploy", "local", "--checkpoint-every", "5"], "leave --checkpoint-every out"),
        (["deploy", "local", "--dp-clip", "1"], "--dp-clip is called --privacy-clip now"),
        (["deploy", "local", "--dp-noise=1"], "--dp-noise is called --privacy-noise now"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    command: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


@pytest.mark.parametrize("name", ["clip", "noise", "delta"])
def test_an_old_name_of_a_privacy_setting_is_refused_with_the_new_one(name: str) -> None:
    with pytest.raises(BadSetting, match=f"dp_{name} is called privacy_{name} now"):
        deployment.Plan.of({"clients": 4, "cohort": 4, f"dp_{name}": 0.5})


def test_what_a_pipeline_does_by_itself_may_be_said() -> None:
    assert run_pipe(rounds=1, steps=2, batch=8, cuts="hidden2", execution="auto", compile="off", replay=False).records


def test_fast_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: stacked, replayed, and compiled where the steps repay it."""
    monkeypatch.setattr(parallel, "pick_device", lambda name: torch.device("cuda"))
    config = parallel.resolve(parallel.from_mapping({}))
    assert config.execution == "stacked" and config.replay and config.compile == "auto"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for kind in (RunConfig(), config):
        assert start.compiles(kind, start.REPAID) and not start.compiles(kind, start.REPAID - 1)
        assert not start.compiles(dataclasses.replace(kind, compile="off"), start.REPAID)
        assert start.compiles(dataclasses.replace(kind, compile="on"), 1)


@pytest.mark.parametrize(("old", "new"), [(True, "on"), (False, "off")])
def test_an_old_folder_of_data_parallel_workers_goes_on(old: bool, new: str, tmp_path: Path) -> None:
    parallel.run_parallel(SMALL, out=tmp_path)
    file = tmp_path / "run.toml"
    text, run = unseal_toml(file.read_bytes())
    text = text.replace('compile = "auto"', f"compile = {str(old).lower()}").replace("replay = true", "replay = false")
    file.write_bytes(seal_toml(text, run))
    assert len(parallel.run_parallel(out=tmp_path, resume=True, rounds=3).records) == 3
    stored = tomllib.loads(file.read_text())
    assert stored["compile"] == new and stored["replay"] is False
    assert parallel.from_mapping({"compile": old}).compile == new


def test_settings_of_a_wrong_kind_are_refused() -> None:
    for make in (parallel.from_mapping, pipeline.from_mapping):
        with pytest.raises(UndriftError, match="set must be a table"):
            make({"set": 3})
        with pytest.raises(UndriftError, match=r"val_fraction must lie in \[0, 1\)"):
            make({"val_fraction": 1.0})
