"""A damaged run folder is refused in one line, by whoever reads it, or the damage cannot matter."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import undrift
from tests.reliability import counted
from tests.small import QUICK, timeless
from undrift import cli
from undrift.core import seals
from undrift.core.errors import BadRunFolder, UndriftError
from undrift.jobs.verify import verify
from undrift.report.load import load

ROUNDS = 9


class Killed(Exception):
    pass


def kill(record: dict[str, Any], rounds: int) -> None:
    if record["round"] == 7:
        raise Killed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in round 7, after the checkpoint of round 6, and one that came to its end; both whole, too."""
    root = tmp_path_factory.mktemp("runs")
    settings = QUICK | {"rounds": ROUNDS, "checkpoint_every": 2}
    killed = settings | {"algorithm": "scaffold", "client_state": "disk"}
    with pytest.raises(Killed):
        undrift.run(killed, out=root / "killed", progress=kill)
    assert (root / "killed/checkpoint/round-000006.undo").stat().st_size > 0
    undrift.run(settings, algorithm="apfl", out=root / "ended")
    for name in ("killed", "ended"):
        shutil.copytree(root / name, root / f"whole-{name}")
        undrift.run(out=root / f"whole-{name}", resume=True)
    return root


def harm(file: Path, draw: random.Random) -> None:
    """Flip a bit, cut the end off, or put zeros over a part."""
    content = bytearray(file.read_bytes())
    at, how = draw.randrange(len(content)), draw.randrange(3)
    if how == 0:
        content[at] ^= 1 << draw.randrange(8)
    elif how == 1:
        del content[at:]
    else:
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    file.write_bytes(content)


def refusal(call: Callable[[], Any]) -> str:
    """The one line with which a call is refused; empty if it is not."""
    try:
        call()
    except UndriftError as error:
        return str(error)
    return ""


def client_rows(folder: Path) -> list[bytes]:
    """The rows of the client table, without those of clients that never took part, which nobody reads."""
    tensors = load_file(folder / f"checkpoint/round-{ROUNDS:06d}.safetensors")
    if "clients.table" not in tensors:
        return []
    table, size = (folder / "clients.table").read_bytes(), int(tensors["clients.table"][1])
    return [table[i * size : (i + 1) * size] for i in tensors["clients.rows"].tolist()]


def ends_like(folder: Path, whole: Path) -> bool:
    ours, theirs = (list(map(json.loads, (f / "rounds.jsonl").read_text().splitlines())) for f in (folder, whole))
    same = (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    return (
        same
        and client_rows(folder) == client_rows(whole)
        and timeless(ours) == timeless(theirs)
        and len(ours) == ROUNDS
    )


def check_damages(folders: Path, tmp_path: Path, count: int, draw: random.Random) -> None:
    counts: Counter[str] = Counter()
    for _ in range(count):
        name = draw.choice(("killed", "ended"))
        files = [p for p in sorted((folders / name).rglob("*")) if p.is_file() and p.stat().st_size]
        victim = draw.choice(files).relative_to(folders / name)
        harmed, resumed, whole = tmp_path / "harmed", tmp_path / "resumed", folders / f"whole-{name}"
        shutil.copytree(folders / name, harmed)
        harm(harmed / victim, draw)
        changed = (harmed / victim).read_bytes() != (folders / name / victim).read_bytes()
        counts["damaged"] += changed
        shutil.copytree(harmed, resumed)
        before = {p: p.read_bytes() for p in resumed.rglob("*") if p.is_file()}
        refused = refusal(lambda: undrift.run(out=resumed, resume=True))  # noqa: B023
        found = verify(harmed)
        if refused:
            counts["refused by resume"] += 1
            assert found.damage and len(refused.splitlines()) == 1, victim
            assert before == {p: p.read_bytes() for p in resumed.rglob("*") if p.is_file()}, victim
            if "--back" in found.advice:
                counts["gone back"] += 1
                verify(resumed, back=True)
                undrift.run(out=resumed, resume=True)
        if not refused or "--back" in found.advice:
            assert ends_like(resumed, whole), (name, victim, found)
        last = f"round-{6 if name == 'killed' else ROUNDS:06d}"
        if changed and victim.name in ("run.toml", f"{last}.json", f"{last}.safetensors"):
            assert refused, victim
        original, reported = load([folders / name])[0], []
        if refusal(lambda: reported.extend(load([harmed]))):  # noqa: B023
            counts["refused by report"] += 1
        else:
            (run,) = reported
            assert run.settings == original.settings, victim
            assert all(run.records.read(n) == original.records.read(n) for n in range(len(run.records))), victim
            assert len(run.records) >= (6 if name == "killed" else ROUNDS), victim
        shutil.rmtree(harmed)
        shutil.rmtree(resumed)
    print(dict(counts))
    assert counts["refused by resume"] > count / 4 and counts["gone back"] and counts["refused by report"] > count / 8


def test_no_damage_is_accepted(folders: Path, tmp_path: Path) -> None:
    check_damages(folders, tmp_path, 60, random.Random(0))


@pytest.mark.system
def test_none_of_a_thousand_damages_is_accepted(
    folders: Path, tmp_path: Path, pytestconfig: pytest.Config, count: Any
) -> None:
    with counted(count, "damaged bytes in a run folder", 1000):
        check_damages(folders, tmp_path, 1000, random.Random(1 + pytestconfig.getoption("seed")))


def test_every_bit_of_a_sealed_text_counts(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    records = [{"round": 1, "loss": 0.5}, {"round": 2, "loss": None}]
    with file.open("wb", buffering=0) as opened:
        first = seals.append_lines(opened, seals.Place(0, "run"), records[0])
        end = seals.append_lines(opened, first, records[1])
    assert end == seals.last_place(file) and list(seals.read_lines(file, "run", end)) == records
    whole = file.read_bytes()
    harmed = [
        whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :] for at in range(len(whole)) for bit in range(8)
    ]
    for content in [*harmed, *(whole[:length] for length in range(len(whole)))]:
        file.write_bytes(content)
        with pytest.raises(BadRunFolder, match="damaged"):
            list(seals.read_lines(file, "run", end))
        with pytest.raises(BadRunFolder, match="damaged"):
            list(seals.read_lines(file, "run", end, further=False))
    file.write_bytes(whole)
    with pytest.raises(BadRunFolder, match="damaged in line 1"):
        list(seals.read_lines(file, "other"))
    file.write_bytes(b"".join(reversed(whole.splitlines(keepends=True))))
    with pytest.raises(BadRunFolder, match="damaged in line 1"):
        list(seals.read_lines(file, "run"))
    for sealed, read in ((seals.seal(records[0]), seals.unseal), (seals.seal_toml("a = 1\n", "x"), seals.unseal_toml)):
        assert read(sealed)
        for at in range(len(sealed)):
            for content in (
                sealed[:at],
                *(sealed[:at] + bytes([sealed[at] ^ 1 << b]) + sealed[at + 1 :] for b in range(8)),
            ):
                with pytest.raises(ValueError):
                    read(content)


def test_lines_after_the_checkpoint_are_read_by_the_report_and_written_anew_by_resume(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders / "killed", tmp_path / "run")
    rounds = tmp_path / "run/rounds.jsonl"
    assert len(load([tmp_path / "run"])[0].records) == 7
    rounds.write_bytes(rounds.read_bytes()[:-5])  # as a kill leaves it
    assert len(load([tmp_path / "run"])[0].records) == 6 and not verify(tmp_path / "run").damage
    rounds.write_bytes((folders / "killed/rounds.jsonl").read_bytes().replace(b'"round": 7', b'"round": 8'))
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]) == 2
    assert "rounds.jsonl is damaged in line 7" in capsys.readouterr().err
    undrift.run(out=tmp_path / "run", resume=True)
    assert ends_like(tmp_path / "run", folders / "whole-killed")


def test_verify_on_the_command_line(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folders / "ended", tmp_path / "run")
    assert cli.main(["verify", str(tmp_path)]) == 0
    assert "is whole; go on with --resume" in capsys.readouterr().out
    for name, word in (("model.safetensors", "--resume writes it again"), ("super.safetensors", "checksum is wrong")):
        file = tmp_path / "run" / name
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        assert cli.main(["verify", str(tmp_path)]) == 2
        said = capsys.readouterr().out
        assert f"{file} is damaged" in said and word in said
    assert cli.main(["run", "--resume", "--out", str(tmp_path / "run")]) == 0
    assert not verify(tmp_path / "run").damage, "a finished run whose models are damaged writes them again"
    last = tmp_path / "run/checkpoint/round-000009.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    capsys.readouterr()
    assert cli.main(["run", "--resume", "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert "round-000009.safetensors is damaged" in err and f"undrift verify {tmp_path / 'run'}" in err
    assert err.count("\n") == 1
    assert cli.main(["verify", str(tmp_path / "run")]) == 2
    assert "of round 8, is whole; " in capsys.readouterr().out
    assert cli.main(["verify", str(tmp_path / "run"), "--back"]) == 0
    assert "went back from round 9 to round 8" in capsys.readouterr().out
    assert cli.main(["run", "--resume", "--out", str(tmp_path / "run")]) == 0
    assert ends_like(tmp_path / "run", folders / "whole-ended")
    assert cli.main(["verify", str(tmp_path / "run"), "--back"]) == 0  # there is nothing to go back from
    assert (tmp_path / "run/checkpoint/round-000009.json").exists()


def test_files_of_another_run_are_refused(folders: Path, tmp_path: Path) -> None:
    undrift.run(QUICK | {"rounds": ROUNDS, "checkpoint_every": 2, "seed": 1}, algorithm="apfl", out=tmp_path / "other")
    for name in ("run.toml", "rounds.jsonl", "checkpoint/round-000009.json", "checkpoint/round-000009.safetensors"):
        shutil.copytree(folders / "ended", tmp_path / name)
        shutil.copy(tmp_path / "other" / name, tmp_path / name / name)
        with pytest.raises(BadRunFolder):
            undrift.run(out=tmp_path / name, resume=True, rounds=ROUNDS + 1)
        assert verify(tmp_path / name).damage
