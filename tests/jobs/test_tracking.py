"""What a run tells its trackers, in every command that trains, and that no tracker can end a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import undrift
from tests.deploy.test_sums import Answering
from tests.small import QUICK
from undrift import cli
from undrift.core.errors import BadSetting, UnknownName
from undrift.core.names import names
from undrift.core.run_files import read_settings
from undrift.deploy.run import deploy
from undrift.deploy.settings import Plan
from undrift.jobs.tracking import Scores, Tracked

HERE = f"{__name__}:Notes"
LOGREG = "--model logreg --dataset digits --device cpu"


class Notes:
    """A tracker that keeps what it is told."""

    told: list[Notes] = []
    fails = ""  # the method that raises an error

    def __init__(self, run: Tracked) -> None:
        self.fail("__init__")
        before = [notes for notes in self.told if notes.run.id == run.id]
        self.reached = before[-1].reached if before else 0
        self.run, self.scores, self.ended = run, list[Scores](), list[tuple[str, Path | None]]()
        self.told.append(self)

    def add(self, scores: Sequence[Scores]) -> None:
        self.fail("add")
        self.scores += scores

    def end(self, stopped: str, report: Path | None) -> None:
        self.fail("end")
        self.ended.append((stopped, report))

    @classmethod
    def fail(cls, method: str) -> None:
        if cls.fails == method:
            raise RuntimeError("the server\nis away")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notes, "told", [])
    monkeypatch.setattr(Notes, "fails", "")


def test_a_tracker_is_told_settings_numbers_and_the_report(tmp_path: Path) -> None:
    result = undrift.run(QUICK, rounds=4, lr=0.1, out=tmp_path / "mine", track=HERE)
    (notes,) = Notes.told
    stored, id = read_settings(tmp_path / "mine")
    assert (notes.run.id, notes.run.name, notes.run.group) == (id, "mine", tmp_path.name)
    assert notes.run.settings["set.lr"] == 0.1 and notes.run.settings["rounds"] == 4
    assert notes.run.settings["made.parameters"] == stored["made"]["parameters"]
    assert [round for round, _ in notes.scores] == [1, 2, 3, 4]
    for (_, told), record in zip(notes.scores, result.records, strict=True):
        plain = {n: v for n, v in record.items() if isinstance(v, int | float) and n != "round" and v == v}
        assert {n: told[n] for n in plain} == plain and "bytes_up" in plain
    ((stopped, report),) = notes.ended
    assert stopped == "rounds" and report is not None and "<!DOCTYPE html>" in report.read_text()


def test_a_resumed_run_goes_on_under_its_id_and_sends_what_is_missing(tmp_path: Path) -> None:
    for record in undrift.rounds(QUICK, rounds=6, out=tmp_path / "o", track=HERE):
        if record["round"] == 2:
            break
    undrift.run(QUICK, rounds=6, out=tmp_path / "o", resume=True)  # the tracker is a setting of the run
    first, second = Notes.told
    assert first.ended == [("interruption", None)] and second.ended[0][0] == "rounds"
    assert first.run.id == second.run.id and (first.run.round, second.run.round) == (0, first.reached)
    assert [round for round, _ in first.scores + second.scores] == [1, 2, 3, 4, 5, 6]
    undrift.run(QUICK, rounds=3, out=tmp_path / "late")
    undrift.run(QUICK, rounds=3, out=tmp_path / "late", resume=True, track=HERE)
    assert [round for round, _ in Notes.told[-1].scores] == [1, 2, 3]  # of a finished run, all of it
    undrift.run(QUICK, rounds=4, out=tmp_path / "late", resume=True, track="")
    assert len(Notes.told) == 3


@pytest.mark.parametrize("method", ["__init__", "add", "end"])
def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Notes, "fails", method)
    with pytest.warns(UserWarning, match="failed") as heard:
        result = undrift.run(QUICK, rounds=3, out=tmp_path / "o", track=HERE)
    (text,) = [str(warning.message) for warning in heard]
    assert text.startswith(f"tracking: {HERE} failed (RuntimeError: the server is away); the run goes on")
    assert len(result.records) == 3 and (tmp_path / "o/model.safetensors").exists()
    monkeypatch.setattr(Notes, "fails", "")
    undrift.run(QUICK, rounds=3, out=tmp_path / "o", resume=True)
    assert sum(len(notes.scores) for notes in Notes.told) == 3 and Notes.told[-1].ended


@pytest.mark.parametrize(
    "command",
    [
        f"run {LOGREG} --rounds 2 --clients 10 --cohort 2",
        f"dp {LOGREG} --rounds 2 --workers 2 --steps 2",
        "pipe --method dsp --queues 1,0;2,0 --cuts hidden2 --rounds 2 --steps 2 --batch 32 --device cpu",
    ],
)
def test_every_command_that_trains_tracks(command: str, tmp_path: Path) -> None:
    assert cli.main([*command.split(), "--out", str(tmp_path / "o"), "--track", HERE]) == 0
    (notes,) = Notes.told
    assert [round for round, _ in notes.scores] == [1, 2] and notes.ended[0][1] == (tmp_path / "o/report.html")


def test_a_deployment_tracks(tmp_path: Path) -> None:
    settings = {"algorithm": "fedavg", "dataset": "own", "names": "0,1,2", "clients": 3, "cohort": 3, "rounds": 2}
    more = {"shape": "4", "classes": 2, "model": "logreg", "steps": 1, "out": str(tmp_path / "o"), "track": HERE}
    plan = Plan.of(settings | more | {"device": "cpu"})
    deploy(plan, Answering(10), lambda: 3, dict.fromkeys(plan.names, 2), lambda line: None)
    (notes,) = Notes.told
    assert [round for round, _ in notes.scores] == [1, 2] and notes.ended[0][0] == "rounds"
    assert notes.scores[0][1]["wire_up"] > 0


def test_a_sweep_tracks_its_runs_packed_or_not(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    text = "".join(f"{n} = {v!r}\n" for n, v in QUICK.items()).replace("'", '"')
    (tmp_path / "s.toml").write_text(f"{text}rounds = 3\n[sweep]\nseeds = [0, 1]\n")
    for pack in ("--pack", "--no-pack"):
        out = tmp_path / pack
        words = [
            "sweep",
            str(tmp_path / "s.toml"),
            "--out",
            str(out),
            "--processes",
            "1",
            pack,
            "--track",
            "tensorboard",
        ]
        assert cli.main(words) == 0
        for seed in (0, 1):
            assert len(list((out / f"fedavg-seed={seed}" / "tensorboard").glob("events*"))) == 1


def test_mistakes_are_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names("trackers") == ["mlflow", "tensorboard", "trackio", "wandb"]
    with pytest.raises(UnknownName, match="did you mean 'tensorboard'"):
        undrift.run(QUICK, rounds=1, track="tensorbord", out=tmp_path / "o")
    with pytest.raises(BadSetting, match="give out"):
        undrift.run(QUICK, rounds=1, track=HERE)
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    monkeypatch.delitem(__import__("sys").modules, "undrift.jobs.track.wandb", raising=False)
    with pytest.raises(BadSetting, match=r"pip install 'undrift\[wandb\]'"):
        undrift.run(QUICK, rounds=1, track="wandb", out=tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_a_signal_ends_the_tracker_too(tmp_path: Path) -> None:
    def stop(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    from undrift.core import stopping

    with pytest.raises(stopping.Stopped), stopping.heed_signals(lambda text: None, repeats=True):
        undrift.run(QUICK, rounds=5000, out=tmp_path / "o", track=HERE, progress=stop, checkpoint_every=1)
    assert Notes.told[0].ended == [("interruption", None)]


def test_the_tracker_that_the_page_shows_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/trackers.md").read_text()
    (tmp_path / "shown_tracker.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    undrift.run(QUICK, rounds=3, out=tmp_path / "o", track="shown_tracker:Tracker")
    lines = (tmp_path / "o/mine.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"] and "'train_loss'" in lines[0]
