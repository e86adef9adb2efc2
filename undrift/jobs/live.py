"""What `undrift watch` shows: the runs of some folders while they grow, as the report's document with one part more."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from undrift.core.errors import BadRunFolder, UndriftError
from undrift.core.run_files import CHECKPOINTS, ROUNDS, SETTINGS, SWEEP
from undrift.core.seals import read_sealed
from undrift.jobs.divergence import LOST, trouble
from undrift.jobs.overview import Score, best_of, ended_state, in_words, is_locked, locked_files, seconds_of
from undrift.report.document import Defaults, document
from undrift.report.load import Run, find, load, number, sweep_target

STATES = ("running", "diverged", "failed", "unreadable", "stopped", "finished", "to come")  # in the order of the table
OPEN = ("running", "stopped", "to come")  # states of runs that have rounds before them
OBSERVED = 5.0  # seconds after which a pace that was seen is believed
RISEN = 2.0  # times the lowest test loss, from which a loss above the first one is told
COLUMNS = (("run", ""), ("state", ""), ("rounds", ""), ("best so far", "higher"), ("dropped", ""), ("time left", ""))
LEGEND = (
    "Time left assumes that the remaining rounds are as fast as the recent ones. Dropped: clients that did not answer, or "
    "whose numbers were not finite."
)


class Seen(NamedTuple):
    """A run folder as it was when its files last changed."""

    files: tuple[object, ...]  # when they changed
    run: Run | None  # None: it could not be read
    ended: str  # what it is if no process holds it: finished, diverged or stopped
    wrong: str  # what is wrong with its last rounds, or why it cannot be read


class Row(NamedTuple):
    """One run, also one that a sweep has still to begin."""

    folder: str
    state: str
    rounds: int
    asked: int
    best: Score | None
    dropped: tuple[int, int]  # clients that dropped out, and those that were asked
    left: float | None  # seconds
    wrong: str


class Pace:
    """How fast a number grows, from what was seen of it."""

    def __init__(self, value: float, now: float) -> None:
        self.value, self.since = value, now

    def rate(self, value: float, now: float) -> float | None:
        """What is added each second; None until enough was seen."""
        if value < self.value:  # a resumed run has gone back
            self.value, self.since = value, now
        seen = now - self.since
        return (value - self.value) / seen if seen >= OBSERVED and value > self.value else None


class Folders:
    """The runs in some folders, each read again when its files have changed."""

    def __init__(self, paths: list[Path], defaults: Defaults | None = None) -> None:
        for path in paths:
            if not path.is_dir():
                raise BadRunFolder(f"{path} is no folder; give one that holds runs, or will")
        self.paths, self.defaults = paths, defaults
        self.seen: dict[Path, Seen] = {}
        self.paces: dict[Path, Pace] = {}
        self.work: Pace | None = None
        self.report: tuple[object, dict[str, Any]] = None, {}  # the last one, and what it was made of

    def document(self) -> dict[str, Any]:
        """The report on all runs that have rounds, and under `live` what is done, running and to come."""
        self.look()
        runs = [seen.run for seen in self.seen.values() if seen.run is not None and seen.run.rounds]
        state = [(folder, seen.files) for folder, seen in self.seen.items()]
        if self.report[0] != state:
            self.report = state, document(runs, sweep_target(self.paths), self.defaults, growing=True)
        content = self.report[1]
        return content | {"title": content["title"] or "No rounds yet", "live": self.live()}

    def look(self) -> None:
        """Read what has changed."""
        folders: list[Path] = []
        with contextlib.suppress(BadRunFolder, OSError):  # there is none yet, or one was just removed
            folders = find(self.paths)
        known = [folder for folder in self.seen if folder in folders]  # they keep their place, and so their colour
        self.seen = {folder: self.see(folder) for folder in [*known, *(f for f in folders if f not in self.seen)]}

    def see(self, folder: Path) -> Seen:
        before, files = self.seen.get(folder), changes(folder)
        if before is not None and before.files == files:
            return before
        try:
            (run,) = load([folder])
            return Seen(files, run, ended_state(folder), what_is_wrong(run))
        except (UndriftError, OSError) as error:
            if before is not None and before.run is not None and files != changes(folder):
                return before  # it was just being written
            return Seen(files, None, "unreadable", str(error))

    def live(self) -> dict[str, Any]:
        now, locked = time.monotonic(), locked_files()
        rows = [self.row(folder, seen, locked, now) for folder, seen in self.seen.items()]
        for path in self.paths:
            rows = with_planned(path, rows)
        rows.sort(key=lambda row: STATES.index(row.state))
        left = self.time_left(rows, now)
        counts = {state: sum(row.state == state for row in rows) for state in STATES}
        return {
            "counts": {state: count for state, count in counts.items() if count},
            "rounds": [
                sum(row.rounds for row in rows),
                sum(row.asked if row.state in OPEN else row.rounds for row in rows),
            ],
            "left": in_words(left) if left is not None else "",
            "notes": [f"{self.name(row)}: {row.wrong}" for row in rows if row.wrong] + waiting(rows),
            "gpus": gpus(),
            "table": {
                "title": "Runs",
                "columns": [{"name": name, "better": better} for name, better in COLUMNS],
                "rows": [cells(row, self.name(row)) for row in rows],
                "legend": LEGEND,
            },
        }

    def name(self, row: Row) -> str:
        """The folder as seen from the one that was given, if that is one."""
        name = Path(row.folder)
        if len(self.paths) > 1 or not name.is_relative_to(self.paths[0]):
            return row.folder
        return str(name.relative_to(self.paths[0])) if name != self.paths[0] else name.name or row.folder

    def row(self, folder: Path, seen: Seen, locked: frozenset[str], now: float) -> Row:
        """What there is to say of one run."""
        running, run = is_locked(folder / ".lock", locked), seen.run
        if run is None:
            return Row(str(folder), "running" if running else "unreadable", 0, 0, None, (0, 0), None, seen.wrong)
        state, asked = "running" if running else seen.ended, int(number(run.settings, "rounds") or run.rounds)
        if not running:
            self.paces.pop(folder, None)  # its pause is no pace
        pace = self.paces.setdefault(folder, Pace(run.rounds, now)).rate(run.rounds, now) if running else None
        seconds = 1 / pace if pace else seconds_of(run)
        left = (asked - run.rounds) * seconds if seconds is not None and state == "running" else None
        dropped = tuple(int(run.records.amounts(key).sum()) for key in ("dropped", "clients"))
        wrong = seen.wrong if state in ("running", "stopped") else ""
        return Row(str(folder), state, run.rounds, asked, best_of(run), (dropped[0], dropped[1]), left, wrong)

    def time_left(self, rows: list[Row], now: float) -> float | None:
        """The seconds until nothing is left to do; None where nothing runs.

        Work is counted in seconds of rounds. How much of it is done in a second was seen; until then each running run does one.
        """
        costs = {
            str(folder): seconds
            for folder, seen in self.seen.items()
            if seen.run is not None and (seconds := seconds_of(seen.run)) is not None
        }
        running = [row for row in rows if row.state == "running"]
        if not (costs and running):
            self.work = None
            return None
        usual = sum(costs.values()) / len(costs)
        ahead = sum(
            (row.asked - row.rounds) * costs.get(row.folder, usual)
            for row in rows
            if row.state in ("running", "to come")
        )
        done = sum(float(seen.run.records.amounts("seconds").sum()) for seen in self.seen.values() if seen.run)
        self.work = self.work or Pace(done, now)
        return ahead / (self.work.rate(done, now) or len(running))


def changes(folder: Path) -> tuple[object, ...]:
    """When and how the files that are read were last changed."""
    found: list[object] = []
    for name in (SETTINGS, ROUNDS, CHECKPOINTS):
        try:
            about = (folder / name).stat()
            found += [about.st_mtime_ns, about.st_size, about.st_ino]
        except OSError:
            found.append(None)
    return tuple(found)


def what_is_wrong(run: Run) -> str:
    """What is wrong with the last rounds: as the run itself would warn, or a loss that has risen."""
    records = run.records
    if not len(records):
        return ""
    last = [records.read(place) for place in range(max(0, len(records) - LOST), len(records))]
    try:
        told, _ = trouble(last, True)
    except (KeyError, TypeError):  # records of a kind that has no clients
        told = ""
    losses = records.values("loss")
    if not told and len(losses) > 2 and losses[-1] > max(losses[0], RISEN * min(losses)):
        told = f"the test loss has risen from {min(losses):.3g} to {losses[-1]:.3g}"
    return told


def with_planned(path: Path, rows: list[Row]) -> list[Row]:
    """The rows, with those that the sweep in a folder has still to begin, and why others have failed."""
    if not (path / SWEEP).exists():
        return rows
    try:
        sweep = read_sealed(path / SWEEP)
    except BadRunFolder as error:
        return [*rows, Row(str(path / SWEEP), "unreadable", 0, 0, None, (0, 0), None, str(error))]
    failed = {str(path / name): message for name, message in sweep["failed"].items()}
    planned = {str(path / name): asked for name, asked in sweep["runs"].items()}
    goes_on = any(row.state == "running" and row.folder in planned for row in rows)
    begun = {row.folder for row in rows}
    missing = {name: asked for name, asked in planned.items() if name not in begun}

    def with_state(row: Row) -> Row:
        if row.folder in failed and row.state not in ("running", "finished"):
            return row._replace(state="failed", wrong=failed[row.folder])
        waits = goes_on and row.folder in planned and row.state == "stopped"  # the sweep will come to it
        return row._replace(state="to come") if waits else row

    return [
        *map(with_state, rows),
        *(
            Row(name, "failed" if name in failed else "to come", 0, asked, None, (0, 0), None, failed.get(name, ""))
            for name, asked in missing.items()
        ),
    ]


def waiting(rows: list[Row]) -> list[str]:
    """What to do where nothing goes on though something is left."""
    states = {row.state for row in rows}
    if "running" in states or not states & {"stopped", "to come"}:
        return []
    return ["No run is running now. Continue stopped runs with --resume, and a sweep with the same command."]


def cells(row: Row, name: str) -> list[list[Any]]:
    """The row as cells of a table of the report; a third entry says how a cell is shown."""
    dropped, asked = row.dropped
    best = row.best
    share = row.rounds / row.asked if row.asked else 0.0
    return [
        [name],
        [row.state, STATES.index(row.state), {"mark": "risky" if row.wrong and row.state == "running" else row.state}],
        [f"{row.rounds} of {row.asked}", share, {"share": min(1.0, share)}],
        [f"{best.name} {best.value:.4f} in round {best.round}", best.value] if best else ["-", None],
        [f"{dropped} of {asked}", dropped] if dropped else ["", 0],
        [in_words(row.left), row.left] if row.left is not None else ["", None],
    ]


def gpus() -> list[dict[str, Any]]:
    """The GPUs of this machine: their memory in bytes, and how busy they are, in percent. None without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = "--query-gpu=name,memory.used,memory.total,utilization.gpu"
    try:
        told = subprocess.run(
            [tool, asked, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=5, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu for line in told.splitlines() if (gpu := gpu_of(line))]


def gpu_of(line: str) -> dict[str, Any] | None:
    """A line of nvidia-smi; None for another one.

    >>> gpu_of("NVIDIA H200, 4096, 143771, 87")
    {'name': 'NVIDIA H200', 'used': 4294967296, 'total': 150754820096, 'busy': 87}
    >>> gpu_of("Failed to initialize") is None
    True
    """
    name, *numbers = [part.strip() for part in line.split(",")]
    try:
        used, total, busy = map(int, numbers)
    except ValueError:
        return None
    return {"name": name, "used": used * 2**20, "total": total * 2**20, "busy": busy}
