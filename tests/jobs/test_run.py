"""`undrift.run`: the user's own things, the run folder, resume, sweeps, and bad input."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import undrift
from tests.small import data, tiny_mlp
from undrift import cli
from undrift.core.errors import BadData, BadRunFolder, BadSetting, MissingData, UndriftError, UnknownName
from undrift.core.names import names
from undrift.jobs.sweep import plan, run_all

QUICK = {"clients": 12, "cohort": 4, "steps": 2, "batch": 8, "model": "logreg", "eval_every": 3, "execution": "stacked"}
DISK = "--client-state disk"
FIELDS = {"round", "loss", "accuracy", "bytes_down", "bytes_up", "gradients", "consistency", "seconds"}


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def test_a_run_leaves_its_folder(tmp_path: Path) -> None:
    result = undrift.run(algorithm="fedprox", out=tmp_path / "run", rounds=4, set={"mu": 0.5}, **QUICK)
    settings = tomllib.loads((tmp_path / "run/run.toml").read_text())
    assert settings["algorithm"] == "fedprox" and settings["set"]["mu"] == 0.5 and settings["set"]["lr"] == 0.1
    assert settings["made"]["torch"] == torch.__version__ and settings["execution"] == "stacked"
    lines = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert [r["round"] for r in lines] == [1, 2, 3, 4] and lines[0].keys() >= FIELDS
    assert [r["accuracy"] is not None for r in lines] == [False, False, True, True]  # every third, and the last
    assert timeless(lines) == timeless(result.records)
    stored = load_file(tmp_path / "run/model.safetensors")
    assert stored.keys() == result.model.keys() == {"head.1.weight", "head.1.bias"} or len(stored) == 2
    assert all(torch.equal(stored[n], t) for n, t in result.model.items())
    again = undrift.run(tmp_path / "run/run.toml", out=tmp_path / "again")
    assert timeless(again.records) == timeless(lines), "run.toml is a configuration too"


def test_two_algorithms_with_one_seed_see_the_same_cohorts_and_batches() -> None:
    """Round 1 of SCAFFOLD is FedAvg's; with another seed it is not."""
    losses = [
        undrift.run(algorithm=a, rounds=1, seed=s, **QUICK).records[0]["train_loss"]
        for a, s in (("fedavg", 3), ("scaffold", 3), ("fedavg", 4))
    ]
    assert losses[0] == losses[1] != losses[2]


def test_own_model_and_arrays_with_batchnorm_dropout_and_a_frozen_layer() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    module[0].requires_grad_(False)
    own = data((60, 60, 60))
    result = undrift.run(
        model=module,
        data=(own.x_train, own.y_train, own.x_test, own.y_test),
        clients=3,
        cohort=2,
        partition="iid",
        rounds=20,
        eval_every=1,
        set={"lr": 0.2},
    )
    assert result.records[-1]["train_loss"] < 0.9 * result.records[0]["train_loss"]
    fresh = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    fresh.load_state_dict(result.model)
    assert torch.equal(fresh[0].weight, module[0].weight) and int(fresh[1].num_batches_tracked) > 0
    sent = 16 + 16 + 16 * 3 + 3 + (16 + 16 + 1)  # trainable parameters, and BatchNorm's statistics beside them
    assert result.records[0]["bytes_up"] == 2 * sent * 4


def test_torch_datasets_whole_or_one_a_client() -> None:
    own = data((20, 9, 33))
    x, y = torch.from_numpy(np.asarray(own.x_train)), torch.from_numpy(own.y_train)
    test = TensorDataset(torch.from_numpy(np.asarray(own.x_test)), torch.from_numpy(own.y_test))
    each = [TensorDataset(*(t[torch.from_numpy(own.sites == i)] for t in (x, y))) for i in range(3)]
    a = undrift.run(model=tiny_mlp(), data=(each, test), rounds=3, execution="stacked")
    b = undrift.run(model=tiny_mlp(), data=own, partition="sites", clients=3, cohort=3, rounds=3, execution="stacked")
    assert timeless(a.records) == timeless(b.records) and a.config.clients == 3 and a.config.cohort == 3
    whole = undrift.run(
        model=tiny_mlp(), data=(TensorDataset(x, y), test), partition="iid", clients=5, cohort=5, rounds=2
    )
    assert len(whole.records) == 2


def test_own_loss_and_metrics() -> None:
    random_ = np.random.default_rng(0)
    x = random_.normal(size=(80, 4)).astype(np.float32)
    y = x @ np.array([[1.0], [2.0], [-1.0], [0.5]], dtype=np.float32)
    result = undrift.run(
        model=nn.Linear(4, 1),
        data=(x[:60], y[:60], x[60:], y[60:]),
        loss=F.mse_loss,
        partition="iid",
        clients=4,
        cohort=2,
        rounds=40,
        metrics={"worst": lambda o, t: (o - t).abs().amax(), "error": lambda o, t: (o - t).abs().squeeze(-1)},
        eval_every=1,
    )
    first, last = result.records[0], result.records[-1]
    assert last["loss"] < 1e-3 * first["loss"] and last["accuracy"] is None
    assert 0 < last["error"] < last["worst"] < first["worst"]


def test_validation_split_is_held_out_and_scored() -> None:
    result = undrift.run(rounds=3, val_fraction=0.2, **QUICK)
    assert 0 <= result.records[-1]["val_accuracy"] <= 1 and result.records[-1]["val_loss"] > 0
    from undrift.data.federation import federate
    from undrift.data.load import load_dataset

    fed = federate(load_dataset("digits"), "iid", 10, 0, torch.device("cpu"), 0.2)
    assert len(fed.validation) == round(0.2 * 1438)
    assert not set(fed.validation) & set(fed.members.tolist()) and len(fed.members) + len(fed.validation) == 1438


def test_stop_at_accuracy_and_time(tmp_path: Path) -> None:
    by_accuracy = undrift.run(rounds=400, stop_at="accuracy=0.5", **(QUICK | {"eval_every": 1}))
    assert by_accuracy.stopped == "accuracy" and by_accuracy.accuracy >= 0.5 and len(by_accuracy.records) < 400
    by_time = undrift.run(rounds=10**6, stop_at="time=1s", out=tmp_path / "t", **QUICK)
    assert by_time.stopped == "time" and 1 < len(by_time.records) < 10**6
    assert (tmp_path / "t/model.safetensors").exists()


def test_own_algorithm_class_object_and_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from undrift.algorithms.fedprox import FedProx

    by_object = undrift.run(algorithm=FedProx(mu=0.3), rounds=2, **QUICK)
    by_name = undrift.run(algorithm="fedprox", set={"mu": 0.3}, rounds=2, **QUICK)
    assert timeless(by_object.records) == timeless(by_name.records) and by_object.config == by_name.config
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom torch import nn\nfrom undrift.algorithms.fedprox import FedProx as Mine\n"
        "def net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], classes))\n"
        "def arrays():\n    r = np.random.default_rng(0)\n    x = r.normal(size=(90, 6)); y = (x[:, 0] > 0).astype(int)\n"
        "    return x[:60], y[:60], x[60:], y[60:]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = cli.main(
        [
            "run",
            "--algorithm",
            "mine:Mine",
            "--model",
            "mine:net",
            "--dataset",
            "mine:arrays",
            "--partition",
            "iid",
            "--clients",
            "6",
            "--cohort",
            "3",
            "--rounds",
            "5",
            "--set",
            "mu=0.2",
            "--out",
            "o",
        ]
    )
    assert code == 0
    stored = tomllib.loads((tmp_path / "o/run.toml").read_text())
    assert stored["algorithm"] == "mine:Mine" and stored["set"]["mu"] == 0.2


# Resume


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
def test_kill_9_many_times_and_resume(name: str, attempt: int, tmp_path: Path) -> None:
    draw = random.Random(attempt)
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


# Bad input


BAD_COMMANDS = [
    ("run --algorithm gradma-ss", "did you mean 'gradma-s'"),
    ("run --algoritm fedavg", "did you mean '--algorithm'"),
    ("run --dataset digit", "did you mean 'digits'"),
    ("run --model lenet", "did you mean 'lenet5'"),
    ("run --partition dirichlett:1", "did you mean 'dirichlet'"),
    ("run --algorithm fedprox --set nu=1", "did you mean 'mu'"),
    ("run --set lr", "FIELD=VALUE"),
    ("run --clients 5 --cohort 6", "cannot be drawn from 5 clients"),
    ("run --algorithm gradma-s --set slots=5", "slots must be 0 or at least"),
    ("run --clients 5000", "5000"),
    ("run --set lr=nan", "lr must be"),
    ("run --set lr=-1", "lr must be"),
    ("run --set lr=fast", "lr must be float"),
    ("run --algorithm fedavgm --set beta1=1.5", "beta1 must lie in"),
    ("run --val-fraction nan", "val_fraction must"),
    ("run --val-fraction 1.0", "val_fraction must"),
    ("run --partition dirichlet:-1", "dirichlet"),
    ("run --partition dirichlet:nan", "dirichlet"),
    ("run --steps 5 --epochs 1", "not both"),
    ("run --rounds -3", "rounds must be at least 0"),
    ("run --stop-at accuracy=high", "stop_at"),
    ("run --weights sized", "did you mean 'size'"),
    ("run --set optimizer=adamw", "did you mean 'adam'"),
    ("run --device tpu", "tpu"),
    ("run --rounds many", "invalid int value"),
    ("run --algorithm nowhere.at:All", "cannot import"),
    ("run --algorithm undrift.algorithms.fedavg:FedAvrg", "did you mean 'FedAvg'"),
    ("run --model lenet5", "lenet"),
    ("run --resume", "no run"),
    ("run missing.toml", "cannot read"),
    ("run broken.toml", "not valid TOML"),
    ("run unknown.toml", "did you mean 'rounds'"),
    ("sweep broken.toml --out s", "not valid TOML"),
    ("sweep swept.toml --out s", "did you mean 'seeds'"),
    ("report nowhere --out r.html", "nowhere"),
    ("list algorithm", "did you mean 'algorithms'"),
    ("cite fedavgg", "did you mean 'fedavg'"),
    ("data shows", "did you mean 'show'"),
    ("frobnicate", "invalid choice"),
]


@pytest.mark.parametrize(("command", "says"), BAD_COMMANDS)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    command: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDRIFT_DATA", raising=False)
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    (tmp_path / "unknown.toml").write_text("round = 3")
    (tmp_path / "swept.toml").write_text("[sweep]\nseds = [1]")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(command.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith("undrift: ") and said.err.count("\n") == 1, said.err
    assert says in said.err
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


def test_a_missing_data_set_names_three_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNDRIFT_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MissingData, match=r"UNDRIFT_DATA.*"):
        undrift.run(dataset="cifar10", rounds=1)


def test_an_out_that_holds_another_run_is_left_alone(tmp_path: Path) -> None:
    undrift.run(QUICK | {"rounds": 2}, out=tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(BadRunFolder, match="holds a run already"):
        undrift.run(QUICK | {"rounds": 2}, out=tmp_path)
    with pytest.raises(BadRunFolder, match="its seed is 0, not 9"):
        undrift.run(out=tmp_path, resume=True, seed=9)
    with pytest.raises(BadRunFolder, match="its lr is 0.1, not 0.3"):
        undrift.run(out=tmp_path, resume=True, set={"lr": 0.3})
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("harm", ["flip", "truncate", "json", "gone", "rounds", "toml"])
def test_a_damaged_checkpoint_is_refused_and_kept(harm: str, tmp_path: Path) -> None:
    undrift.run(QUICK | {"rounds": 3}, out=tmp_path)
    tensors = next((tmp_path / "checkpoint").glob("*.safetensors"))
    content = tensors.read_bytes()
    if harm == "flip":
        tensors.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif harm == "truncate":
        tensors.write_bytes(content[:100])
    elif harm == "gone":
        tensors.unlink()
    elif harm == "json":
        (tmp_path / "checkpoint/latest.json").write_text('{"round": 3')
    elif harm == "rounds":
        (tmp_path / "rounds.jsonl").write_text("")
    else:
        (tmp_path / "run.toml").write_text("algorithm = ")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(BadRunFolder):
        undrift.run(out=tmp_path, resume=True, rounds=5)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_bad_data_from_python() -> None:
    with pytest.raises(BadData, match="3 inputs but 2 targets"):
        undrift.run(model=tiny_mlp(), data=(np.zeros((3, 5)), [0, 1], np.zeros((1, 5)), [0]))
    with pytest.raises(BadData, match="lacks y_test"):
        undrift.run(model=tiny_mlp(), data={"x_train": 0, "y_train": 0, "x_test": 0})
    with pytest.raises(UnknownName, match="did you mean 'rounds'"):
        undrift.run(round=3)
    with pytest.raises(BadSetting, match="carries its own fields"):
        undrift.run(algorithm=undrift_fedavg(), set={"lr": 1.0})
    assert issubclass(BadSetting, UndriftError)


def undrift_fedavg() -> Any:
    from undrift.algorithms.fedavg import FedAvg

    return FedAvg()


# Sweeps and the rest of the command line


SWEEP = """
clients = 12
cohort = 4
steps = 2
batch = 8
model = "logreg"
rounds = 4
eval_every = 2
val_fraction = 0.2
[sweep]
algorithms = ["fedavg", "fedprox"]
seeds = [0, 1]
target = 0.3
[sweep.grid]
lr = [0.1, 0.05]
[sweep.only.fedprox]
mu = 0.5
"""


def test_a_sweep_runs_everything_once_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.toml").write_text(SWEEP)
    command = f"sweep {tmp_path / 's.toml'} --out {tmp_path / 'o'} --processes 1".split()
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    folders = sorted(p.parent for p in (tmp_path / "o").glob("*/run.toml"))
    assert len(folders) == 8 and (tmp_path / "o/fedprox-lr=0.05-seed=1").is_dir()
    assert tomllib.loads((tmp_path / "o/fedprox-lr=0.05-seed=1/run.toml").read_text())["set"]["mu"] == 0.5
    assert "picked on validation" in said and "(chosen on test)" not in said
    assert "fedprox" in (tmp_path / "o/report.html").read_text()
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "o").rglob("rounds.jsonl")}
    victim = folders[0]
    (victim / "checkpoint/latest.json").unlink()  # as if it had been killed before its first checkpoint
    (victim / "model.safetensors").unlink()
    assert cli.main(command) == 0
    again = {p: p.stat().st_mtime_ns for p in (tmp_path / "o").rglob("rounds.jsonl")}
    assert [p.parent for p in stamps if stamps[p] != again[p]] == [victim], "a finished run is not run again"


def test_list_cite_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNDRIFT_DATA", raising=False)
    for kind, name in (
        ("algorithms", "gradma-s"),
        ("datasets", "digits"),
        ("models", "resnet20-gn"),
        ("partitions", "dirichlet-balanced"),
    ):
        assert cli.main(["list", kind, "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert name in [entry["name"] for entry in listed] and all(entry["about"] for entry in listed)
        assert cli.main(["list", kind]) == 0
        assert name in capsys.readouterr().out
    assert cli.main(["cite", "gradma-s"]) == 0
    assert "@inproceedings{luo2023gradma" in capsys.readouterr().out
    assert cli.main(["data", "show", "digits", "--clients", "20", "--out", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["data", "prepare", "digits", "--out", str(tmp_path / "digits.npz")]) == 0
    assert np.load(tmp_path / "digits.npz")["x_train"].shape == (1438, 8, 8, 1)
    assert cli.main(["data", "prepare", "digits", "--out", str(tmp_path / "digits.npz")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_flags_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'rounds = 2\nclients = 9\ncohort = 3\nmodel = "logreg"\nepochs = 1.0\n[set]\nlr = 0.3\n'
    )
    code = cli.main(
        f"run {tmp_path / 'c.toml'} --clients 8 --steps 2 --set weight_decay=0.01 --out {tmp_path / 'o'}".split()
    )
    stored = tomllib.loads((tmp_path / "o/run.toml").read_text())
    assert code == 0 and (stored["rounds"], stored["clients"], stored["steps"], stored["epochs"]) == (2, 8, 2, 0.0)
    assert stored["set"]["lr"] == 0.3 and stored["set"]["weight_decay"] == 0.01


def test_colour_and_augmentation_are_drawn_from_streams() -> None:
    from undrift.data.augment import Transform

    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    keys, clients = torch.arange(6), torch.tensor([0, 0, 0, 1, 1, 1])
    plain = Transform((0.5,) * 3, (0.5,) * 3)
    assert torch.equal(plain(images, torch.float32, keys, clients), plain(images, torch.float32))
    moved = Transform(crop=2, flip=True)(images, torch.float64, keys, clients)
    assert torch.equal(moved[2:4], Transform(crop=2, flip=True)(images[2:4], torch.float64, keys[2:4], clients[2:4]))
    padded = F.pad(images.double() / 255, (2, 2, 2, 2))
    for i in range(6):  # every picture is one of the 25 crops, straight or flipped
        crops = [padded[i, :, a : a + 8, b : b + 8] for a in range(5) for b in range(5)]
        assert any(torch.equal(moved[i], c) or torch.equal(moved[i], c.flip(-1)) for c in crops)
    coloured = Transform(colour=0.5, seed=1)
    tinted = coloured(images, torch.float64, keys, clients)
    same = coloured(images[:1].expand(6, 3, 8, 8), torch.float64, keys, clients)
    assert torch.equal(same[0], same[2]) and not torch.equal(same[0], same[3]), "the tint belongs to the client"
    assert tinted.min() >= 0 and tinted.max() <= 1
    assert torch.equal(coloured(images, torch.float64), images.double() / 255), "test images are unchanged"
    assert math.isclose(
        float(Transform(colour=0.0)(images, torch.float64, keys, clients).sum()), float((images.double() / 255).sum())
    )


def test_resume_keeps_the_fields_that_are_not_named_again(tmp_path: Path) -> None:
    undrift.run(QUICK | {"rounds": 2}, algorithm="fedprox", set={"mu": 1.0, "lr": 0.05}, out=tmp_path)
    resumed = undrift.run(out=tmp_path, resume=True, rounds=4, set={"lr": 0.05})
    whole = undrift.run(QUICK | {"rounds": 4}, algorithm="fedprox", set={"mu": 1.0, "lr": 0.05})
    assert resumed.config.set["mu"] == 1.0
    assert [r["train_loss"] for r in resumed.records] == [r["train_loss"] for r in whole.records]


def test_losses_and_metrics_that_would_be_misread_are_refused() -> None:
    own, settings = data((30, 30)), {"partition": "sites", "clients": 2, "cohort": 2, "rounds": 2}
    with pytest.raises(BadSetting, match="reduction='none'"):
        undrift.run(settings, model=tiny_mlp(), data=own, loss=nn.CrossEntropyLoss(weight=torch.ones(3)))
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([9.0, 1.0, 1.0]), reduction="none")
    plain = undrift.run(settings, model=tiny_mlp(), data=own, loss=nn.CrossEntropyLoss())
    heavy = undrift.run(settings, model=tiny_mlp(), data=own, loss=weighted)
    assert plain.accuracy is not None and not torch.equal(plain.model["0.weight"], heavy.model["0.weight"])
    with pytest.raises(BadSetting, match="cannot be called 'loss'"):
        undrift.run(settings, model=tiny_mlp(), data=own, metrics={"loss": lambda o, t: o.mean()})
    with pytest.raises(BadSetting, match="no class labels"):
        undrift.run(
            model=nn.Linear(2, 1), data=(np.ones((9, 2)), np.ones(9), np.ones((1, 2)), np.ones(1)), clients=3, cohort=1
        )


def test_an_image_folder_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are read for the batches that need them, ahead of time, and never held whole."""
    from PIL import Image

    from undrift.data._image_files import ImageFiles

    random_ = np.random.default_rng(0)
    for part, count in (("train", 9), ("val", 3)):
        for label in ("cat", "dog"):
            (tmp_path / part / label).mkdir(parents=True)
            for n in range(count):
                pixels = random_.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / label / f"{n}.png")
    taken: list[int] = []
    ahead: list[int] = []
    take, prefetch = ImageFiles.__getitem__, ImageFiles.prefetch
    monkeypatch.setattr(ImageFiles, "__getitem__", lambda self, index: taken.append(len(index)) or take(self, index))
    monkeypatch.setattr(ImageFiles, "prefetch", lambda self, index: ahead.append(len(index)) or prefetch(self, index))
    settings = {"dataset": f"imagefolder:{tmp_path}", "model": "logreg", "partition": "iid", "clients": 3, "cohort": 2}
    result = undrift.run(settings, rounds=2, steps=2, batch=3, set={"lr": 0.001}, execution="stacked")
    assert result.model["head.1.weight"].shape[1] == 3 * 224 * 224
    assert taken.pop() == 18, "the clients' scores of the last round"
    assert max(taken) == 6 and ahead and max(ahead) == 6, "two clients with batches of three, not the eighteen pictures"


# What an examiner broke


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


def test_two_processes_cannot_run_in_one_folder(tmp_path: Path) -> None:
    from undrift.jobs.folder import RunFolder

    undrift.run(QUICK | {"rounds": 2}, out=tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys,time\nfrom pathlib import Path\nfrom undrift.jobs.folder import RunFolder\n"
         "with RunFolder(Path(sys.argv[1])).locked():\n    print('held', flush=True)\n    time.sleep(60)", str(tmp_path)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(BadRunFolder, match="another process"):
            undrift.run(out=tmp_path, resume=True, rounds=4)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()  # type: ignore[union-attr]
    with RunFolder(tmp_path).locked():
        pass


def test_sweeps_name_their_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        "mpl": SWEEP.replace('"logreg"', '"mpl"'),
        "iidd": SWEEP.replace("clients = 12", 'clients = 12\npartition = "iidd"'),
        "different values": SWEEP.replace("[0, 1]", "[0, 0]"),
        "empty list": SWEEP.replace("[0.1, 0.05]", "[]"),
        "target must be": SWEEP.replace("0.3", '"high"'),
        "seeds must be a list of one or more": SWEEP.replace("[0, 1]", "[]"),
        "fedavg-lr=0.1-seed=0 and fedavg-lr=0.1-seed=0 are the same run": SWEEP.replace("0.05", "0.1"),
        "fedavg-lr=1-seed=0 and fedavg-lr=1.0-seed=0 are the same run": SWEEP.replace("[0.1, 0.05]", "[1, 1.0]"),
        "list its values as seeds": SWEEP.replace("lr = [0.1, 0.05]", "seed = [3, 4]"),
        "fedprox-lr=0.1-seed=0: mu must be": SWEEP.replace("mu = 0.5", "mu = -0.5"),
        "[sweep.grid] must be a table": "sweep.grid = 3",
        "[sweep.only.fedavg] must be a table": "sweep.only.fedavg = 3",
        "[sweep] must be a table": "sweep = 3",
    }
    for says, text in wrong.items():
        (tmp_path / "s.toml").write_text(text)
        assert cli.main(f"sweep {tmp_path / 's.toml'} --out {tmp_path / 'o'} --processes 1".split()) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_sweep_of_which_nothing_could_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.toml").write_text('partition = "dirichlet:x"')
    assert cli.main(f"sweep {tmp_path / 's.toml'} --out {tmp_path / 'o'} --processes 1".split()) == 1
    told = capsys.readouterr().err
    assert "fedavg-seed=0 failed: partition 'dirichlet' needs a number" in told and told.count("undrift:") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_sweep_that_is_ended_says_how_to_go_on_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SWEEP.replace("rounds = 4", "rounds = 1000000"))
    command = [sys.executable, "-m", "undrift", "sweep", tmp_path / "s.toml", "--processes", "1", "--out"]

    def session(first: int) -> list[int]:
        found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        with_session = []
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                with_session += [pid] if os.getsid(pid) == first else []
        return with_session

    for how, says in ((signal.SIGINT, "stopped; the same command again goes on"), (signal.SIGKILL, "")):
        out = tmp_path / how.name
        process = subprocess.Popen(
            [*command, out], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores Ctrl-C
        )  # fmt: skip
        while not list(out.glob("*/rounds.jsonl")) and process.poll() is None:
            time.sleep(0.05)
        (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)  # ^C reaches all, kill -9 only the first
        assert says in process.communicate()[1]
        until = time.monotonic() + 60
        while (left := session(process.pid)) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "the sweep's helpers went on without it"


def test_a_sweep_that_loses_a_process_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SWEEP.replace("rounds = 4", "rounds = 1000000"))
    jobs, _ = plan(tmp_path / "s.toml")

    def kill(*news: Any) -> None:
        for child in multiprocessing.active_children():
            if not child.name.startswith("SyncManager"):
                child.kill()

    failed = run_all(jobs[:1], tmp_path / "o", 1, kill, print)
    assert "the same command again goes on" in failed[jobs[0].name]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no such thing")
def test_a_sweep_takes_only_the_cores_that_it_may_use() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cli.default_processes("cpu") == 1
    finally:
        os.sched_setaffinity(0, before)


def test_the_bar_of_a_resumed_run_has_its_own_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = f"run --clients 8 --cohort 2 --model logreg --out {tmp_path} --rounds"
    assert cli.main(f"{small} 1 --algorithm scaffold".split()) == 0
    capsys.readouterr()
    assert cli.main(f"run --out {tmp_path} --rounds 2 --resume".split()) == 0
    assert capsys.readouterr().out.lstrip().startswith("scaffold")


def test_a_sweep_goes_on_with_what_a_run_chose_for_itself(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('clients = 8\ncohort = 2\nmodel = "logreg"\nrounds = 2\n[sweep]\nseeds = [0]\n')
    command = f"sweep {tmp_path / 's.toml'} --out {tmp_path / 'o'} --processes 1".split()
    assert cli.main(command) == 0
    (folder,) = (tmp_path / "o").glob("*/")
    settings = folder / "run.toml"  # of a run on a GPU, which writes down whether it compiled
    settings.write_text(settings.read_text().replace('compile = "auto"', 'compile = "off"'))
    assert 'compile = "off"' in settings.read_text()
    assert cli.main(command) == 0
    (tmp_path / "s.toml").write_text((tmp_path / "s.toml").read_text().replace("rounds = 2", "rounds = 3"))
    assert cli.main(command) == 0
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 3
    assert 'compile = "off"' in settings.read_text(), "it goes on as it was begun"


def test_a_sweep_does_not_pass_off_old_results_as_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = 'clients = 8\ncohort = 2\nmodel = "logreg"\nrounds = 1\n[set]\nlr = 0.1\n[sweep]\nseeds = [0]\n'
    (tmp_path / "s.toml").write_text(small)
    command = f"sweep {tmp_path / 's.toml'} --out {tmp_path / 'o'} --processes 1".split()
    assert cli.main(command) == 0
    (tmp_path / "s.toml").write_text(small.replace("lr = 0.1", "lr = 0.5"))
    capsys.readouterr()
    assert cli.main(command) == 1
    assert "its lr is 0.1, not 0.5" in capsys.readouterr().err


def test_resume_through_a_configuration_keeps_the_execution(tmp_path: Path) -> None:
    first = undrift.run(QUICK | {"rounds": 2, "execution": "pool"}, out=tmp_path)
    from dataclasses import replace as changed

    undrift.run(changed(first.config, rounds=3, execution="auto"), out=tmp_path, resume=True)
    assert tomllib.loads((tmp_path / "run.toml").read_text())["execution"] == "pool"


def test_models_by_function_and_odd_models() -> None:
    own, federation = data((30, 30)), {"partition": "sites", "clients": 2, "cohort": 2, "rounds": 1}
    by_function = undrift.run(federation, model=lambda shape, classes: nn.Linear(shape[0], classes), data=own)
    assert by_function.model["weight"].shape == (3, 5)
    with pytest.raises(BadSetting, match="must return one tensor"):
        undrift.run(federation, model=TwoOutputs(), data=own)
    with pytest.raises(BadSetting, match="failed on samples of shape"):
        undrift.run(federation, model=nn.Linear(4, 3), data=own)
    with pytest.raises(BadSetting, match="not both"):
        undrift.run(federation, model=tiny_mlp(), data=own, dataset="digits")
    with pytest.raises(BadSetting, match="track_running_stats"):
        undrift.run(
            federation, model=nn.Sequential(nn.InstanceNorm1d(5, track_running_stats=True), tiny_mlp()), data=own
        )
    labels = np.asarray(own.y_train) + 1
    with pytest.raises(BadData, match="labels run from 0 to 3"):
        undrift.run(
            federation | {"partition": "iid"}, model=tiny_mlp(), data=(own.x_train, labels, own.x_test, own.y_test)
        )
    with pytest.raises(BadData, match="must be numbers"):
        undrift.run(federation, model=tiny_mlp(), data=(np.array([["a"]]), [0], np.array([["a"]]), [0]))
    without_test = undrift.run(
        federation | {"partition": "iid"},
        model=tiny_mlp(),
        data=(own.x_train, own.y_train, own.x_test[:0], own.y_test[:0]),
    )
    assert without_test.records[-1]["loss"] is None


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_mlp()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x), x


def test_settings_that_mean_nothing_are_refused() -> None:
    for setting in ({"steps": 0}, {"epochs": 0.0}, {"stop_at": "accuracy=90"}, {"set": 3}, {"set": {"lr": 1e39}}):
        with pytest.raises(UndriftError):
            undrift.run(setting, rounds=1)
    assert (
        undrift.run(
            {"steps": 5, **{k: v for k, v in QUICK.items() if k != "steps"}}, rounds=1, epochs=1.0
        ).config.epochs
        == 1.0
    )


def test_token_ids_are_not_pictures() -> None:
    random_ = np.random.default_rng(0)
    x, y = random_.integers(0, 50, (40, 7), dtype=np.uint8), random_.integers(0, 3, 40)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(56, 3))
    assert (
        undrift.run(
            model=model, data=(x[:30], y[:30], x[30:], y[30:]), partition="iid", clients=3, cohort=2, rounds=2
        ).accuracy
        is not None
    )


def test_a_sweep_falls_back_on_another_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "s.toml").write_text('dataset = "svhn"\n[sweep]\nelse_dataset = "digits"')
    assert plan(tmp_path / "s.toml")[0][0].config.dataset == "digits"
    (tmp_path / "s.toml").write_text('dataset = "digits"\n[sweep]\nelse_dataset = "svhn"')
    assert plan(tmp_path / "s.toml")[0][0].config.dataset == "digits"
