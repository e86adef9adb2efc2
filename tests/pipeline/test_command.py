"""`undrift pipe`: settings, records, resume, reports; in one process and in several that may die."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.patience import patient
from undrift import cli
from undrift.core.errors import BadRunFolder, BadSetting, UnknownName
from undrift.pipeline.engines import METHODS
from undrift.pipeline.train import run_pipe

ROOT = Path(__file__).parents[2]
MODEL = {
    "model": "tests.pipeline.own_models:build",
    "batch": 32,
    "steps": 12,
    "dtype": "float64",
    "lr": 0.05,
    "weight_decay": 1e-3,
}
CUTS = "3.0,4.0"
QUEUES = "1,1,0;4,2,0"


def records(folder: Path, leave: tuple[str, ...] = ("seconds",)) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("check", *leave))} for line in lines]


def same_model(one: Path, two: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, two))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flags(**settings: Any) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def alone(out: Path, rounds: int, resume: bool = False, **settings: Any) -> None:
    more = MODEL | {"cuts": CUTS, "queues": QUEUES, "rounds": rounds, "lr_drops": "2"} | settings
    run_pipe(out=out, resume=resume, **({"rounds": rounds} if resume else more))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_can_be_stopped_and_resumed(method: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "method": method,
        "queues": QUEUES if method == "dsp" else "",
        "cuts": "" if method == "bp" else CUTS,
    }
    settings |= {"momentum": 0.8, "lr": 0.02 if method == "dni" else 0.05}
    alone(tmp_path / "straight", 6, **settings)
    alone(tmp_path / "stopped", 3, **settings)
    alone(tmp_path / "stopped", 6, resume=True)
    assert records(tmp_path / "stopped") == records(tmp_path / "straight")
    assert same_model(tmp_path / "stopped", tmp_path / "straight")
    losses = [record["train_loss"] for record in records(tmp_path / "straight")]
    assert losses[-1] < losses[0] - 0.1, "it learns"
    assert records(tmp_path / "straight")[-1]["accuracy"] > 0.2
    assert tomllib.loads((tmp_path / "straight" / "run.toml").read_text())["algorithm"] == method
    stored = {name: value for name, value in records(tmp_path / "straight")[-1].items() if name.startswith("stored")}
    unknown = method in ("gpipe", "1f1b")  # PyTorch's schedules do not say
    assert not stored if unknown else stored and all(stored.values())


def test_methods_give_different_models_where_they_should(tmp_path: Path) -> None:
    for method in METHODS:
        queues, cuts = QUEUES if method == "dsp" else "", "" if method == "bp" else CUTS
        alone(tmp_path / method, 1, method=method, queues=queues, cuts=cuts)
    losses = {method: records(tmp_path / method)[0]["loss"] for method in METHODS}
    stale = [losses[method] for method in ("bp-k", "fr", "ddg", "dni", "dsp")]
    assert len(set(stale)) == len(stale)


def test_the_record_tells_of_queues_bytes_and_differences(tmp_path: Path) -> None:
    alone(tmp_path / "run", 2, differences=True, val_fraction=0.2)
    first, second = records(tmp_path / "run")
    assert first["gradients"] == 12 and second["val_accuracy"] > 0
    assert [second[f"stored_tensors_{k}"] for k in range(3)] == [5 + 2 + 1, 3 + 2 + 1, 1]
    assert second["stored_bytes_1"] == 6 * 32 * 32 * 8
    assert second["bytes_up"] == second["bytes_down"] == 12 * 2 * 32 * 32 * 8
    assert first["bytes_up"] == (12 + 11) * 32 * 32 * 8
    assert second["gradient_difference_0"] > 0 and second["gradient_difference_2"] == 0.0
    alone(tmp_path / "without", 2, val_fraction=0.2)
    same = ("gradient", "seconds")
    assert records(tmp_path / "without", same) == records(tmp_path / "run", same), "to measure changes nothing"


def test_rounds_without_a_loss_are_not_diverged_but_an_infinite_one_is(tmp_path: Path) -> None:
    """The last block of (3,3,0;10,5,0) forwards its first batch at timestamp 6."""
    queues, steps = "3,3,0;10,5,0", 5
    alone(tmp_path / "slow", 3, queues=queues, steps=steps)
    losses = [record["train_loss"] for record in records(tmp_path / "slow")]
    assert losses[0] is None and all(1 < loss < 4 for loss in losses[1:]), losses
    with pytest.warns(UserWarning, match="diverged and ends; the model of round .* is kept"):
        wild = run_pipe(
            **(MODEL | {"cuts": CUTS, "queues": queues, "steps": steps, "rounds": 9, "lr": 1e29, "dtype": "float32"})
        )
    assert wild.stopped == "diverged" and 1 < len(wild.records) < 9
    assert not math.isfinite(wild.records[-1]["train_loss"])


def test_automatic_cuts_are_kept_for_the_resumed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pipe", *flags(**(MODEL | {"queues": QUEUES, "rounds": 1})), "--out", str(tmp_path / "run")]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "block 2: from " in out and "balance " in out and "1 rounds, accuracy" in out
    before = tomllib.loads((tmp_path / "run" / "run.toml").read_text())["set"]
    assert before["blocks"] == 3 and before["cuts"].count(",") == 1 and before["queues"] == QUEUES
    assert cli.main(["pipe", "--out", str(tmp_path / "run"), "--resume", "--rounds", "2"]) == 0
    assert tomllib.loads((tmp_path / "run" / "run.toml").read_text())["set"] == before
    again = ["pipe", str(tmp_path / "run" / "run.toml"), "--out", str(tmp_path / "again")]
    assert cli.main(again) == 0
    assert records(tmp_path / "again") == records(tmp_path / "run")
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")]) == 0
    assert "undrift pipe " in (tmp_path / "report.html").read_text()
    assert "dsp" in capsys.readouterr().out


def test_the_timeline_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pipe", "--queues", QUEUES, "--schedule", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[3] == "2  F2       F1       F0 B0"


@pytest.mark.parametrize(
    ("given", "blocks", "rows"),
    [
        ({}, 3, 4 + 2),
        ({"cuts": "hidden2"}, 2, 2 + 2),
        ({"cuts": "hidden2", "method": "fr"}, 2, 1 + 2),
        ({"blocks": 4}, 4, 6 + 2),
        ({"method": "bp"}, 1, 0 + 2),
    ],
)
def test_the_timeline_has_the_blocks_of_the_run(
    given: dict[str, Any], blocks: int, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """m_0 + N timestamps."""
    assert cli.main(["pipe", *flags(**given), "--schedule", "2"]) == 0
    head, *table = capsys.readouterr().out.splitlines()
    assert head.count("block") == blocks and len(table) == rows


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["--schedule", "0"], "at least 1 batch, not 0"),
        (["--schedule", "-3"], "at least 1 batch, not -3"),
        (["--schedule", "3", "--method", "gpipe"], "PyTorch's own schedule"),
        (["--schedule", "3", "--method", "1f1b"], "PyTorch's own schedule"),
        (["--schedule", "3", "--cuts", "hidden2", "--blocks", "3"], "2 blocks, not 3"),
    ],
)
def test_a_timeline_that_there_is_not_is_refused(
    command: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pipe", *command]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "dps"}, "did you mean 'dsp'"),
        ({"method": "DSP"}, "did you mean 'dsp'"),
        ({"queues": "1,1,0;3,2,0"}, "nearest: 1,1,0;4,2,0"),
        ({"queues": QUEUES, "blocks": 2}, "for 3 blocks, not 2"),
        ({"method": "fr", "queues": QUEUES}, "queues are DSP's"),
        ({"method": "bp", "blocks": 2}, "bp-k"),
        ({"method": "gpipe", "micro": 5}, "does not divide"),
        ({"method": "1f1b", "micro": 2}, "at least as many micro-batches as blocks, 3, not 2"),
        ({"cuts": "hidden2", "blocks": 3}, "2 blocks, not 3"),
        ({"cuts": "²"}, "no layer '²' to cut at; the layers are "),
        ({"replicas": 2}, "torchrun"),
        ({"differences": True, "steps": 4}, "more than 4 batches"),
        ({"batch": 100_000}, "lower batch"),
        ({"lr": -1.0}, "lr must be"),
        ({"modle": "mlp"}, "did you mean 'model'"),
        ({"model": "vgg19"}, "at least 32x32"),
    ],
)
def test_mistakes_are_explained(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((BadSetting, UnknownName), match=said):
        run_pipe(**({"rounds": 1, "steps": 5, "batch": 32} | settings))


def test_a_run_is_not_shortened_by_resuming_it(tmp_path: Path) -> None:
    run_pipe(rounds=2, steps=2, batch=32, out=tmp_path / "r")
    settings = (tmp_path / "r" / "run.toml").read_bytes()
    with pytest.raises(BadSetting, match="holds 2 rounds already.*--rounds 2 or more"):
        run_pipe(out=tmp_path / "r", resume=True, rounds=1)
    assert (tmp_path / "r" / "run.toml").read_bytes() == settings


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    alone(tmp_path / "run", 1)
    with pytest.raises(BadRunFolder, match="its queues is"):
        run_pipe(out=tmp_path / "run", resume=True, queues="2,2,0;6,3,0", rounds=2)
    with pytest.raises(BadRunFolder, match="holds a run already"):
        alone(tmp_path / "run", 1)


def test_a_folder_that_holds_a_run_ends_all_blocks(tmp_path: Path) -> None:
    """Only the first one looks into it; the others are not to wait for a batch that never comes."""
    alone(tmp_path / "run", 1)
    command = ["pipe", *flags(**(MODEL | {"cuts": CUTS, "rounds": 1})), "--out", str(tmp_path / "run")]
    each = launched(3, *command)
    assert [code for code, _ in each] == [2, 2, 2], each
    assert "holds a run already" in each[0][1]


def launched(processes: int, *command: str, **environment: str) -> list[tuple[int, str]]:
    """Exit code and error output of each rank, started without torchrun, which would end them when one dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "undrift", *command],
            env=os.environ | common | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(processes)
    ]
    try:
        said = [process.communicate(timeout=patient(60))[1] for process in started]  # a hang is a failure
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def test_a_block_that_fails_ends_all_with_its_message(tmp_path: Path) -> None:
    """Block 2 of 3 raises in its 20th batch; block 0, which is not its neighbour, has to learn of it."""
    command = [
        "pipe",
        *flags(**(MODEL | {"cuts": CUTS, "queues": QUEUES, "rounds": 9})),
        "--out",
        str(tmp_path / "run"),
    ]
    each = launched(3, *command, FAIL_AT="20", FAIL_HOW="raise")
    assert [code for code, _ in each] == [2, 2, 1], each
    assert "rank 2: RuntimeError: the layer gave up" in each[0][1]


def test_a_block_that_is_killed_ends_all_and_the_run_goes_on_elsewhere(tmp_path: Path) -> None:
    """The last of two blocks is killed in the third round; one process goes on from the second, bit for bit."""
    settings = MODEL | {"cuts": "3.0", "queues": "1,0;2,0", "rounds": 4}
    command = ["pipe", *flags(**settings), "--out", str(tmp_path / "two")]
    each = launched(2, *command, FAIL_AT="30", FAIL_HOW="kill")
    assert each[1][0] == -9 and each[0][0] == 2, each
    assert "lost touch" in each[0][1]
    assert len(records(tmp_path / "two")) == 2
    run_pipe(out=tmp_path / "two", resume=True)
    run_pipe(out=tmp_path / "one", **settings)
    leave = ("seconds", "stored")  # processes hold other tensors than a simulation
    assert records(tmp_path / "two", leave) == records(tmp_path / "one", leave)
    assert same_model(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    ("processes", "more"),
    [
        (3, {"cuts": CUTS, "queues": QUEUES}),
        (3, {"cuts": CUTS, "method": "gpipe", "micro": 4}),
        (4, {"cuts": "3.0", "queues": "1,0;2,0", "replicas": 2}),
    ],
)
def test_a_last_block_that_is_killed_ends_those_who_are_not_its_neighbours(
    processes: int, more: dict[str, Any], tmp_path: Path
) -> None:
    command = ["pipe", *flags(**(MODEL | more | {"rounds": 9})), "--out", str(tmp_path / "run")]
    each = launched(processes, *command, FAIL_AT="20", FAIL_HOW="kill")
    survivors = [(code, said) for code, said in each if code != -9]
    assert each[-1][0] == -9 and survivors and all(code for code, _ in survivors), each
    assert all("lost touch" in said for _, said in survivors), each


@pytest.mark.parametrize("method", ["gpipe", "1f1b"])
def test_a_block_that_is_killed_ends_pytorchs_schedules_too(method: str, tmp_path: Path) -> None:
    settings = MODEL | {"method": method, "cuts": "3.0", "micro": 2, "rounds": 4}
    each = launched(2, "pipe", *flags(**settings), "--out", str(tmp_path / "run"), FAIL_AT="30", FAIL_HOW="kill")
    assert each[1][0] == -9 and each[0][0] not in (0, -9), each
    assert "lost touch" in each[0][1], each[0][1][-500:]
