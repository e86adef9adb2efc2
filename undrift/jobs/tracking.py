"""Trackers: a run tells them its settings, its numbers and its report. Each is one file in track/, with a class `Tracker`.

Nothing that a tracker does ends a run: where one fails, that is said once, and the run goes on without it.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from undrift.core.errors import BadSetting
from undrift.core.names import attribute, module_of, printable
from undrift.jobs.config import split_trackers

Scores = tuple[int, dict[str, float]]  # a round and its numbers
PROJECT = "undrift"  # where the tracker's own environment variables name no other


class Tracked(NamedTuple):
    """What a tracker is told of a run when it begins, and when it goes on after a resume."""

    id: str  # as in run.toml; it stays the same when the run is resumed
    name: str
    group: str  # runs of a sweep have the same
    folder: Path
    settings: Mapping[str, Any]  # flat: `set.lr`, `made.torch`
    round: int  # rounds that were done before


class Tracker(Protocol):
    """One run in a tracker."""

    reached: int  # the last round that it has already

    def __init__(self, run: Tracked) -> None:
        """Begin the run, or go on with the one of the same id."""

    def add(self, scores: Sequence[Scores]) -> None:
        """Add the numbers of further rounds."""

    def end(self, stopped: str, report: Path | None) -> None:
        """End with the reason, and with the page of `undrift report` as an artefact; None if the run was interrupted."""


def tracker_class(name: str) -> Callable[[Tracked], Tracker]:
    """The class of a tracker. Its package must be installed."""
    if ":" in name:
        found: Callable[[Tracked], Tracker] = attribute(name)
        return found
    try:
        with quietly():
            return module_of("trackers", name).Tracker  # type: ignore[no-any-return]
    except ImportError as error:
        raise BadSetting(f"track {name} needs a package ({error}); pip install 'undrift[{name}]'") from error


def check_trackers(track: str, has_folder: bool) -> None:
    """Refuse trackers that cannot be used, before anything is written."""
    for name in split_trackers(track):
        tracker_class(name)
    if track and not has_folder:
        raise BadSetting("track needs the run's folder, which holds the run's id and its report; give out")


class Tracking:
    """The trackers of a run. They begin with its first new record, when all settings are known."""

    def __init__(self, track: str, folder: Path | None, round: int) -> None:
        self.classes = {name: tracker_class(name) for name in split_trackers(track)}
        self.folder, self.round = folder or Path(), round
        self.open: dict[str, Tracker] | None = None

    def send(self, id: str, settings: Callable[[], Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> None:
        """Send all records that a tracker does not have yet."""
        if not self.classes:
            return
        if self.open is None:
            folder = self.folder.resolve()
            about = Tracked(id, folder.name, folder.parent.name, folder, dict(flat(settings())), self.round)
            self.open = {}
            for name, kind in self.classes.items():
                with self.heard(name):
                    self.open[name] = kind(about)
        for name, tracker in list(self.open.items()):
            with self.heard(name):
                new = unsent(records, tracker.reached)
                if new:
                    tracker.add([(record["round"], dict(numbers(record))) for record in new])
                    tracker.reached = new[-1]["round"]

    def end(self, stopped: str, report: Callable[[], Path | None]) -> None:
        """End all trackers; `report` writes the page."""
        if not self.open:
            return
        page = None
        with self.heard("the report"):
            page = report()
        for name, tracker in list(self.open.items()):
            with self.heard(name):
                tracker.end(stopped, page)
        self.open = {}

    @contextlib.contextmanager
    def heard(self, name: str) -> Iterator[None]:
        """Whatever a tracker raises is said, and the tracker is left alone from then on."""
        try:
            with quietly():
                yield
        except Exception as error:
            text = printable(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
            warnings.warn(
                f"tracking: {name} failed ({text}); the run goes on without it, and --resume sends what is missing",
                stacklevel=4,
            )
            if self.open is not None:
                self.open.pop(name, None)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what a tracker's package prints and warns of out of the run's own lines."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def unsent(records: Sequence[Mapping[str, Any]], reached: int) -> Sequence[Mapping[str, Any]]:
    """The records after round `reached`; there may be many, and few are new."""
    first = len(records)
    while first and records[first - 1]["round"] > reached:
        first -= 1
    return records[first:]


def flat(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Tables within tables as one.

    >>> dict(flat({"rounds": 3, "set": {"lr": 0.1}}))
    {'rounds': 3, 'set.lr': 0.1}
    """
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number of a record that can be drawn; those of a list are numbered.

    >>> dict(numbers({"round": 3, "loss": 0.5, "accuracy": None, "recall": [0.25, 1.0], "consistency": float("nan")}))
    {'loss': 0.5, 'recall.0': 0.25, 'recall.1': 1.0}
    """
    for name, value in record.items():
        if isinstance(value, list | tuple):
            value = {str(place): entry for place, entry in enumerate(value)}
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", number) for inner, number in numbers(value))
        elif isinstance(value, int | float) and name != "round" and math.isfinite(value):
            yield name, float(value)
