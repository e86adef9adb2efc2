"""`undrift ls`, and the lines of a run without a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import undrift
from tests.small import QUICK
from undrift import cli
from undrift.jobs.overview import overview


def test_runs_are_listed_with_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = undrift.run(QUICK, rounds=6, out=tmp_path / "a")
    for record in undrift.rounds(QUICK, rounds=6, out=tmp_path / "b"):
        if record["round"] == 3:
            break
    with pytest.warns(UserWarning, match="round"):
        undrift.run(QUICK, model="mlp", rounds=60, lr=1e4, out=tmp_path / "c")
    undrift.run(QUICK, rounds=2, out=tmp_path / "d")
    (tmp_path / "d/run.toml").write_text("broken")
    a, b, c, d = overview([tmp_path])
    assert (a.state, a.rounds, a.left) == ("finished", "6/6", "")
    best = max(r["accuracy"] for r in whole.records if r["accuracy"] is not None)
    assert a.best.startswith(f"accuracy {best:.4f} in round ")
    assert (b.state, b.rounds) == ("stopped", "3/6") and b.left.endswith(" s")
    assert c.state == "diverged" and d.state == "unreadable"
    assert cli.main(["ls", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "stopped" in said and "3/6" in said and "diverged" in said


def test_a_run_that_goes_on_is_running(tmp_path: Path) -> None:
    states = []

    def look(record: dict[str, Any]) -> None:
        states.append(overview([tmp_path])[0].state)

    undrift.run(QUICK, rounds=2, out=tmp_path / "a", on_round=look)
    assert states == ["running", "running"] and overview([tmp_path])[0].state == "finished"


def test_a_log_gets_a_line_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("undrift.cli.console.EVERY", 0.0)
    words = "run --rounds 4 --clients 12 --cohort 4 --model logreg --eval-every 2 --out"
    assert cli.main([*words.split(), str(tmp_path / "run")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fedavg: round ")]
    assert [line.split(",")[0] for line in lines] == [f"fedavg: round {n} of 4" for n in (1, 2, 3, 4)]
    assert "accuracy 0." in lines[1] and "left" in lines[1]


def test_the_log_of_a_sweep_gets_a_line_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("undrift.cli.console.EVERY", 0.0)
    (tmp_path / "s.toml").write_text('model = "logreg"\nrounds = 3\nclients = 4\ncohort = 2\n[sweep]\nseeds = [0, 1]\n')
    command = ["sweep", str(tmp_path / "s.toml"), "--out", str(tmp_path / "out"), "--processes", "1"]
    assert cli.main(command) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "runs done, round" in line]
    assert lines[0] == "0 of 2 runs done, round 1 of 6, now fedavg-seed=0", "there is no pace yet"
    assert lines[1].startswith("0 of 2 runs done, round 2 of 6, now fedavg-seed=0, ") and lines[1].endswith(" left")
    assert lines[-1] == "2 of 2 runs done, round 6 of 6, now fedavg-seed=1, 0 s left"
