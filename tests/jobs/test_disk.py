"""A disk that is full, read-only or gone in the middle of a run: one line, exit code 2, and the last checkpoint is good."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import undrift
from tests.patience import patient
from tests.reliability import counted
from tests.small import QUICK, timeless
from undrift import cli
from undrift.core.errors import CannotWrite
from undrift.jobs.folder import RunFolder
from undrift.jobs.verify import verify

COMMANDS = {
    "run": "--clients 12 --cohort 4 --steps 2 --batch 8 --model logreg --execution stacked --algorithm scaffold",
    "dp": "--workers 2 --steps 2 --batch 4 --model logreg",
    "pipe": "--steps 4 --batch 8 --cuts hidden2 --queues 1,0;2,0",
}
COMMANDS["run on disk"] = f"{COMMANDS['run']} --client-state disk"


@contextlib.contextmanager
def full(length: int) -> Iterator[None]:
    """No file can grow beyond `length` bytes, which is what a full disk is like."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def records(folder: Path) -> list[dict[str, Any]]:
    return timeless([json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()])


def in_round(round: int, call: Callable[[], Any], patched: pytest.MonkeyPatch) -> None:
    """Call before that round is written down."""
    append = RunFolder.append

    def appended(folder: RunFolder, record: dict[str, Any]) -> None:
        if record["round"] == round:
            call()
        append(folder, record)

    patched.setattr(RunFolder, "append", appended)


@pytest.mark.parametrize("length", [600, 2000, 8000])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk(
    name: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [name.split()[0], *COMMANDS[name].split(), "--rounds", "6", "--checkpoint-every", "2", "--out"]
    assert cli.main([*command, str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    with full(10**9), monkeypatch.context() as patched:
        in_round(5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (length, -1)), patched)
        assert cli.main([*command, str(tmp_path / "cut")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "cannot write" in err and "File too large" in err and "--resume" in err
    folder = tmp_path / "cut"
    assert not list(folder.rglob(".r*")), "what was half written is removed"
    assert not verify(folder).damage and RunFolder(folder).last_checkpoint() == 4
    assert cli.main([command[0], "--resume", "--out", str(folder)]) == 0
    assert records(folder) == records(tmp_path / "whole")
    model, expected = (f / "model.safetensors" for f in (folder, tmp_path / "whole"))
    assert model.read_bytes() == expected.read_bytes()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no permissions")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_becomes_read_only(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For root nothing is: it becomes another user in the middle of the run."""
    command = [name.split()[0], *COMMANDS[name].split(), "--rounds", "6", "--checkpoint-every", "2", "--out"]
    assert cli.main([*command, str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    user = os.geteuid()

    def lock_out() -> None:
        for folder in (place / "run", place / "run/checkpoint"):
            folder.chmod(0o555)
        (place / "run/rounds.jsonl").chmod(0o444)
        os.seteuid(user or 65534)

    try:
        with monkeypatch.context() as patched:
            in_round(5, lock_out, patched)
            assert cli.main([*command, str(place / "run")]) == 2
        os.seteuid(user)
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "cannot write" in err and "Permission denied" in err
        for file in (place / "run", place / "run/checkpoint", place / "run/rounds.jsonl"):
            file.chmod(0o755)
        assert not verify(place / "run").damage and RunFolder(place / "run").last_checkpoint() == 4
        assert cli.main([command[0], "--resume", "--out", str(place / "run")]) == 0
        assert records(place / "run") == records(tmp_path / "whole")
    finally:
        os.seteuid(user)
        shutil.rmtree(place)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_is_removed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [name.split()[0], *COMMANDS[name].split(), "--rounds", "6", "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patched:
        in_round(5, lambda: shutil.rmtree(tmp_path / "run"), patched)
        assert cli.main(command) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "was removed while its run was going on" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("state", ["memory", "disk"])
def test_a_folder_that_another_run_takes_is_left_to_it(state: str, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", QUICK | {"rounds": 6, "checkpoint_every": 2, "algorithm": "scaffold"}
    for round in (1, 2, 3, 6):  # 2 and 6 have a checkpoint
        taken: dict[Path, bytes] = {}

        def take(record: dict[str, Any], rounds: int, round: int = round, taken: dict[Path, bytes] = taken) -> None:
            if record["round"] == round:
                shutil.rmtree(out)
                undrift.run(settings | {"rounds": 4, "seed": 1, "client_state": state}, out=out)
                taken.update({p: p.read_bytes() for p in out.rglob("*") if p.is_file()})

        with pytest.raises(CannotWrite, match="was removed and taken by another run"):
            undrift.run(settings, client_state=state, out=out, progress=take)
        assert taken and taken == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
        assert not verify(out).damage
        shutil.rmtree(out)


SWEEP = """
clients = 8
cohort = 2
model = "logreg"
rounds = 3
[sweep]
seeds = [0, 1]
"""


def test_a_sweep_on_a_full_disk_ends_with_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.toml").write_text(SWEEP)
    command = f"sweep {tmp_path / 's.toml'} --out {tmp_path / 'o'} --processes 1".split()
    with full(3000):
        assert cli.main(command) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "cannot write" in err and "the same command goes on" in err
    assert cli.main(command) == 0
    assert all(len(records(folder)) == 3 for folder in (tmp_path / "o").glob("*/"))


needs_mount = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or sys.platform != "linux", reason="mounts a file system"
)


@contextlib.contextmanager
def mounted(place: Path, size: str) -> Iterator[None]:
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=False).returncode:
        pytest.skip("cannot mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def started(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "undrift", *words], stderr=subprocess.PIPE, text=True)


def wait_for(file: Path) -> None:
    end = time.monotonic() + patient(120)
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.02)


@needs_mount
@pytest.mark.system
@pytest.mark.parametrize("harm", ["full", "removed"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_real_disk(name: str, harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: Any) -> None:
    """A small file system that is filled or emptied in the middle of a run, and is read-only for a while."""
    kind, place = name.split()[0], tmp_path / "disk"
    with mounted(place, "64m"), counted(count, "disks that are full, read-only or gone", 1):
        out = place / "run"
        command = [kind, *COMMANDS[name].split(), "--rounds", "100000", "--checkpoint-every", "2", "--out", str(out)]
        process = started(command)
        wait_for(out / "checkpoint/round-000004.json")
        if harm == "removed":
            shutil.rmtree(out, ignore_errors=True)  # the run may put a file there meanwhile
            shutil.rmtree(out, ignore_errors=True)
        else:
            with (place / "filler").open("wb", buffering=0) as file:
                while process.poll() is None:  # the run frees some room by what it removes
                    try:
                        file.write(bytes(1 << 20))
                    except OSError:
                        with contextlib.suppress(OSError):
                            file.write(bytes(4096))
        _, err = process.communicate(timeout=patient(200))
        assert process.returncode == 2 and err.count("\n") == 1, err
        if harm == "removed":
            assert "was removed" in err or "No such file" in err, err
            return
        assert "No space left" in err, err
        (place / "filler").unlink()
        assert not verify(out).damage
        reached = RunFolder(out).last_checkpoint()
        assert reached >= 4
        resume = [kind, "--resume", "--out", str(out), "--rounds", str(reached + 2)]
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert not verify(out).damage  # which writes nothing
        capsys.readouterr()
        assert cli.main(resume) == 2
        err = capsys.readouterr().err
        assert "Read-only file system" in err and err.count("\n") == 1
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        assert cli.main(resume) == 0
