"""`undrift deploy local` tells a run that came to its end from one that did not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from tests.deploy.test_flower import identity, planned, serve  # noqa: F401
from undrift.deploy import local
from undrift.deploy.settings import Plan


class Parts:
    """A federation whose `flwr run` ends at once, while the server's app has still `looks` looks to live."""

    def __init__(self, text: str, looks: int) -> None:
        self.text, self.looks = text, looks
        self.files: list[Path] = []

    def start_client(self, client: int) -> None:
        pass

    def run(self, plan: Plan) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        return process

    def server_apps(self) -> list[int]:
        self.looks -= 1
        return [1] if self.looks >= 0 else []

    def log(self, name: str) -> str:
        return self.text if name == "run" else "database is locked"


@pytest.mark.parametrize("more", [1, 0])
def test_a_resumed_run_whose_app_dies_has_failed_although_it_had_ended_before(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)
    plan = planned(tmp_path / "out", rounds=1)
    serve(plan, tmp_path)
    again = replace(plan, deploy=replace(plan.deploy, resume=True), run=replace(plan.run, rounds=1 + more))
    text = "" if more else f"1 rounds; stopped by rounds; written to {tmp_path / 'out'}\n"
    parts = Parts(text, looks=3)

    @contextlib.contextmanager
    def fake(*given: Any) -> Iterator[Parts]:
        yield parts

    monkeypatch.setattr(local, "federation", fake)
    if more:
        with pytest.raises(local.Failed, match="did not come to its end"):
            local.run_local(again, True, None, lambda line: None, None)
    else:
        local.run_local(again, True, None, lambda line: None, None)
    assert parts.looks < 0  # it has waited for the app
