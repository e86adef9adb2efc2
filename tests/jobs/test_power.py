"""After a power failure a run goes on, whatever a strict file system has lost of what was not synced.

The folder is looked at around every sync, rename, new folder and removal. What is on the disk at such a moment is of a file
its content, and of a folder its entries, when it was last synced; of anything newer, any part.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import undrift
from tests.reliability import counted
from tests.small import data, timeless, tiny_mlp
from undrift.jobs.course import Result
from undrift.jobs.folder import RunFolder

BLOCK = 64  # bytes that reach the disk together
Entries = dict[str, int]  # name -> inode

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads files that are open through /proc")


class Disk:
    """What is in a folder, and what of it is certain to be there after a power failure."""

    def __init__(self, root: Path, aside: Path) -> None:
        self.root, self.aside = root, aside
        root.mkdir()
        aside.mkdir()
        self.saved = 0  # the last round whose checkpoint is complete
        self.synced_files: dict[int, bytes] = {}
        self.synced_folders: dict[int, Entries] = {root.stat().st_ino: {}}
        self.moments: list[Moment] = []

    def look(self) -> None:
        """Remember this moment."""
        folders: dict[int, Entries] = {}
        files: dict[int, bytes] = {}
        for path in (self.root, *self.root.rglob("*")):
            inode = path.stat().st_ino
            if path.is_dir():
                folders[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                files[inode] = path.read_bytes()
                if not (self.aside / str(inode)).exists():
                    os.link(path, self.aside / str(inode))  # the number of a removed file is not given to another
        self.moments.append(
            Moment(
                self.root.stat().st_ino, folders, files, dict(self.synced_folders), dict(self.synced_files), self.saved
            )
        )

    def sync(self, handle: int) -> None:
        inode, place = os.fstat(handle).st_ino, Path(f"/proc/self/fd/{handle}")
        if place.is_dir():
            self.synced_folders[inode] = {entry.name: entry.inode() for entry in os.scandir(place)}
        else:
            self.synced_files[inode] = place.read_bytes()

    def watch(self, patched: pytest.MonkeyPatch) -> None:
        def around(call: Any, then: Any = lambda *given: None) -> Any:
            def watched(*given: Any, **named: Any) -> Any:
                self.look()
                result = call(*given, **named)
                then(*given)
                self.look()
                return result

            return watched

        def save(folder: RunFolder, tensors: Any, facts: dict[str, Any]) -> None:
            saves(folder, tensors, facts)
            self.saved = facts["round"]

        saves = RunFolder.save
        patched.setattr(RunFolder, "save", save)
        patched.setattr(os, "fsync", around(os.fsync, self.sync))
        for name in ("replace", "mkdir", "unlink"):
            patched.setattr(os, name, around(getattr(os, name)))


class Moment:
    """A moment at which the power may fail."""

    def __init__(
        self, root: int, folders: dict[int, Entries], files: dict[int, bytes], synced_folders: dict[int, Entries],
        synced_files: dict[int, bytes], saved: int,
    ) -> None:  # fmt: skip
        self.root, self.folders, self.files, self.saved = root, folders, files, saved
        self.synced_folders, self.synced_files = synced_folders, synced_files

    def leave(self, place: Path, draw: random.Random | None) -> None:
        """Write what the disk may hold afterwards: only what was synced, or what is drawn of the rest."""
        self.leave_folder(self.root, place, draw)

    def leave_folder(self, inode: int, place: Path, draw: random.Random | None) -> None:
        place.mkdir()
        old, new = self.synced_folders.get(inode, {}), self.folders.get(inode, {})
        for name in sorted({*old, *new}):
            entry = (new if draw and draw.random() < 0.5 else old).get(name)
            if entry is None:
                continue
            if entry in self.folders:
                self.leave_folder(entry, place / name, draw)
            else:
                (place / name).write_bytes(self.content(entry, draw))

    def content(self, inode: int, draw: random.Random | None) -> bytes:
        old = self.synced_files.get(inode, b"")
        new = self.files.get(inode, old)
        if draw is None or old == new:
            return old
        content = bytearray(draw.choice((len(old), len(new))))
        for at in range(0, len(content), BLOCK):
            blocks = [each[at : at + BLOCK] for each in (old, new)]
            if at >= len(old):
                blocks.append(b"")  # zeros
            block = draw.choice(blocks)[: len(content) - at]
            content[at : at + len(block)] = block
        return bytes(content)


def settings() -> dict[str, Any]:
    return {"model": tiny_mlp(), "data": data(), "algorithm": "scaffold"}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Moment], Result[Any], bytes]:
    """The moments of a run that is begun, stopped and resumed."""
    place = tmp_path_factory.mktemp("power")
    disk = Disk(place / "disk", place / "aside")
    out = place / "disk/runs/run"
    more = {"client_state": "disk", "cohort": 2, "steps": 1, "checkpoint_every": 2, "execution": "stacked"}

    class Killed(Exception):
        pass

    def kill(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == 5:
            raise Killed

    with pytest.MonkeyPatch.context() as patched:
        disk.watch(patched)
        with pytest.raises(Killed):
            undrift.run(**settings(), **more, out=out, rounds=7, progress=kill)
        result = undrift.run(**settings(), out=out, resume=True)
    return disk.moments, result, (out / "clients.table").read_bytes()


def check(moment: Moment, draw: random.Random | None, place: Path, result: Result[Any], table: bytes) -> bool:
    """Go on after a power failure; whether there was a run yet."""
    moment.leave(place, draw)
    out = place / "runs/run"
    folder = RunFolder(out)
    if not (out / "run.toml").exists():
        assert moment.saved == 0 and not folder.exists(), "nothing was there that is lost"
        return False
    assert folder.last_checkpoint() >= moment.saved, "a complete checkpoint is lost"
    resumed = undrift.run(**settings(), out=out, resume=True)
    assert timeless(resumed.records) == timeless(result.records)
    assert all(torch.equal(resumed.model[n], t) for n, t in result.model.items())
    assert (out / "clients.table").read_bytes() == table
    return True


@linux
def test_a_run_goes_on_after_some_power_failures(watched: Any, tmp_path: Path) -> None:
    moments, *expected = watched
    draw = random.Random(0)
    chosen = [(moment, None if n % 4 == 0 else draw) for n, moment in enumerate(draw.sample(moments, 40))]
    count = sum(check(moment, how, tmp_path / str(n), *expected) for n, (moment, how) in enumerate(chosen))
    assert count > 30 and len(moments) > 100


@linux
@pytest.mark.system
@pytest.mark.parametrize("seed", [None, *range(5)])
def test_a_run_goes_on_after_every_power_failure(seed: int | None, watched: Any, tmp_path: Path, count: Any) -> None:
    moments, *expected = watched
    with counted(count, "power failures", len(moments)):
        for n, moment in enumerate(moments):
            draw = None if seed is None else random.Random(f"{seed} {n}")
            check(moment, draw, tmp_path / str(n), *expected)


@linux
def test_what_is_not_synced_is_missed(watched: Any, tmp_path: Path) -> None:
    """The failures above would be found: without the syncs of folders, a checkpoint that is complete is lost."""
    moments, *expected = watched
    last = moments[-1]
    entries = {inode: {} if inode != last.root else names for inode, names in last.synced_folders.items()}
    harmed = Moment(last.root, last.folders, last.files, entries, last.synced_files, last.saved)
    with pytest.raises(AssertionError):
        check(harmed, None, tmp_path / "harmed", *expected)
