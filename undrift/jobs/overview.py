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
    return Line(str(folder), state, f"{run.rounds}/{asked}", best_of(run), left)


def state_of(folder: Path) -> str:
    """Whether a run is running, finished, diverged or stopped."""
    last = last_checkpoint(folder, read_settings(folder)[1])
    facts = last.facts if last else {}
    if is_locked(folder / ".lock"):
        return "running"
    if not facts.get("finished"):
        return "stopped"
    return "diverged" if facts.get("stopped") == "diverged" else "finished"


def is_locked(file: Path) -> bool:
    """Whether a process holds a lock on the file, as far as this machine knows."""
    if not (file.exists() and LOCKS.exists()):
        return False
    about = file.stat()
    place = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    return any(place in line.split() for line in LOCKS.read_text().splitlines())


def best_of(run: Run) -> str:
    for name, pick in (("accuracy", max), ("dice", max), ("loss", min)):
        scored = [
            (v, int(r)) for v, r in zip(run.records.column(name), run.records.column("round"), strict=True) if v == v
        ]
        if scored:
            value, at = pick(scored, key=lambda pair: pair[0])
            return f"{name} {value:.4f} in round {at}"
    return ""


def remaining(run: Run, asked: int) -> str:
    """The time that the other rounds take, if they are like the last ones."""
    seconds = run.records.values("seconds")[-RECENT:]
    return in_words((asked - run.rounds) * sum(seconds) / len(seconds)) if seconds else ""


def in_words(seconds: float) -> str:
    """A time for people.

    >>> in_words(4.2), in_words(200), in_words(7300)
    ('4 s', '3 min', '2 h 2 min')
    """
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
