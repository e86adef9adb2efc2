"""`undrift verify`: what is damaged in a run's folder, and from where the run can go on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from undrift.core.errors import BadRunFolder
from undrift.core.files import sync, writing
from undrift.core.run_files import (
    ARRIVALS,
    DEPLOYED,
    FIGURES,
    LEDGER,
    ROUNDS,
    SUPER,
    VISITS,
    checkpoint_files,
    checksum,
    read_checkpoint,
    read_super,
    round_of,
)
from undrift.core.seals import read_lines, read_sealed
from undrift.jobs.folder import RunFolder
from undrift.simulate.client_store import find_rows


class Verdict(NamedTuple):
    """What was found in a folder."""

    damage: list[str]  # one line for each damage
    advice: str


def verify(path: Path, back: bool = False) -> Verdict:
    """Check all that the run has written. With `back`, a damaged last checkpoint is given up for the one before it."""
    folder = RunFolder(path)
    with folder.locking() if os.access(path, os.W_OK) else contextlib.nullcontext():
        try:
            folder.settings()
        except BadRunFolder as error:
            return Verdict([str(error)], "nothing else can be checked")
        files = checkpoint_files(path)[-2:]
        found = [damage_of_checkpoint(folder, file) for file in files]
        damage = list(dict.fromkeys(line for lines in (*found, damage_of_others(folder)) for line in lines))
        if not found or not found[-1]:
            return Verdict(damage, "go on with --resume")
        if found[0]:
            return Verdict(damage, "no checkpoint is whole; start again with another --out")
        now, before = round_of(files[1]), round_of(files[0])
        if not back:
            how = f"'undrift verify {path} --back' goes back to it"
            return Verdict(damage, f"the checkpoint before the last one, of round {before}, is whole; {how}")
        with writing(path):
            files[1].unlink()
            sync(folder.checkpoints)
        return Verdict(damage_of_others(folder), f"went back from round {now} to round {before}; go on with --resume")


def damage_of_checkpoint(folder: RunFolder, file: Path) -> list[str]:
    """What keeps a checkpoint from being resumed."""
    damage: list[str] = []
    with noting(damage):
        checkpoint = read_checkpoint(file, folder.run)
        with noting(damage):
            tensors = folder.tensors(checkpoint)
            if "clients.table" in tensors:
                find_rows(folder.path, checkpoint.round, tensors)
        for name, first in ((ROUNDS, folder.run), (VISITS, ""), (ARRIVALS, "")):
            with noting(damage):
                skim(read_lines(folder.path / name, first, checkpoint.lines(name), further=False))
    return damage


def damage_of_others(folder: RunFolder) -> list[str]:
    """What is damaged besides: lines after the last checkpoint, models and figures."""
    damage: list[str] = []
    with noting(damage):
        skim(read_lines(folder.rounds_file, folder.run))
    with noting(damage):
        last = folder.latest()
        model = last.facts.get("model") if last else None
        if model is not None and checksum(folder.model_file) != model:
            raise BadRunFolder(f"{folder.model_file} is damaged; --resume writes it again")
    with noting(damage):
        if (folder.path / SUPER[1]).exists():
            read_super(folder.path)
    for name in (FIGURES, DEPLOYED, LEDGER):
        with noting(damage):
            if (folder.path / name).exists():
                read_sealed(folder.path / name)
    return damage


@contextlib.contextmanager
def noting(damage: list[str]) -> Iterator[None]:
    try:
        yield
    except BadRunFolder as error:
        damage.append(str(error))


def skim(lines: Iterator[Any]) -> None:
    for _ in lines:
        pass
