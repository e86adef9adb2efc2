"""The files of a run's folder, as resuming, reporting and verifying read them."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from undrift.core.errors import BadRunFolder
from undrift.core.seals import Place, read_sealed, unseal_toml

SETTINGS, ROUNDS, CHECKPOINTS, MODEL = "run.toml", "rounds.jsonl", "checkpoint", "model.safetensors"
ADAPTER = "adapter"  # a checkpoint of peft: the adapters of a model that has some
TABLE = "clients.table"  # what clients keep, where that is on disk
SUPER = "super.safetensors", "super.json"  # all models of a personal method, and facts about them
FIGURES = "figures.json"  # pictures and numbers of these models
LEDGER = "privacy.json"  # a private deployment's secret, and what it has spent
BEST = "best.safetensors"  # the model of the best round, in a deployment whose clients score models
SWEEP = "sweep.json"  # which runs a sweep makes in a folder, and how many rounds of each
DEPLOYED, VISITS = "deploy.json", "clients.jsonl"  # a deployment's token, and who answered what
ARRIVALS = "arrivals.jsonl"  # an asynchronous deployment's answers, in the order in which they came


class Checkpoint(NamedTuple):
    """The JSON file of a checkpoint; its tensors and its undo log lie beside it."""

    file: Path
    facts: dict[str, Any]

    @property
    def round(self) -> int:
        return int(self.facts["round"])

    def lines(self, name: str) -> Place | None:
        """How far that file of lines had come, if it was there."""
        return Place(*self.facts["lines"][name]) if name in self.facts["lines"] else None


def read_settings(folder: Path) -> tuple[dict[str, Any], str]:
    """The content of run.toml, and the run's id."""
    file = folder / SETTINGS
    try:
        text, run = unseal_toml(file.read_bytes())
        return tomllib.loads(text), run
    except OSError as error:
        raise BadRunFolder(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadRunFolder(
            f"{file} is damaged, was edited or is of an older version ({error}); start again with another --out"
        ) from error


def checkpoint_files(folder: Path) -> list[Path]:
    """The JSON files of the checkpoints, the last one at the end."""
    return sorted((folder / CHECKPOINTS).glob("round-*.json"), key=round_of)


def read_checkpoint(file: Path, run: str) -> Checkpoint:
    """A checkpoint of that run."""
    found = Checkpoint(file, read_sealed(file))
    if found.facts.get("run") != run or beside(file.parent, found.round, "json") != file:
        raise BadRunFolder(f"{file} belongs to another run, or to another round")
    return found


def last_checkpoint(folder: Path, run: str) -> Checkpoint | None:
    files = checkpoint_files(folder)
    return read_checkpoint(files[-1], run) if files else None


def beside(checkpoints: Path, round: int, kind: str) -> Path:
    """A file of the checkpoint of that round: json, safetensors or undo."""
    return checkpoints / f"round-{round:06d}.{kind}"


def round_of(file: Path) -> int:
    """The round of a checkpoint's file; -1 if its name has none."""
    number = file.stem.removeprefix("round-")
    return int(number) if number.isdecimal() else -1


def checksum(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise BadRunFolder(f"cannot read {file}: {error.strerror}") from error


def read_super(folder: Path) -> dict[str, Any]:
    """The facts about a super model, whose tensors are as they were written."""
    facts = read_sealed(folder / SUPER[1])
    if checksum(folder / SUPER[0]) != facts.pop("sha256"):
        raise BadRunFolder(f"{folder / SUPER[0]} is damaged: its checksum is wrong")
    return facts
