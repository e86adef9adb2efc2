"""The run folder: run.toml, rounds.jsonl, checkpoint/ and model.safetensors, written so that a kill loses nothing.

Every file but rounds.jsonl is written under a temporary name and renamed. A checkpoint is a safetensors file and a JSON
file with its name, its checksum and the length of rounds.jsonl at that moment; a resumed run cuts rounds.jsonl back to
that length. Nothing is pickled. simulate/client_store.py writes clients.table and clients.undo.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from undrift.core.errors import BadRunFolder, BadSetting, UndriftError
from undrift.core.files import sync
from undrift.jobs.config import read_toml

try:
    import fcntl
except ImportError:  # Windows has none: there, two runs in one folder go unnoticed
    fcntl = None  # type: ignore[assignment]

OURS = ("run.toml", "rounds.jsonl", "checkpoint", "model.safetensors", "clients.table", "clients.undo")
AGAIN = "start again with another --out"
SUPER = "super.safetensors", "super.json"  # all models of a personal method, and facts about them


class RunFolder:
    """One run on disk."""

    locks = fcntl is not None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings_file, self.rounds_file = path / "run.toml", path / "rounds.jsonl"
        self.checkpoints, self.model_file = path / "checkpoint", path / "model.safetensors"

    def exists(self) -> bool:
        return any((self.path / name).exists() for name in OURS)

    def make(self, resume: bool) -> None:
        """Make the folder, which may hold a run only if that is resumed."""
        if not resume:
            self.check_empty()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadRunFolder(f"cannot make {self.path}: {error.strerror}") from error

    def create(self, settings: dict[str, Any]) -> None:
        """Begin a run in an empty folder."""
        self.check_empty()
        self.write_settings(settings)
        self.rounds_file.touch()

    def check_empty(self) -> None:
        if self.exists():
            raise BadRunFolder(f"{self.path} holds a run already; go on with --resume, or choose another --out")

    def write_settings(self, settings: dict[str, Any]) -> None:
        with _replace(self.settings_file) as file:
            file.write_bytes(tomli_w.dumps(settings).encode())

    def settings(self) -> dict[str, Any]:
        if not self.settings_file.exists():
            raise BadRunFolder(f"{self.path} holds no run (no run.toml); start it without --resume")
        try:
            return read_toml(self.settings_file)
        except UndriftError as error:
            raise BadRunFolder(str(error)) from error

    def append(self, record: dict[str, Any]) -> None:
        # JSON has no NaN and no infinity: they become null.
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with self.rounds_file.open("a") as file:
            file.write(json.dumps(plain) + "\n")

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.rounds_file.read_text().splitlines()]

    def save(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write a checkpoint; remove the one before only when this one is complete."""
        self.checkpoints.mkdir(exist_ok=True)
        name = f"round-{facts['round']:06d}.safetensors"
        _save_tensors(self.checkpoints / name, tensors)
        sync(self.rounds_file)
        checksum, size = _checksum(self.checkpoints / name), self.rounds_file.stat().st_size
        with _replace(self.checkpoints / "latest.json") as file:
            file.write_text(json.dumps(facts | {"tensors": name, "sha256": checksum, "rounds_bytes": size}, indent=1))
        for old in self.checkpoints.iterdir():  # also what a kill left half written
            if old.name not in (name, "latest.json"):
                old.unlink()

    def load(self, rounds: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read the last complete checkpoint, if any, and cut rounds.jsonl back to it; `rounds` is the run's length."""
        latest = self.checkpoints / "latest.json"
        if not latest.exists():
            if self.model_file.exists():
                raise BadRunFolder(f"{self.path} holds a finished run without its checkpoint; choose another --out")
            self.cut_back(0)
            return None
        try:
            facts = json.loads(latest.read_text())
            file = self.checkpoints / facts["tensors"]
            if _checksum(file) != facts["sha256"]:
                raise BadRunFolder(f"the checkpoint {file} is damaged (its checksum is wrong); {AGAIN}")
            tensors = load_file(file)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise BadRunFolder(f"the checkpoint in {self.checkpoints} is damaged ({error}); {AGAIN}") from error
        if facts["round"] > rounds:
            raise BadSetting(
                f"{self.path} holds {facts['round']} rounds already, more than the {rounds} asked for; "
                f"give --rounds {facts['round']} or more"
            )
        if not self.rounds_file.exists() or self.rounds_file.stat().st_size < facts["rounds_bytes"]:
            raise BadRunFolder(f"{self.rounds_file} is shorter than its checkpoint says; {AGAIN}")
        self.cut_back(facts["rounds_bytes"])
        return tensors, facts

    def cut_back(self, length: int) -> None:
        """Truncate rounds.jsonl."""
        with self.rounds_file.open("ab") as file:
            file.truncate(length)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other process out of the folder while this one runs."""
        if not self.locks:
            yield
            return
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadRunFolder(
                    f"another process is running in {self.path}; wait for it, or choose another --out"
                ) from None
            yield

    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.model_file.exists() and bool(self._latest().get("finished"))

    def reached(self) -> int:
        """The round of the last checkpoint, or 0."""
        return int(self._latest().get("round", 0))

    def _latest(self) -> dict[str, Any]:
        file = self.checkpoints / "latest.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def write_model(self, model: dict[str, Tensor]) -> None:
        _save_tensors(self.model_file, model)

    def write_super(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        _save_tensors(self.path / SUPER[0], tensors)
        with _replace(self.path / SUPER[1]) as file:
            file.write_text(json.dumps(facts, indent=1))


class ReadOnlyFolder(RunFolder):
    """A run folder that another process writes: this one only reads it, to resume."""

    def _skip(self, *given: Any, **named: Any) -> None:
        pass

    make = create = write_settings = append = save = cut_back = write_model = write_super = _skip
    locks = False


@contextlib.contextmanager
def _replace(path: Path) -> Iterator[Path]:
    """A temporary file to be written, which then replaces `path`."""
    temporary = path.with_name(f".{path.name}")
    yield temporary
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    # Cloned: two leaves of a state may be one tensor, which the format refuses.
    plain = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    with _replace(path) as file:
        save_file(plain, file)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
