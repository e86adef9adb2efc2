"""A run that was stopped or killed goes on to the same records and model."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import undrift
from tests.reliability import counted
from tests.small import QUICK, timeless
from undrift import cli
from undrift.core.errors import BadSetting
from undrift.core.names import names

DISK = "--client-state disk"


@pytest.mark.parametrize("name", names("algorithms"))
@pytest.mark.parametrize("model", ["logreg", "gradma-nn"])
def test_resume_is_bitwise(name: str, model: str, tmp_path: Path) -> None:
    """Stopped after any checkpoint, with lines written after it, a run goes on to the same records and model."""
    if model == "logreg" and name.startswith(("moon", "fedmlb")):
        model = "mlp"  # features and blocks need more than a classifier
    settings = QUICK | {
        "model": model,
        "checkpoint_every": 2,
        "rounds": 7,
        "algorithm": name,
        "set": {"lr": 0.01, "optimizer": "momentum"},
    }
    whole = undrift.run(settings, out=tmp_path / "whole")

    class Killed(Exception):
        pass

    def kill(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == 5:
            raise Killed

    with pytest.raises(Killed):
        undrift.run(settings, out=tmp_path / "cut", progress=kill)
    assert len((tmp_path / "cut/rounds.jsonl").read_text().splitlines()) == 5  # one more than the checkpoint
    resumed = undrift.run(out=tmp_path / "cut", resume=True)
    assert timeless(resumed.records) == timeless(whole.records)
    assert all(torch.equal(resumed.model[n], t) for n, t in whole.model.items())
    ours, theirs = (load_file(tmp_path / f / "checkpoint/round-000007.safetensors") for f in ("cut", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], t) for n, t in theirs.items())


def killed_run(folder: Path, delay: float, settings: list[str]) -> int:
    """Start a run in its own process, kill -9 it so long after it wrote a line, and say how many lines there are."""
    command = [sys.executable, "-m", "undrift", "run", *settings, "--out", str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    rounds = folder / "rounds.jsonl"
    before = rounds.stat().st_mtime_ns if rounds.exists() else 0
    while process.poll() is None and not (rounds.exists() and rounds.stat().st_mtime_ns > before):
        time.sleep(0.01)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(rounds.read_text().splitlines())


def check_kills(name: str, folder: Path, delays: list[float]) -> None:
    """Kill a run, resume and kill it again, after such parts of the time that an undisturbed one takes."""
    settings = f"--algorithm {name} --clients 30 --cohort 6 --steps 2 --batch 8 --rounds 120 --checkpoint-every 7"
    settings += " --eval-every 10 --execution stacked --model mlp"
    whole = subprocess.run(
        [sys.executable, "-m", "undrift", "run", *settings.split(), "--out", str(folder / "whole")],
        check=False,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert whole.returncode == 0, whole.stderr
    seconds = sum(json.loads(line)["seconds"] for line in (folder / "whole/rounds.jsonl").read_text().splitlines())
    lines = killed_run(folder / "cut", delays[0] * seconds, settings.split())
    assert lines < 120, "the run must be killed before it ends"
    for delay in delays[1:]:
        killed_run(folder / "cut", delay * seconds, ["--resume"])
    done = subprocess.run(
        [sys.executable, "-m", "undrift", "run", "--resume", "--out", str(folder / "cut")],
        check=False,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    records = [
        [json.loads(line) for line in (folder / f / "rounds.jsonl").read_text().splitlines()] for f in ("whole", "cut")
    ]
    assert len(records[0]) == 120 and timeless(records[0]) == timeless(records[1])
    for file in ("model.safetensors", *(["clients.table"] if DISK in name else [])):
        contents = [(folder / f / file).read_bytes() for f in ("whole", "cut")]
        assert contents[0] == contents[1]


@pytest.mark.parametrize("name", ["scaffold", "gradma-s", f"scaffold {DISK}"])
def test_kill_9_and_resume(name: str, tmp_path: Path) -> None:
    check_kills(name, tmp_path, [0.4, 0.2])


@pytest.mark.system
@pytest.mark.parametrize("name", [*names("algorithms"), f"scaffold {DISK}", f"moon {DISK}"])
@pytest.mark.parametrize("attempt", range(2))
def test_kill_9_many_times_and_resume(name: str, attempt: int, tmp_path: Path, count: Any) -> None:
    draw = random.Random(attempt)
    with counted(count, "kill -9 and resume", 4):
        check_kills(name, tmp_path, [draw.uniform(0, 0.5) for _ in range(4)])


def test_resume_of_a_finished_run_changes_nothing_and_can_be_lengthened(tmp_path: Path) -> None:
    undrift.run(QUICK | {"rounds": 3}, out=tmp_path / "r")
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*.*")) if p.is_file()}
    undrift.run(out=tmp_path / "r", resume=True)
    assert before == {p: p.read_bytes() for p in sorted(tmp_path.rglob("*.*")) if p.is_file()}
    longer = undrift.run(out=tmp_path / "r", resume=True, rounds=5)
    straight = undrift.run(QUICK | {"rounds": 5})
    assert [r["train_loss"] for r in longer.records] == [r["train_loss"] for r in straight.records]
    settings = (tmp_path / "r" / "run.toml").read_bytes()
    with pytest.raises(BadSetting, match="holds 5 rounds already.*--rounds 5 or more"):
        undrift.run(out=tmp_path / "r", resume=True, rounds=4)
    assert (tmp_path / "r" / "run.toml").read_bytes() == settings


def test_resume_keeps_the_fields_that_are_not_named_again(tmp_path: Path) -> None:
    undrift.run(QUICK | {"rounds": 2}, algorithm="fedprox", set={"mu": 1.0, "lr": 0.05}, out=tmp_path)
    resumed = undrift.run(out=tmp_path, resume=True, rounds=4, set={"lr": 0.05})
    whole = undrift.run(QUICK | {"rounds": 4}, algorithm="fedprox", set={"mu": 1.0, "lr": 0.05})
    assert resumed.config.set["mu"] == 1.0
    assert [r["train_loss"] for r in resumed.records] == [r["train_loss"] for r in whole.records]


@pytest.mark.parametrize("name", names("algorithms"))
def test_every_algorithm_is_saved_before_its_first_round(name: str, tmp_path: Path) -> None:
    settings = QUICK | {"model": "mlp", "algorithm": name, "rounds": 0}
    undrift.run(settings, out=tmp_path)
    later = undrift.run(out=tmp_path, resume=True, rounds=2)
    assert [r["train_loss"] for r in later.records] == [
        r["train_loss"] for r in undrift.run(settings | {"rounds": 2}).records
    ]


def test_no_memory_is_saved_and_resumed_too(tmp_path: Path) -> None:
    settings = QUICK | {"algorithm": "gradma-s", "set": {"slots": 0}, "rounds": 4, "checkpoint_every": 2}
    whole = undrift.run(settings, out=tmp_path / "whole")
    undrift.run(settings | {"rounds": 2}, out=tmp_path / "cut")
    resumed = undrift.run(out=tmp_path / "cut", resume=True, rounds=4)
    assert all(torch.equal(resumed.model[n], t) for n, t in whole.model.items())


@pytest.mark.parametrize("other", ["--algorithm fedprox", "--algorithm fedavgm", "--model mlp", "--dataset mnist"])
def test_resume_is_not_for_another_method_model_or_data(
    other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undrift.run(QUICK | {"rounds": 2}, out=tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert cli.main(["run", "--out", str(tmp_path), "--resume", "--rounds", "4", *other.split()]) == 2
    assert "holds another run" in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_the_bar_of_a_resumed_run_has_its_own_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = f"run --clients 8 --cohort 2 --model logreg --out {tmp_path} --rounds"
    assert cli.main(f"{small} 1 --algorithm scaffold".split()) == 0
    capsys.readouterr()
    assert cli.main(f"run --out {tmp_path} --rounds 2 --resume".split()) == 0
    assert capsys.readouterr().out.lstrip().startswith("scaffold")


def test_resume_through_a_configuration_keeps_the_execution(tmp_path: Path) -> None:
    first = undrift.run(QUICK | {"rounds": 2, "execution": "pool"}, out=tmp_path)
    from dataclasses import replace as changed

    undrift.run(changed(first.config, rounds=3, execution="auto"), out=tmp_path, resume=True)
    assert tomllib.loads((tmp_path / "run.toml").read_text())["execution"] == "pool"
