"""Several processes give what one gives: real ones, started by torchrun."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.patience import patient, wait_for_rounds
from tests.reliability import counted
from tests.simulate.ranks_cases import ROUNDS, cases, outcome
from undrift import cli
from undrift.simulate.sharded import shares

ROOT = Path(__file__).parents[2]
SMALL = {"clients": 30, "cohort": 6, "steps": 2, "batch": 8, "model": "logreg", "eval_every": 10, "checkpoint_every": 7}
SETTINGS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def torchrun(processes: int, *command: str, **environment: str) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.Popen(
        [sys.executable, *launch, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
    )


def finished(process: subprocess.Popen[str], seconds: float = 100) -> tuple[int, str, str]:
    """The exit code and what was printed; a hang is a failure."""
    try:
        out, err = process.communicate(timeout=patient(seconds))
    finally:
        process.kill()
    return process.returncode, out, err


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "check")} for line in lines]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def check_cases(kind: str, processes: int, folder: Path) -> dict[str, float]:
    """Run the cases on several ranks and on one; the largest relative difference of the models in each case."""
    code, _, err = finished(torchrun(processes, "tests.simulate.ranks_cases", str(folder), kind))
    assert code == 0, err
    each = [torch.load(folder / f"{r}.pt") for r in range(processes)]
    differences = {}
    for case in cases(kind):
        alone, first = outcome(case), each[0][case]
        for other in each[1:]:  # all ranks hold the same state, bit for bit
            assert other[case]["execution"] == first["execution"], case
            assert "drifting" in case or all(
                torch.equal(t, first["tensors"][n]) for n, t in other[case]["tensors"].items()
            ), case
        tolerance = 1e-5 if "float32" in case else 1e-12
        differences[case] = max(relative(a, b) for a, b in zip(first["models"], alone["models"], strict=True))
        assert differences[case] <= tolerance, case
        assert first["tensors"].keys() == alone["tensors"].keys()
        for name, tensor in first["tensors"].items():
            torch.testing.assert_close(tensor, alone["tensors"][name], rtol=100 * tolerance, atol=100 * tolerance)
        for mine, theirs in zip(first["records"], alone["records"], strict=True):
            assert mine.keys() == theirs.keys(), case
            for name, value in mine.items():
                exact = isinstance(value, int) or value is None
                wanted = theirs[name] if exact else pytest.approx(theirs[name], 100 * tolerance, 1e-9, nan_ok=True)
                assert value == wanted, (case, name)
    return differences


def test_every_algorithm_gives_on_two_ranks_what_it_gives_on_one(tmp_path: Path) -> None:
    check_cases("all", 2, tmp_path)
    each = [torch.load(tmp_path / f"{r}.pt") for r in range(2)]
    for case in cases("all"):
        if "changing" in case:
            continue
        for t in range(ROUNDS):
            first, second = ([done for done in each[r][case]["worked"][t] if done[0] != "time"] for r in range(2))
            what = ["measure", "train"] if case.split()[0] == "mime" else ["train"]
            assert [w for w, _ in first] == [w for w, _ in second] == what, case
            for (_, mine), (_, theirs) in zip(first, second, strict=True):  # some clients each, nobody twice
                assert mine and theirs and len({*mine, *theirs}) == len(mine) + len(theirs), case
                assert len(mine) + len(theirs) == each[0][case]["records"][t]["clients"], case
    assert [r["dropped"] for r in each[0]["scaffold broken"]["records"]] == [1] * ROUNDS
    timed = [[what for what, _ in each[r]["fedavg auto"]["worked"][0]].count("time") for r in range(2)]
    assert timed[0] > 0 and timed[1] == 0, "rank 0 chooses the execution"


def test_more_ranks_than_clients(tmp_path: Path) -> None:
    check_cases("few", 3, tmp_path)
    each = [torch.load(tmp_path / f"{r}.pt") for r in range(3)]
    sizes = {r["clients"] - r["dropped"] for case in cases("few") for r in each[0][case]["records"]}
    assert sizes & {1, 2} and max(sizes) > 3, "cohorts below and above the number of ranks"
    ends = [each[r]["stopped clocks"] for r in range(3)]
    assert ends[0][0] == "time" and ends[0][1] > 0 and ends == [ends[0]] * 3, "rank 0 says when it is time to stop"


def test_shares_are_contiguous_balanced_and_complete() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        clients, ranks = int(draw.integers(1, 40)), int(draw.integers(1, 9))
        cost = draw.integers(1, 100, clients)
        sizes = shares(cost, ranks)
        assert len(sizes) == ranks and sizes.sum() == clients
        loads = [part.sum() for part in np.split(cost, np.cumsum(sizes)[:-1])]
        assert max(loads) <= cost.sum() / ranks + cost.max()
        equal = shares(np.ones(clients, dtype=np.int64), ranks)
        assert equal.max() - equal.min() <= 1


def test_a_run_of_two_processes_leaves_one_folder(tmp_path: Path) -> None:
    settings = ["run", "--algorithm", "mime", "--dtype", "float64", "--rounds", "20", *SETTINGS]
    code, out, err = finished(torchrun(2, "undrift", *settings, "--out", str(tmp_path / "two")))
    assert code == 0, err
    assert out.count("20 rounds, accuracy") == 1
    settled = tomllib.loads((tmp_path / "two/run.toml").read_text())
    assert settled["made"]["ranks"] == 2 and settled["execution"] in ("stacked", "pool")
    assert cli.main([*settings, "--out", str(tmp_path / "one")]) == 0
    assert tomllib.loads((tmp_path / "one/run.toml").read_text())["made"]["ranks"] == 1
    two, one = records(tmp_path / "two"), records(tmp_path / "one")
    assert [r["round"] for r in two] == list(range(1, 21))
    for mine, theirs in zip(two, one, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value == theirs[name] or value == pytest.approx(theirs[name], rel=1e-10), name
    models = [load_file(tmp_path / n / "model.safetensors") for n in ("one", "two")]
    assert max(relative(models[1][n], t) for n, t in models[0].items()) < 1e-12


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    """While the data are read, and in the middle of a round: rank 0 says what happened on rank 1."""
    (tmp_path / "odd.py").write_text(
        "import os\n"
        "from torch import nn\n"
        "from undrift.data.load import load_dataset\n"
        "from undrift.models import logreg\n\n"
        "def data():\n"
        "    if os.environ['RANK'] == '1' and os.environ['WHEN'] == 'first':\n"
        "        raise ValueError('no such disk')\n"
        "    return load_dataset('digits')\n\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self, inner):\n"
        "        super().__init__()\n"
        "        self.inner, self.calls = inner, 0\n\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if os.environ['RANK'] == '1' and self.calls > 40:\n"
        "            raise ValueError('tired')\n"
        "        return self.inner(x)\n\n"
        "def model(shape, classes):\n"
        "    return Odd(logreg.build(shape, classes))\n"
    )
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    command = ["--dataset", "odd:data", "--model", "odd:model", "--rounds", "500", "--execution", "stacked"]
    for when, message in (("first", "rank 1: odd:data failed: ValueError: no such disk"), ("later", "rank 1: ")):
        out = tmp_path / when
        process = torchrun(2, "undrift", "run", *command, "--out", str(out), PYTHONPATH=path, WHEN=when)
        code, _, err = finished(process)
        assert code != 0 and f"undrift: {message}" in err, err
        assert out.exists() == (when == "later"), "nothing is written before every rank is ready"
    assert "ValueError: tired" in err


def test_only_runs_are_shared_and_an_odd_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = torchrun(2, "undrift", "sweep", "quick", "--out", str(tmp_path / "sweep"))
    code, _, err = finished(sweep)
    assert (
        code != 0
        and err.count("undrift: torchrun is for undrift run, dataparallel and pipe; start 'undrift sweep' without it")
        == 1
    )
    assert not (tmp_path / "sweep").exists()
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for size, message in (("2", "WORLD_SIZE is 2, but there is no RANK"), ("many", "WORLD_SIZE must be the number")):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert cli.main(["run", "--rounds", "1", "--out", str(tmp_path / "odd")]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "odd").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.main(["run", *SETTINGS, "--rounds", "1", "--out", str(tmp_path / "one")]) == 0


def workers(launcher: int) -> Iterator[tuple[int, int]]:
    """(rank, process) of what torchrun started."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = dict(
            pair.split("=", 1) for pair in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in pair
        )
        if "RANK" in environment:
            yield int(environment["RANK"]), int(child)


def killed_run(folder: Path, victim: int, more: int, settings: list[str]) -> None:
    """Start a run of two ranks, kill -9 one of them after so many rounds, and see the run end by itself."""
    process = torchrun(2, "undrift", "run", *settings, "--out", str(folder))
    file = folder / "rounds.jsonl"
    wait_for_rounds(folder, more, process)
    os.kill(dict(workers(process.pid))[victim], signal.SIGKILL)
    code, out, err = finished(process, 40)
    assert code != 0 and "rounds, accuracy" not in out
    assert "SIGKILL" in err or "lost touch with the other processes" in err, err
    assert len(file.read_text().splitlines()) < 150, "the run must be killed before it ends"


def check_kills(name: str, folder: Path, kills: list[tuple[int, int]]) -> None:
    settings = ["--algorithm", name, *SETTINGS, "--rounds", "150", "--execution", "stacked"]
    code, _, err = finished(torchrun(2, "undrift", "run", *settings, "--out", str(folder / "whole")))
    assert code == 0, err
    for n, (victim, more) in enumerate(kills):
        killed_run(folder / "cut", victim, more, ["--resume"] if n else settings)
    code, _, err = finished(torchrun(2, "undrift", "run", "--resume", "--out", str(folder / "cut")))
    assert code == 0, err
    assert len(records(folder / "whole")) == 150 and records(folder / "whole") == records(folder / "cut")
    for file in ("model.safetensors", "checkpoint/round-000150.safetensors"):
        ours, theirs = (load_file(folder / f / file) for f in ("cut", "whole"))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], t) for n, t in theirs.items())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks' processes in /proc")
def test_kill_9_of_one_rank_ends_the_run_and_it_is_resumed(tmp_path: Path) -> None:
    check_kills("scaffold", tmp_path, [(1, 40)])


@pytest.mark.system
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks' processes in /proc")
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "gradma-s", "gradma", "fedmim", "mime"])
def test_kill_9_of_ranks_many_times(name: str, tmp_path: Path, pytestconfig: pytest.Config, count: Any) -> None:
    draw = random.Random(f"{name} {pytestconfig.getoption('seed')}")
    with counted(count, "kill -9 of one of two ranks and resume", 3):
        check_kills(name, tmp_path, [(n % 2, draw.randint(1, 40)) for n in range(3)])
