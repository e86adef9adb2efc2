"""A run that was stopped or killed goes on to the same records and model."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import undrift
from tests.patience import wait_for_rounds
from tests.reliability import counted
from tests.small import DEEPER, QUICK, model_for, timeless
from undrift import cli
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.core.names import names
from undrift.jobs import start
from undrift.simulate.evaluate import accuracy

DISK = "--client-state disk"


@pytest.mark.parametrize("name", names("algorithms"))
@pytest.mark.parametrize("model", ["logreg", "gradma-nn"])
def test_resume_is_bitwise(name: str, model: str, tmp_path: Path) -> None:
    """Stopped after any checkpoint, with lines written after it, a run goes on to the same records and model."""
    model = "mlp" if model == "logreg" and name in DEEPER else model_for(name, model)
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


def killed_run(folder: Path, more: int, settings: list[str]) -> int:
    """Start a run in its own process, kill -9 it after so many rounds, and say how many lines there are."""
    command = [sys.executable, "-m", "undrift", "run", *settings, "--out", str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    wait_for_rounds(folder, more, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len((folder / "rounds.jsonl").read_text().splitlines())


def check_kills(name: str, folder: Path, kills: list[int]) -> None:
    """Kill a run, resume and kill it again, after so many rounds of its 120."""
    settings = f"--algorithm {name} --clients 30 --cohort 6 --steps 2 --batch 8 --rounds 120 --checkpoint-every 7"
    settings += " --eval-every 10 --execution stacked --model " + model_for(name.split()[0], "mlp")
    whole = subprocess.run(
        [sys.executable, "-m", "undrift", "run", *settings.split(), "--out", str(folder / "whole")],
        check=False,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert whole.returncode == 0, whole.stderr
    for n, more in enumerate(kills):
        lines = killed_run(folder / "cut", more, ["--resume"] if n else settings.split())
        assert lines < 120, "the run must be killed before it ends"
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
    check_kills(name, tmp_path, [48, 24])


@pytest.mark.system
@pytest.mark.parametrize("name", [*names("algorithms"), f"scaffold {DISK}", f"moon {DISK}"])
def test_kill_9_many_times_and_resume(name: str, tmp_path: Path, pytestconfig: pytest.Config, count: Any) -> None:
    draw = random.Random(f"{name} {pytestconfig.getoption('seed')}")
    with counted(count, "kill -9 and resume", 4):
        check_kills(name, tmp_path, [draw.randint(1, 25) for _ in range(4)])


@contextlib.contextmanager
def busy_machine(processes: int) -> Iterator[None]:
    """Processes that keep all cores busy."""
    # They end with their parent, also where that is killed.
    spin = "import os, numpy as np\nparent, a = os.getppid(), np.random.rand(300, 300)\nwhile os.getppid() == parent: a @ a"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def check_under_load(folder: Path, settings: str, load: int, kills: int, rounds: int = 20) -> None:
    """A run on a quiet machine equals one with the same command that is killed and resumed on a busy one."""
    env = {
        name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
    }  # all cores, as users have it
    command, models = [sys.executable, "-m", "undrift", "run"], []
    arguments = (
        f"{settings} --clients 20 --cohort 6 --steps 2 --checkpoint-every 3 --eval-every 8 --rounds {rounds}".split()
    )
    subprocess.run([*command, *arguments, "--out", str(folder / "whole")], check=True, capture_output=True, env=env)
    cut = [*command, "--out", str(folder / "cut")]
    written = folder / "cut/rounds.jsonl"
    with busy_machine(load):
        for n in range(kills):
            process = subprocess.Popen([*cut, *(["--resume"] if n else arguments)], stdout=subprocess.DEVNULL, env=env)
            while process.poll() is None and not (written.exists() and written.read_text().count("\n") >= 6 * n + 4):
                time.sleep(0.01)
            process.kill()
            process.wait()
        assert written.read_text().count("\n") < rounds, "the run must be killed before it ends"
        done = subprocess.run([*cut, "--resume"], check=True, capture_output=True, text=True, env=env)
    assert "last digits" not in done.stderr
    records = []
    for run in ("whole", "cut"):
        records.append([json.loads(line) for line in (folder / run / "rounds.jsonl").read_text().splitlines()])
        models.append((folder / run / "model.safetensors").read_bytes())
    chosen = [tomllib.loads((folder / run / "run.toml").read_text())["execution"] for run in ("whole", "cut")]
    assert chosen[0] == chosen[1] and len(records[0]) == rounds and timeless(records[0]) == timeless(records[1])
    assert models[0] == models[1]


def test_killed_and_resumed_on_a_busy_machine(tmp_path: Path) -> None:
    check_under_load(tmp_path, "--algorithm scaffold --model mlp --sampling bernoulli", load=2, kills=1, rounds=12)


@pytest.mark.system
@pytest.mark.parametrize("name", ["scaffold", "gradma-s"])
@pytest.mark.parametrize("model", ["mlp", "gradma-nn", "small-cnn"])
def test_killed_and_resumed_on_a_very_busy_machine(name: str, model: str, tmp_path: Path, count: Any) -> None:
    with counted(count, "kill -9 beside eight busy processes, and the bits of a quiet machine", 2):
        check_under_load(tmp_path, f"--algorithm {name} --model {model} --batch 8", load=8, kills=2, rounds=14)


def test_resume_says_when_the_functions_in_c_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undrift.run(QUICK | {"rounds": 1}, out=tmp_path)
    monkeypatch.setattr(start, "library", lambda: None)
    if tomllib.loads((tmp_path / "run.toml").read_text())["made"]["native"]:
        with pytest.warns(UserWarning, match="was run with the functions in C, now it is without them"):
            undrift.run(out=tmp_path, resume=True, rounds=2)


def test_a_resumed_run_stacks_as_many_clients_as_before(tmp_path: Path) -> None:
    """A round of Bernoulli sampling may have more clients than `cohort`; they stay together after a resume."""
    settings = QUICK | {"sampling": "bernoulli", "rounds": 1}
    undrift.run(settings, out=tmp_path)
    assert tomllib.loads((tmp_path / "run.toml").read_text())["chunk"] == settings["clients"]


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
def test_every_algorithm_goes_on_after_its_first_round(name: str, tmp_path: Path) -> None:
    settings = QUICK | {"model": model_for(name, "mlp"), "algorithm": name, "rounds": 1}
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


def test_the_progress_of_a_resumed_run_has_its_own_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("undrift.cli.console.EVERY", 0.0)
    small = f"run --clients 8 --cohort 2 --model logreg --out {tmp_path} --rounds"
    assert cli.main(f"{small} 1 --algorithm scaffold".split()) == 0
    capsys.readouterr()
    assert cli.main(f"run --out {tmp_path} --rounds 2 --resume".split()) == 0
    assert capsys.readouterr().out.lstrip().startswith("scaffold: round 2 of 2")


def test_resume_through_a_configuration_keeps_the_execution(tmp_path: Path) -> None:
    first = undrift.run(QUICK | {"rounds": 2, "execution": "pool"}, out=tmp_path)
    from dataclasses import replace as changed

    undrift.run(changed(first.config, rounds=3, execution="auto"), out=tmp_path, resume=True)
    assert tomllib.loads((tmp_path / "run.toml").read_text())["execution"] == "pool"


def blob(seed: int) -> tuple[Any, ...]:
    """Samples of three classes, in training and in the test."""
    draw = np.random.default_rng(seed)
    x, y = draw.normal(size=(90, 5)).astype(np.float32), draw.integers(0, 3, 90)
    return x[:60], y[:60], x[60:], y[60:]


def with_frozen(seed: int) -> nn.Module:
    """A model whose first layer is not trained: no checkpoint holds it."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    module[0].requires_grad_(False)
    return module


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.relu(1 - outputs.take_along_dim(targets.unsqueeze(1), 1)).mean()


X, Y, TEST_X, TEST_Y = blob(0)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"data": blob(1)}, "the samples"),
        ({"data": (X[::-1].copy(), Y[::-1].copy(), TEST_X, TEST_Y)}, "the samples"),
        ({"data": (X, Y, TEST_X, (TEST_Y + 1) % 3)}, "the samples"),
        ({"model": nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))}, "the model's layers"),
        ({"model": with_frozen(1)}, "the model's frozen tensors"),
        ({"loss": hinge}, "the loss"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "the loss"),
    ],
    ids=[
        "other samples",
        "another order",
        "other test labels",
        "other layers",
        "other frozen weights",
        "loss",
        "module",
    ],
)
def test_resume_is_not_for_other_data_models_or_losses_in_python(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"data": (X, Y, TEST_X, TEST_Y), "model": with_frozen(0), "out": tmp_path}
    if "loss" in change:
        change = change | {"metrics": {"accuracy": accuracy}}
    small = {"clients": 4, "cohort": 2, "steps": 2, "batch": 8, "partition": "iid", "eval_every": 1}
    undrift.run(small, rounds=2, **given)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(BadRunFolder, match=f"holds another run: {named} changed since it began"):
        undrift.run(rounds=4, resume=True, **(given | change))
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    resumed = undrift.run(rounds=4, resume=True, **given)
    whole = undrift.run(small, rounds=4, **(given | {"out": None}))
    assert [r["train_loss"] for r in resumed.records] == [r["train_loss"] for r in whole.records]
    assert all(torch.equal(resumed.model[n], t) for n, t in whole.model.items())


OWN = """
from tests.jobs.test_resume import blob
seed = 0
def load(root=None):
    return blob(seed)
"""


@pytest.mark.parametrize(
    "command",
    [
        "run --partition iid --clients 4 --cohort 2",
        "dp --workers 2 --steps 1",
        "pipe --cuts hidden2 --queues 1,0;2,0 --steps 2",
    ],
)
def test_resume_notices_files_that_have_changed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data set of a function, as one that reads files, which gives something else the second time."""
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    import own_data  # type: ignore[import-not-found]

    begin = [*command.split(), "--dataset", "own_data:load", "--batch", "8", "--out", str(tmp_path / "out")]
    again = [begin[0], "--out", str(tmp_path / "out"), "--resume", "--rounds", "2"]
    monkeypatch.setattr(own_data, "seed", 0)
    assert cli.main([*begin, "--rounds", "1"]) == 0
    monkeypatch.setattr(own_data, "seed", 1)
    assert cli.main(again) == 2
    assert "the samples changed since it began" in capsys.readouterr().err
    monkeypatch.setattr(own_data, "seed", 0)
    assert cli.main(again) == 0
