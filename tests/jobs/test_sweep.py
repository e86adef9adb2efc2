"""Sweeps: every run once, mistakes that are named, processes that die, and going on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
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

import pytest
import torch
from safetensors.torch import load_file

from tests.reliability import counted
from tests.small import read_rounds, timeless
from undrift import cli, run
from undrift.core.seals import seal_toml, unseal_toml
from undrift.jobs.crew import default_size
from undrift.jobs.folder import RunFolder
from undrift.jobs.sweep import Job, _is_finished, plan, run_all

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
    for file in (victim / "checkpoint").iterdir():
        file.unlink()  # as if it had been killed before its first checkpoint
    (victim / "model.safetensors").unlink()
    assert cli.main(command) == 0
    again = {p: p.stat().st_mtime_ns for p in (tmp_path / "o").rglob("rounds.jsonl")}
    assert [p.parent for p in stamps if stamps[p] != again[p]] == [victim], "a finished run is not run again"


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
    (tmp_path / "s.toml").write_text('partition = "dirichlet:x"\n[sweep]')
    assert cli.main(f"sweep {tmp_path / 's.toml'} --out {tmp_path / 'o'} --processes 1".split()) == 1
    told = capsys.readouterr().err
    assert "fedavg-seed=0 failed: partition 'dirichlet' needs a number" in told and told.count("undrift:") == 1


def session(first: int) -> list[int]:
    """The processes of the session that this one began."""
    pids = []
    for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]:
        with contextlib.suppress(ProcessLookupError):
            pids += [pid] if os.getsid(pid) == first else []
    return pids


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_sweep_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SWEEP.replace("rounds = 4", "rounds = 1000000"))
    command = [
        sys.executable,
        "-m",
        "undrift",
        "sweep",
        tmp_path / "s.toml",
        "--processes",
        "1",
        "--out",
        tmp_path / "o",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while not list(tmp_path.glob("o/*/rounds.jsonl")) and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.wait()
    until = time.monotonic() + 60
    while (left := session(process.pid)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "the sweep's helpers went on without it"


def test_a_killed_process_of_a_sweep_is_replaced_and_its_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SWEEP.replace("rounds = 4", "rounds = 300\ncheckpoint_every = 20"))
    jobs, killed, said, told = plan(tmp_path / "s.toml")[0][:2], [], [], []

    def kill(name: str, done: int, rounds: int) -> None:
        told.append(done)
        if not killed and 50 <= done < rounds:
            (child,) = multiprocessing.active_children()
            killed.append(child.pid)
            child.kill()

    assert run_all(jobs, tmp_path / "o", 1, kill, said.append) == {}
    assert killed and "died (exit code -9); the run goes on from its checkpoint" in "".join(said)
    assert told.count(1) == 2, "no run was begun again"
    for job in jobs:
        whole = run(job.config)
        records = [json.loads(line) for line in (tmp_path / "o" / job.name / "rounds.jsonl").read_text().splitlines()]
        assert timeless(records) == timeless(whole.records)
        model = load_file(tmp_path / "o" / job.name / "model.safetensors")
        assert all(torch.equal(model[name], tensor) for name, tensor in whole.model.items())


@pytest.mark.system
@pytest.mark.parametrize("pack", [False, True])
def test_killed_processes_of_a_sweep_are_replaced(
    pack: bool, tmp_path: Path, pytestconfig: pytest.Config, count: Any
) -> None:
    """Two runs in two processes, or both packed in one; whichever process works is killed after drawn numbers of rounds."""
    with counted(count, "kill -9 of a process of a sweep", 2):
        draw = random.Random(f"{pack} {pytestconfig.getoption('seed')}")
        check_killed_processes(tmp_path, pack, [draw.randint(5, 120) for _ in range(2)])


def check_killed_processes(folder: Path, pack: bool, after: list[int]) -> None:
    (folder / "s.toml").write_text(SWEEP.replace("rounds = 4", "rounds = 150\ncheckpoint_every = 20"))
    jobs, moments, said = plan(folder / "s.toml")[0][:2], list(after), []
    told = 0

    def kill(name: str, done: int, rounds: int) -> None:
        nonlocal told
        told += 1
        if moments and told >= moments[0] and done < rounds:
            told = 0
            moments.pop(0)
            multiprocessing.active_children()[0].kill()

    assert run_all(jobs, folder / "o", 1 if pack else 2, kill, said.append, pack) == {}
    assert not moments and "".join(said).count("died (exit code -9)") == len(after)
    for job in jobs:
        whole = run(job.config)
        assert timeless(read_rounds(folder / "o" / job.name)) == timeless(whole.records)
        model = load_file(folder / "o" / job.name / "model.safetensors")
        close = 0.0 if not pack else 1e-5  # a pack of two and a run alone round differently
        assert all(torch.allclose(model[name], tensor, atol=close, rtol=close) for name, tensor in whole.model.items())


def test_a_run_whose_process_dies_again_and_again_is_given_up_and_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SWEEP)
    jobs, killed = plan(tmp_path / "s.toml")[0][:3], set[int | None]()

    def kill(name: str, done: int, rounds: int) -> None:
        if name == jobs[1].name:
            for child in multiprocessing.active_children():
                child.kill()
                killed.add(child.pid)  # once, though several of its messages may come

    jobs[1] = jobs[1]._replace(config=dataclasses.replace(jobs[1].config, rounds=1000000))
    failed = run_all(jobs, tmp_path / "o", 1, kill, print)
    assert list(failed) == [jobs[1].name] and len(killed) == 3
    assert "died 3 times" in failed[jobs[1].name] and "the same command again goes on" in failed[jobs[1].name]
    assert all((tmp_path / "o" / job.name / "model.safetensors").exists() for job in (jobs[0], jobs[2]))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no such thing")
def test_a_sweep_takes_only_the_cores_that_it_may_use() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert default_size("cpu") == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_sweep_goes_on_with_what_a_run_chose_for_itself(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('clients = 8\ncohort = 2\nmodel = "logreg"\nrounds = 2\n[sweep]\nseeds = [0]\n')
    command = f"sweep {tmp_path / 's.toml'} --out {tmp_path / 'o'} --processes 1".split()
    assert cli.main(command) == 0
    (folder,) = (tmp_path / "o").glob("*/")
    settings = folder / "run.toml"  # of a run on a GPU, which writes down whether it compiled
    text, run = unseal_toml(settings.read_bytes())
    settings.write_bytes(seal_toml(text.replace('compile = "auto"', 'compile = "off"'), run))
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


def test_a_sweep_falls_back_on_another_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "s.toml").write_text('dataset = "svhn"\n[sweep]\nelse_dataset = "digits"')
    assert plan(tmp_path / "s.toml")[0][0].config.dataset == "digits"
    (tmp_path / "s.toml").write_text('dataset = "digits"\n[sweep]\nelse_dataset = "svhn"')
    assert plan(tmp_path / "s.toml")[0][0].config.dataset == "digits"


def test_a_run_that_ended_early_goes_on_where_the_sweep_wants_more(tmp_path: Path) -> None:
    given: dict[str, Any] = dict(clients=4, cohort=2, steps=1, model="logreg", rounds=3, eval_every=1)
    ended = run(out=tmp_path / "a", stop_at="accuracy=0.01", **given)
    assert len(ended.records) == 1 and _is_finished(Job("a", ended.config), RunFolder(tmp_path / "a"))
    for stop_at in ("accuracy=0.99", ""):
        assert not _is_finished(Job("a", dataclasses.replace(ended.config, stop_at=stop_at)), RunFolder(tmp_path / "a"))
    more = run(ended.config, out=tmp_path / "a", resume=True, stop_at="")
    assert len(more.records) == 3 and _is_finished(Job("a", more.config), RunFolder(tmp_path / "a"))
