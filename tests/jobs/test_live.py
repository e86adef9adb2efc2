"""What a live page says of runs: states, what is to come, the time left, what is wrong, and the memory of GPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import undrift
from tests.small import QUICK, write_run
from undrift.cli import main
from undrift.core.errors import BadRunFolder
from undrift.core.run_files import ROUNDS, SWEEP
from undrift.core.seals import write_sealed
from undrift.jobs.live import OBSERVED, Folders, Pace
from undrift.report.page import page_of

FEW = QUICK | {"rounds": 6, "eval_every": 1, "checkpoint_every": 1}


def cell(content: dict[str, Any], run: str, column: str) -> list[Any]:
    table = content["live"]["table"]
    names = [each["name"] for each in table["columns"]]
    (row,) = [row for row in table["rows"] if row[0][0] == run]
    found: list[Any] = row[names.index(column)]
    return found


def test_an_empty_folder_waits_for_its_first_run(tmp_path: Path) -> None:
    folders = Folders([tmp_path])
    content = folders.document()
    assert content["title"] == "No rounds yet" and content["sections"] == [] and content["live"]["counts"] == {}
    assert content["facts"] == "This page fills in as soon as a run finishes its first round."
    assert page_of(content, live=True)
    with pytest.raises(BadRunFolder, match="is no folder"):
        Folders([tmp_path / "none"])
    loop = iter(undrift.rounds(FEW, out=tmp_path / "a"))
    next(loop)
    content = folders.document()
    assert content["live"]["counts"] == {"running": 1} and cell(content, "a", "rounds")[:2] == ["1 of 6", 1 / 6]
    loop.close()  # type: ignore[attr-defined]
    content = folders.document()
    assert content["live"]["counts"] == {"stopped": 1} and "No run is running now" in content["live"]["notes"][0]


def test_a_document_grows_with_its_run(tmp_path: Path) -> None:
    folders = Folders([tmp_path])
    seen = []
    for record in undrift.rounds(FEW, out=tmp_path / "a"):
        content = folders.document()
        (group,) = content["sections"][0]["groups"]
        (values,) = group["curves"]["accuracy"]["runs"]
        assert values[-1] == pytest.approx(record["accuracy"], rel=1e-3) and len(values) == record["round"]
        seen.append(content["live"]["rounds"])
        assert cell(content, "a", "state")[0] == "running" and cell(content, "a", "time left")[0].endswith(" s")
    assert seen == [[t, 6] for t in range(1, 7)]
    content = folders.document()
    assert cell(content, "a", "state")[0] == "finished" and content["live"]["left"] == ""
    best = max(values)
    assert cell(content, "a", "best so far")[1] == pytest.approx(best, rel=1e-3)


def test_only_what_has_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        undrift.run(FEW, out=tmp_path / name)
    folders = Folders([tmp_path])
    folders.document()
    read: list[Path] = []
    load = undrift.jobs.live.load  # type: ignore[attr-defined]
    monkeypatch.setattr("undrift.jobs.live.load", lambda paths: read.extend(paths) or load(paths))
    folders.document()
    assert read == []
    undrift.run(out=tmp_path / "b", resume=True, rounds=8)
    content = folders.document()
    assert read == [tmp_path / "b"] and cell(content, "b", "rounds")[0] == "8 of 8"


def test_a_sweep_says_what_is_to_come_and_what_has_failed(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    common = "\n".join(f"{name} = {json.dumps(value)}" for name, value in FEW.items())
    file.write_text(f'{common}\n[sweep]\nalgorithms = ["fedavg", "scaffold"]\nseeds = [0, 1]\n')
    out = tmp_path / "out"
    assert main(["sweep", str(file), "--out", str(out), "--processes", "1"]) == 0
    planned = json.loads((out / SWEEP).read_text())
    assert planned["runs"] == dict.fromkeys([f"{n}-seed={s}" for n in ("fedavg", "scaffold") for s in (0, 1)], 6)
    assert planned["failed"] == {}
    more = planned["runs"] | {"gradma-s-seed=0": 6, "gradma-s-seed=1": 10}
    write_sealed(out / SWEEP, {"runs": more, "failed": {"gradma-s-seed=1": "<b>no memory</b>"}})
    content = Folders([out]).document()
    live = content["live"]
    assert live["counts"] == {"failed": 1, "finished": 4, "to come": 1} and live["rounds"] == [24, 30]
    assert cell(content, "gradma-s-seed=0", "rounds")[0] == "0 of 6"
    assert live["notes"][0] == "gradma-s-seed=1: <b>no memory</b>"
    assert "<b>no" not in page_of(content, live=True)
    (out / SWEEP).write_text("{}")
    assert Folders([out]).document()["live"]["counts"] == {"unreadable": 1, "finished": 4}


def test_a_stopped_run_is_to_come_only_while_its_sweep_goes_on(tmp_path: Path) -> None:
    for name in "ab":  # b belongs to no sweep
        loop = iter(undrift.rounds(FEW, out=tmp_path / name))
        next(loop)
        loop.close()  # type: ignore[attr-defined]
    write_sealed(tmp_path / SWEEP, {"runs": {"a": 6, "c": 6}, "failed": {}})
    folders = Folders([tmp_path])
    assert folders.document()["live"]["counts"] == {"stopped": 2, "to come": 1}
    loop = iter(undrift.rounds(FEW, out=tmp_path / "c"))
    next(loop)
    live = folders.document()["live"]
    assert live["counts"] == {"running": 1, "stopped": 1, "to come": 1} and live["rounds"] == [3, 18] and live["left"]
    loop.close()  # type: ignore[attr-defined]
    assert folders.document()["live"]["counts"] == {"stopped": 3}


def test_a_loss_that_rises_or_is_lost_is_told(tmp_path: Path) -> None:
    def records(losses: list[float], dropped: int = 0) -> list[dict[str, Any]]:
        return [
            {
                "round": t,
                "loss": loss,
                "accuracy": 0.1,
                "clients": 4,
                "dropped": dropped,
                "gradients": 8,
                "seconds": 1.0,
            }
            for t, loss in enumerate(losses, 1)
        ]

    settings = {"algorithm": "fedavg", "dataset": "digits", "model": "mlp", "partition": "iid", "rounds": 9, "seed": 0}
    write_run(tmp_path / "well", settings, records([2.3, 3.0, 1.0]))
    write_run(tmp_path / "risen", settings, records([2.3, 1.0, 2.5]))
    write_run(tmp_path / "lost", settings, records([2.3, 1.0, float("nan")]))
    write_run(tmp_path / "alone", settings, records([2.3, 1.0, 0.9], dropped=4))
    content = Folders([tmp_path]).document()
    notes = dict(note.split(": ", 1) for note in content["live"]["notes"][:-1])
    assert notes == {
        "alone": "no client's update was finite, 3 rounds in a row",
        "lost": "the loss on the test set is nan",
        "risen": "the test loss has risen from 1 to 2.5",
    }
    assert cell(content, "alone", "dropped") == ["12 of 12", 12] and cell(content, "well", "dropped") == ["", 0]


def test_a_run_that_cannot_be_read_says_why_and_the_others_are_shown(tmp_path: Path) -> None:
    undrift.run(FEW, out=tmp_path / "a")
    undrift.run(FEW, out=tmp_path / "b")
    lines = (tmp_path / "b" / ROUNDS).read_bytes()
    (tmp_path / "b" / ROUNDS).write_bytes(lines.replace(b"0.", b"1.", 1))
    content = Folders([tmp_path]).document()
    assert content["live"]["counts"] == {"unreadable": 1, "finished": 1} and len(content["sections"]) == 1
    assert "is damaged in line 1" in content["live"]["notes"][0]


def test_methods_keep_their_place_when_others_begin_or_lead(tmp_path: Path) -> None:
    folders = Folders([tmp_path])
    for name in ("scaffold", "fedavg", "fedavgm"):
        undrift.run(FEW, algorithm=name, out=tmp_path / name)
        content = folders.document()
    assert [group["label"] for group in content["sections"][0]["groups"]] == ["scaffold", "fedavg", "fedavgm"]


def test_a_pace_is_what_was_seen() -> None:
    pace = Pace(10, 100.0)
    assert pace.rate(10, 100.0 + OBSERVED) is None and pace.rate(20, 101.0) is None
    assert pace.rate(30, 110.0) == 2.0
    assert pace.rate(5, 120.0) is None and pace.rate(15, 130.0) == 1.0  # resumed from an earlier checkpoint


def test_the_memory_of_gpus_is_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 4096, 143771, 87'\necho 'NVIDIA H200, 12, 143771, [N/A]'\n")
    tool.chmod(0o700)
    (gpu,) = Folders([tmp_path]).document()["live"]["gpus"]
    assert gpu == {"name": "NVIDIA H200", "used": 4096 * 2**20, "total": 143771 * 2**20, "busy": 87}
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert Folders([tmp_path]).document()["live"]["gpus"] == []
