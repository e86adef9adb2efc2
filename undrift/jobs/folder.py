"""The run folder: run.toml, rounds.jsonl, checkpoint/ and model.safetensors, written so that a kill loses nothing.

Every file but rounds.jsonl is written under a temporary name and renamed. A checkpoint is a safetensors file and a JSON
file, which holds the run's id, the checksum of the tensors and how far rounds.jsonl had come; a resumed run cuts rounds.jsonl
back to there. The checkpoint before the last one is kept too. Text files carry checksums (core/seals.py), and nothing is pickled.
simulate/client_store.py writes clients.table and the undo logs beside the checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import tomli_w
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from undrift.core.errors import BadRunFolder, BadSetting, CannotWrite
from undrift.core.files import make_folder, replacing, sync, writing
from undrift.core.run_files import (
    ARRIVALS,
    CHECKPOINTS,
    MODEL,
    ROUNDS,
    SETTINGS,
    SUPER,
    TABLE,
    VISITS,
    Checkpoint,
    beside,
    checkpoint_files,
    checksum,
    last_checkpoint,
    read_settings,
    round_of,
)
from undrift.core.seals import Place, append_lines, last_place, read_lines, seal_toml, write_sealed

try:
    import fcntl
except ImportError:  # Windows has none: there, two runs in one folder go unnoticed
    fcntl = None  # type: ignore[assignment]

OURS = (SETTINGS, ROUNDS, CHECKPOINTS, MODEL, TABLE)


class RunFolder:
    """One run on disk."""

    locks = fcntl is not None
    lock: BinaryIO | None = None  # held while this process runs in the folder

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings_file, self.rounds_file = path / SETTINGS, path / ROUNDS
        self.checkpoints, self.model_file = path / CHECKPOINTS, path / MODEL
        self.run = ""  # the run's id, once it is known
        self.written = Place(0, "")  # how far rounds.jsonl has been written

    def exists(self) -> bool:
        return any((self.path / name).exists() for name in OURS)

    def make(self, resume: bool) -> None:
        """Make the folder, which may hold a run only if that is resumed."""
        if not resume:
            self.check_empty()
        try:
            make_folder(self.path)
        except OSError as error:
            raise BadRunFolder(f"cannot make {self.path}: {error.strerror}") from error

    def create(self, settings: dict[str, Any]) -> None:
        """Begin a run in an empty folder."""
        self.check_empty()
        self.run = secrets.token_hex(8)
        self.written = Place(0, self.run)
        self.write_settings(settings)
        with writing(self.rounds_file):
            self.rounds_file.touch()
            sync(self.path)

    def check_empty(self) -> None:
        if self.exists():
            raise BadRunFolder(f"{self.path} holds a run already; go on with --resume, or choose another --out")

    def write_settings(self, settings: dict[str, Any]) -> None:
        self.check_owner()
        with writing(self.settings_file), replacing(self.settings_file) as file:
            file.write_bytes(seal_toml(tomli_w.dumps(settings), self.run))

    def settings(self) -> dict[str, Any]:
        if not self.settings_file.exists():
            raise BadRunFolder(f"{self.path} holds no run (no run.toml); start it without --resume")
        settings, self.run = read_settings(self.path)
        return settings

    def append(self, record: dict[str, Any]) -> None:
        # JSON has no NaN and no infinity: they become null.
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.check_owner()
        with writing(self.rounds_file), self.rounds_file.open("ab", buffering=0) as file:
            self.written = append_lines(file, self.written, plain)

    def records(self) -> list[dict[str, Any]]:
        """The rounds up to the last checkpoint, once that is loaded."""
        assert self.run
        return list(read_lines(self.rounds_file, self.run, self.written, further=False))

    def save(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write a checkpoint; remove older ones, but for the one before, only when this one is complete."""
        self.check_owner()
        before, file = self.latest(), beside(self.checkpoints, facts["round"], "safetensors")
        with writing(file):
            make_folder(self.checkpoints)
            if before is None or before.round != facts["round"]:  # else nothing has changed since
                _save_tensors(file, tensors)
            lines = {ROUNDS: self.written}
            lines |= {name: place for name in (VISITS, ARRIVALS) if (place := last_place(self.path / name))}
            for name in lines:
                sync(self.path / name)
            facts = facts | {"run": self.run, "sha256": checksum(file), "lines": lines}
            write_sealed(file.with_suffix(".json"), facts)
            kept = [round_of(file) for file in checkpoint_files(self.path)[-2:]]
            for old in self.checkpoints.iterdir():  # also what a kill left half written
                if round_of(old) not in kept:
                    old.unlink()

    def load(self, rounds: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read the last checkpoint, if any; `rounds` is the run's length."""
        self.settings()
        with self.offering():
            last = self.latest()
        if last is None:
            if self.model_file.exists():
                raise BadRunFolder(f"{self.path} holds a finished run without its checkpoint; choose another --out")
            self.written = Place(0, self.run)
            return None
        if last.round > rounds:
            raise BadSetting(
                f"{self.path} holds {last.round} rounds already, more than the {rounds} asked for; "
                f"give --rounds {last.round} or more"
            )
        with self.offering():
            tensors = self.tensors(last)
            self.written = last.lines(ROUNDS) or Place(0, self.run)
            self.records()
        return tensors, last.facts

    @contextlib.contextmanager
    def offering(self) -> Iterator[None]:
        """Add to an error where help is."""
        try:
            yield
        except BadRunFolder as error:
            raise BadRunFolder(f"{error}; 'undrift verify {self.path}' says how to go on") from error

    def tensors(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        file = checkpoint.file.with_suffix(".safetensors")
        try:
            if checksum(file) != checkpoint.facts["sha256"]:
                raise BadRunFolder(f"the checkpoint {file} is damaged (its checksum is wrong)")
            return load_file(file)
        except SafetensorError as error:
            raise BadRunFolder(f"the checkpoint {file} is damaged ({error})") from error

    def cut_back(self) -> None:
        """Truncate rounds.jsonl to the checkpoint that was loaded."""
        with writing(self.rounds_file), self.rounds_file.open("ab") as file:
            file.truncate(self.written.bytes)

    @contextlib.contextmanager
    def locking(self) -> Iterator[None]:
        """Keep every other process out of the folder while this one runs."""
        if not self.locks:
            yield
            return
        with writing(self.path):
            file = (self.path / ".lock").open("wb")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadRunFolder(
                    f"another process is running in {self.path}; wait for it, or choose another --out"
                ) from None
            self.lock = file
            try:
                self.check_owner()
                yield
            finally:
                self.lock = None

    def check_owner(self) -> None:
        """Refuse to write into a folder that is no longer this process's: the lock is not the one that it holds."""
        if self.lock is None:
            return
        with writing(self.path):
            try:
                mine = os.path.samestat(os.fstat(self.lock.fileno()), os.stat(self.path / ".lock"))
            except FileNotFoundError:
                raise CannotWrite(f"{self.path} was removed while its run was going on; start again") from None
        if not mine:
            raise CannotWrite(
                f"{self.path} was removed and taken by another run; start this one again with another --out"
            )

    def is_finished(self) -> bool:
        """Whether the run came to its end, and its model is as it was written."""
        last = self.latest()
        model = last.facts.get("model") if last else None
        return model is not None and self.model_file.exists() and checksum(self.model_file) == model

    def last_checkpoint(self) -> int:
        """The round of the last checkpoint, or 0."""
        last = self.latest()
        return last.round if last else 0

    def latest(self) -> Checkpoint | None:
        """The last checkpoint."""
        if not checkpoint_files(self.path):
            return None
        if not self.run:
            self.settings()
        return last_checkpoint(self.path, self.run)

    def write_model(self, model: dict[str, Tensor]) -> str:
        """Write the model, and return its checksum."""
        self.check_owner()
        with writing(self.model_file):
            _save_tensors(self.model_file, model)
            return checksum(self.model_file)

    def write_super(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.check_owner()
        models, about = (self.path / name for name in SUPER)
        with writing(models):
            _save_tensors(models, tensors)
            write_sealed(about, facts | {"sha256": checksum(models)})


class ReadOnlyFolder(RunFolder):
    """A run folder that another process writes: this one only reads it, to resume."""

    def _skip(self, *given: Any, **named: Any) -> None:
        pass

    make = create = write_settings = append = save = cut_back = write_super = _skip

    def write_model(self, model: dict[str, Tensor]) -> str:
        return ""

    locks = False


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    # Cloned: two leaves of a state may be one tensor, which the format refuses.
    plain = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    with replacing(path) as file:
        save_file(plain, file)
