"""W&B offline: its file in the run's folder is read back."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import undrift
from tests.small import QUICK

pytest.importorskip("wandb", reason="wandb is not installed")


BLOCK, HEAD, LAST = 32768, 7, (1, 4)  # LevelDB's log: blocks of pieces; a line ends with a piece of type 1 or 4


def lines_of(file: Path) -> list[Any]:
    """The records of a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    content, at, line, lines = file.read_bytes(), HEAD, b"", []
    while at + HEAD <= len(content):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        line += content[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in LAST:
            lines.append(wandb_internal_pb2.Record.FromString(line))
            line = b""
    return lines


@pytest.mark.filterwarnings("ignore")
@pytest.mark.system
def test_the_files_hold_settings_and_numbers_under_the_runs_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(
        "undrift.jobs.track.wandb.PATIENCE", 300.0
    )  # on a busy machine its process takes long to answer
    out = tmp_path / "mine"
    for record in undrift.rounds(QUICK, rounds=4, eval_every=1, lr=0.1, out=out, track="wandb"):
        if record["round"] == 2:
            break
    result = undrift.run(QUICK, rounds=4, eval_every=1, lr=0.1, out=out, resume=True)
    files = sorted((out / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1  # the same id
    lines = [line for file in files for line in lines_of(file)]
    rows = [{i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in line.history.item} for line in lines]
    rows = [row for row in rows if row]
    assert [row["_step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train_loss"] for row in rows] == pytest.approx([r["train_loss"] for r in result.records])
    settings = {i.key: json.loads(i.value_json) for line in lines for i in line.run.config.update}
    assert settings["set.lr"] == 0.1 and settings["clients"] == QUICK["clients"]
    assert any(line.request.log_artifact.artifact.type == "report" or line.artifact.type == "report" for line in lines)
