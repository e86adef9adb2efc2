"""The clock that a run's settings describe: drawn, a trace, or what a real federation has recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from undrift.core.errors import BadData, BadSetting
from undrift.core.run_files import ARRIVALS, DEPLOYED, VISITS
from undrift.core.seals import read_lines, read_sealed
from undrift.jobs.config import RunConfig
from undrift.round.clock import Clock, Drawn, Traced, parse_spreads, read_trace, write_trace
from undrift.round.timeline import Arrival, Recorded

USUAL = "lognormal:0.5"  # the clock of an asynchronous run, unless one is given


def clock_of(config: RunConfig) -> Clock | Recorded | None:
    """The clock, or the recorded arrivals, of a run; None if it has no virtual time."""
    text = config.clock or (USUAL if config.asynchronous else "")
    if not text:
        return None
    if (spreads := parse_spreads(text)) is not None:
        return Drawn.of(spreads, config.clients, config.seed, config.step_seconds, config.bandwidth, config.latency)
    if config.bandwidth or config.latency:
        raise BadSetting("a trace has the seconds of whole answers; leave bandwidth and latency out")
    path = Path(text)
    if not path.is_dir():
        return read_trace(path, config.clients)
    if not (path / ARRIVALS).exists():
        rows = read_seconds(path)
        return Traced([np.array(each_of(rows, client, path)) for client in range(config.clients)])
    if not config.asynchronous:
        raise BadSetting(f"{path} holds an asynchronous run, whose arrivals are replayed; give --asynchronous")
    arrivals = [Arrival(**{n: line[n] for n in Arrival._fields}) for line in read_lines(path / ARRIVALS, "")]
    strangers = {arrival.client for arrival in arrivals if arrival.client >= config.clients}
    if strangers:
        raise BadSetting(f"{path} has answers of client {min(strangers)}; give --clients as many as that run had")
    return Recorded(arrivals)


def concurrent_of(config: RunConfig) -> int:
    """How many clients are at work at a time; 0: rounds wait for their cohort."""
    return (config.concurrent or min(config.clients, 10 * config.cohort)) if config.asynchronous else 0


def read_seconds(folder: Path) -> list[tuple[int, float]]:
    """What each answer took in a deployed run, as its client says: (id, seconds) in the order of the rounds."""
    if not (folder / VISITS).exists():
        raise BadSetting(
            f"{folder} is no folder of a deployed run (no {VISITS}); clock takes lognormal:0.5 or a trace, too"
        )
    ids = {name: id for id, name in enumerate(read_sealed(folder / DEPLOYED)["names"])}
    took: dict[tuple[int, int], float] = {}
    for visit in read_lines(folder / VISITS, ""):
        if visit["exchange"] in ("measure", "train") and visit["outcome"] == "answered":
            key = (visit["round"], ids[visit["client"]])
            took[key] = took.get(key, 0.0) + visit["seconds"]
    if not any(took.values()):
        raise BadData(f"{folder} has no seconds of clients: a private or secure run does not tell them")
    return [(client, seconds) for (_, client), seconds in took.items() if seconds > 0]


def each_of(rows: list[tuple[int, float]], client: int, folder: Path) -> list[float]:
    found = [seconds for id, seconds in rows if id == client]
    if not found:
        raise BadData(f"client {client} has never answered in {folder}; a clock needs the seconds of all clients")
    return found


def write_measured(folder: Path, file: Path) -> int:
    """Write a trace of a deployed run; return how many answers it has."""
    rows = read_seconds(folder)
    write_trace(file, rows)
    return len(rows)
