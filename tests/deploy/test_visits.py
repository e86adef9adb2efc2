"""clients.jsonl of a resumed deployment: whole up to the checkpoint, with closings after it, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from undrift.core.errors import BadRunFolder
from undrift.core.run_files import VISITS, Checkpoint
from undrift.core.seals import last_place
from undrift.deploy.client import CLOSE, TRAIN
from undrift.deploy.remote import Visit
from undrift.deploy.run import Visits, run_token
from undrift.deploy.settings import Plan


def visit(round: int, exchange: str = TRAIN) -> Visit:
    return Visit(round, "a", exchange, "answered", 1, 1, 0.0, 0.0)


def test_visits_are_kept_up_to_the_checkpoint_and_damage_is_refused(tmp_path: Path) -> None:
    file = tmp_path / VISITS
    visits = Visits(file, None)
    visits.keep([visit(1), visit(2)])
    last = Checkpoint(tmp_path / "x.json", {"round": 2, "lines": {VISITS: last_place(file)}})
    visits.keep([visit(2, CLOSE), visit(3)])
    visits.file.close()
    whole = file.read_bytes()
    for tail in (b"", b'{"rou', b"\0" * 50 + b"\n"):  # as kills and power failures leave it
        file.write_bytes(whole + tail)
        again = Visits(file, last)
        again.file.close()
        assert [(v["round"], v["exchange"]) for v in again.kept] == [(1, TRAIN), (2, TRAIN), (2, CLOSE)]
        assert again.closed_rounds() == {("a", 2)} and again.end == last_place(file)
    place = last.lines(VISITS)
    assert place is not None
    for content in (whole[: place.bytes - 1], whole.replace(b'"round": 1', b'"round": 2'), b""):
        file.write_bytes(content)
        with pytest.raises(BadRunFolder, match="damaged"):
            Visits(file, last)
        assert file.read_bytes() == content


def plan(out: Path, **settings: Any) -> Plan:
    return Plan.of({"algorithm": "fedavg", "dataset": "digits", "clients": 2, "cohort": 2, "out": str(out)} | settings)


def test_the_token_of_a_run_is_kept_and_checked(tmp_path: Path) -> None:
    token = run_token(plan(tmp_path))
    again = plan(tmp_path, resume=True)
    assert run_token(again) == token
    file = tmp_path / "deploy.json"
    file.write_text(file.read_text().replace(token[0], "x", 1))
    with pytest.raises(BadRunFolder, match=r"deploy\.json is damaged"):
        run_token(again)
    file.unlink()
    with pytest.raises(BadRunFolder, match="holds no deployed run"):
        run_token(again)


@pytest.mark.parametrize("change", [{"weight_cap": 0.9}, {"most_samples": 5}, {"names": "anna,carl"}])
def test_a_resumed_run_cannot_weigh_or_name_its_clients_otherwise(change: dict[str, Any], tmp_path: Path) -> None:
    names = {"names": "bert,anna"}
    token = run_token(plan(tmp_path, **names))
    assert run_token(plan(tmp_path, resume=True, names="anna, bert", timeout=5.0)) == token
    with pytest.raises(BadRunFolder, match=f"its {next(iter(change))} is .*, not "):
        run_token(plan(tmp_path, resume=True, **names | change))
