"""The numbers of the rounds as curves for the page, thinned so that the page stays small.

A curve of a group has a value for each of its runs at the same rounds, so that the page can draw means, bands or single
seeds. What was spent up to a round (gradients, bytes, seconds) is kept for each run as a line of a few corners.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrift.report.load import Group, Run
from undrift.report.records import Floats
from undrift.report.scores import Metric, traffic

NUMBERS = 100_000  # in all curves of a page, about; each takes seven bytes
POINTS = 100  # points that each curve should have room for; otherwise fewer numbers of the record are drawn
LEAST_POINTS, MOST_POINTS = 60, 1000  # points of a curve
FEWEST_MEASURES = 4
CORNERS, TOLERANCE = 40, 0.002  # corners of a line of costs, and how far it may be off, as a share of its range

# What the record's numbers are called; the first ones are drawn first.
LABELS = {
    "loss": "test loss", "consistency": "consistency: distance between local models", "forgetting": "forgetting",
    "train_loss": "training loss", "absent_loss": "loss on absent clients", "client_accuracy_p10": "clients' accuracy, 10 %",
    "client_accuracy_p50": "clients' accuracy, median", "client_accuracy_p90": "clients' accuracy, 90 %",
    "dropped": "clients that dropped out", "seconds": "seconds per round", "network_seconds": "network seconds per round",
    "bytes_down": "bytes down per round", "bytes_up": "bytes up per round", "gradients": "gradients per round",
}  # fmt: skip
LOGARITHMIC = ("consistency",)
WIDE = 1e4  # times the lowest value, from which on an axis is logarithmic at first


class Axis(NamedTuple):
    """What curves can be drawn over."""

    key: str
    label: str
    spent: Callable[[Run], Floats]  # [n] in each round


AXES = (
    Axis("gradients", "gradients", lambda run: run.records.amounts("gradients")),
    Axis("bytes", "bytes, down and up", traffic),
    Axis("seconds", "seconds", lambda run: run.records.amounts("seconds")),
    Axis("network", "seconds on the simulated network", lambda run: run.records.amounts("network_seconds")),
)


class Measure(NamedTuple):
    """A number of the record that is drawn."""

    key: str
    label: str
    log: bool  # whether it is drawn on a logarithmic axis at first


def axes_of(groups: list[Group]) -> list[Axis]:
    """The axes on which the runs move."""
    runs = [run for group in groups for run in group.runs]
    return [axis for axis in AXES if any(axis.spent(run).any() for run in runs)]


def measures_of(groups: list[Group], metric: Metric) -> list[Measure]:
    """The scores, the deciding one first, and the other numbers of the records that are not the same in all rounds."""
    runs = [run for group in groups for run in group.runs]
    keys = dict.fromkeys(key for run in runs for key in run.records.columns if key != "round")
    known = [metric.name, "loss", metric.validation, *LABELS]
    ordered = [key for key in dict.fromkeys(known) if key in keys] + sorted(key for key in keys if key not in known)
    ranges = {key: range_of(runs, key) for key in ordered}
    drawn = (key for key in ordered if key in (metric.name, "loss") or ranges[key][0] < ranges[key][1])
    return [Measure(key, label_of(key), key in LOGARITHMIC or is_wide(*ranges[key])) for key in drawn]


def label_of(key: str) -> str:
    """
    >>> label_of("val_accuracy"), label_of("accuracy"), label_of("qp_active")
    ('validation accuracy', 'test accuracy', 'qp active')
    """
    if key in ("accuracy", "dice", "c_index"):
        return f"test {key}".replace("_", "-")
    return LABELS.get(key, key.replace("val_", "validation ", 1).replace("own_", "clients' own ", 1).replace("_", " "))


def range_of(runs: list[Run], key: str) -> tuple[float, float]:
    """The lowest and the highest value; (inf, -inf) where there is none."""
    low, high = np.inf, -np.inf
    for run in runs:
        column = run.records.column(key)
        if not np.isnan(column).all():
            low, high = min(low, np.nanmin(column)), max(high, np.nanmax(column))
    return float(low), float(high)


def is_wide(low: float, high: float) -> bool:
    """Whether a linear axis would show nothing but the largest values, such as those of a run that has diverged."""
    return 0 < low < high / WIDE


def room(runs: int, measures: int) -> tuple[int, int]:
    """How many of the measures are drawn, and in how many points at most, so that the page stays small.

    >>> room(1, 12), room(90, 12), room(500, 12)
    ((12, 1000), (11, 101), (4, 60))
    """
    drawn = min(measures, max(FEWEST_MEASURES, NUMBERS // (POINTS * max(runs, 1))))
    points = NUMBERS // max(runs * drawn, 1)
    return drawn, int(np.clip(points, LEAST_POINTS, MOST_POINTS))


class Curve(NamedTuple):
    """The values of a group's runs at the same rounds."""

    rounds: list[int]
    runs: list[list[float | None]]  # one list for each run
    thinned: bool


def curve(group: Group, key: str, points: int) -> Curve | None:
    """The values of a number of the record, in all rounds that have one or, of more than `points`, in those that stand out."""
    found = [_values_of(run, key) for run in group.runs]
    rounds = np.unique(np.concatenate([rounds for rounds, _ in found]))
    if not len(rounds):
        return None
    table = np.full((len(found), len(rounds)), np.nan)
    for row, (own, values) in zip(table, found, strict=True):
        row[np.searchsorted(rounds, own)] = values
    kept = thin(table, points)
    runs = [[None if value != value else short(value) for value in row] for row in table[:, kept].tolist()]
    return Curve(rounds[kept].astype(int).tolist(), runs, len(kept) < len(rounds))


def thin(table: Floats, points: int) -> NDArray[np.int64]:
    """The places to keep of values [runs, n]: of each stretch those where the mean of the runs is lowest and highest.

    >>> thin(np.array([[0.0, 5, 1, 2, -3, 4, 6, 6]]), 6).tolist()
    [0, 1, 4, 6, 7]
    """
    n = table.shape[1]
    if n <= points:
        return np.arange(n)
    known = ~np.isnan(table)
    mean = np.where(known, table, 0.0).sum(0) / known.sum(0)  # every place has a value
    edges = np.linspace(0, n, max(points // 2 - 1, 1) + 1).round().astype(int)
    kept = {0, n - 1}
    for begin, end in itertools.pairwise(edges.tolist()):
        kept |= {begin + int(mean[begin:end].argmin()), begin + int(mean[begin:end].argmax())}
    return np.array(sorted(kept))


def corners(run: Run, axis: Axis) -> list[list[float]]:
    """What was spent up to each round, as a line of corners (rounds, amounts): those of the largest errors, one by one."""
    rounds, amounts = run.records.column("round"), np.cumsum(axis.spent(run))
    if not len(rounds):
        return [[], []]
    kept = sorted({0, len(rounds) - 1})
    while len(kept) < min(CORNERS, len(rounds)):
        error = np.abs(np.interp(rounds, rounds[kept], amounts[kept]) - amounts)
        worst = int(error.argmax())
        if error[worst] <= TOLERANCE * amounts[-1]:
            break
        kept = sorted({*kept, worst})
    return [rounds[kept].astype(int).tolist(), [short(value, 6) for value in amounts[kept].tolist()]]


def short(value: float, digits: int = 4) -> float:
    """A number of few digits, whole where it is."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _values_of(run: Run, key: str) -> tuple[Floats, Floats]:
    """The rounds, in order and each once, that have a value, and the values."""
    values = run.records.column(key)
    known = np.flatnonzero(~np.isnan(values))
    rounds, first = np.unique(run.records.column("round")[known], return_index=True)
    return rounds, values[known[first]]
