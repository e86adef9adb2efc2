"""Trackio on this machine: what its database holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trackio", reason="trackio is not installed")

TRACK = """
import json, sys, trackio, undrift
from tests.small import QUICK
out = sys.argv[1]
for record in undrift.rounds(QUICK, rounds=4, eval_every=1, lr=0.1, out=out, track="trackio"):
    if record["round"] == 2:
        break
result = undrift.run(QUICK, rounds=4, eval_every=1, lr=0.1, out=out, resume=True)
(run,) = trackio.Api().runs("undrift")
rows = trackio.SQLiteStorage.get_logs("undrift", run.name)
kept = {"name": run.name, "config": run.config, "rows": rows, "wanted": result.records}
print("FOUND" + json.dumps(kept, default=str))
"""


@pytest.mark.system
def test_the_database_holds_settings_and_numbers_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported, so in a process of its own
    words = [sys.executable, "-c", TRACK, str(tmp_path / "mine")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr[-3000:]
    found = json.loads(done.stdout.partition("FOUND")[2])
    assert found["name"].startswith("mine-") and found["config"]["set.lr"] == 0.1
    assert [row["step"] for row in found["rows"]] == [1, 2, 3, 4]
    assert [row["train_loss"] for row in found["rows"]] == [r["train_loss"] for r in found["wanted"]]
    page = (tmp_path / "mine/report.html").read_bytes()
    blobs = [file.read_bytes() for file in (tmp_path / "trackio/artifacts").rglob("*") if file.is_file()]
    assert page in blobs
