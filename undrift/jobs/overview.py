"""`undrift ls`: the runs of a folder, how far each one is, and how it does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from undrift.core.errors import UndriftError
from undrift.core.run_files import last_checkpoint, read_settings
from undrift.report.load import Run, find, load

LOCKS = Path("/proc/locks")  # where Linux lists locks; to try a run's lock could stop one that begins
RECENT = 20  # rounds whose mean time says how long the rest takes


class Line(NamedTuple):
    """What is said of one run."""

    run: str
    state: str  # running, stopped, finished, diverged, or unreadable
    rounds: str
    best: str  # the best score, and in which round
    left: str  # the time to the last round


def overview(paths: list[Path]) -> list[Line]:
    """A line for each run in the folders."""
    return [line_of(folder) for folder in find(paths)]


def line_of(folder: Path) -> Line:
    try:
        (run,) = load([folder])
        state = state_of(folder)
    except UndriftError:
        return Line(str(folder), "unreadable", "", f"see undrift verify {folder}", "")
    asked = int(run.settings["rounds"])
    left = remaining(run, asked) if state in ("running", "stopped") else ""
    best = best_of(run)
    told = f"{best.name} {best.value:.4f} in round {best.round}" if best else ""
    return Line(str(folder), state, f"{run.rounds}/{asked}", told, left)


def state_of(folder: Path) -> str:
    """Whether a run is running, finished, diverged or stopped."""
    return "running" if is_locked(folder / ".lock", locked_files()) else ended_state(folder)


def ended_state(folder: Path) -> str:
    """What a run is that no process holds: finished, diverged or stopped."""
    last = last_checkpoint(folder, read_settings(folder)[1])
    facts = last.facts if last else {}
    if not facts.get("finished"):
        return "stopped"
    return "diverged" if facts.get("stopped") == "diverged" else "finished"


def locked_files() -> frozenset[str]:
    """The words of the list of locks; a file that is locked is among them, as far as this machine knows."""
    return frozenset(LOCKS.read_text().split()) if LOCKS.exists() else frozenset()


def is_locked(file: Path, locked: frozenset[str]) -> bool:
    if not file.exists():
        return False
    about = file.stat()
    return f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}" in locked


class Score(NamedTuple):
    """The best score of a run so far."""

    name: str
    value: float
    round: int


def best_of(run: Run) -> Score | None:
    for name, pick in (("accuracy", max), ("dice", max), ("c_index", max), ("loss", min)):
        scored = [
            (v, int(r)) for v, r in zip(run.records.column(name), run.records.column("round"), strict=True) if v == v
        ]
        if scored:
            return Score(name, *pick(scored, key=lambda pair: pair[0]))
    return None


def remaining(run: Run, asked: int) -> str:
    """The time that the other rounds take, if they are like the last ones."""
    seconds = seconds_of(run)
    return in_words((asked - run.rounds) * seconds) if seconds is not None else ""


def seconds_of(run: Run) -> float | None:
    """The seconds of a round, the mean of the last ones."""
    seconds = run.records.values("seconds")[-RECENT:]
    return sum(seconds) / len(seconds) if seconds else None


def in_words(seconds: float) -> str:
    """A time for people.

    >>> in_words(4.2), in_words(200), in_words(7300)
    ('4 s', '3 min', '2 h 2 min')
    """
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
