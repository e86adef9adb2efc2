"""What the page shows of clients and classes: who holds what, how well each client is served, what is forgotten."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from undrift.report.curves import short
from undrift.report.load import Group, Run, as_text
from undrift.report.records import Floats

MOST_TIMES = 60  # rounds in the picture of classes


def holdings(groups: list[Group]) -> dict[str, Any] | None:
    """The samples of each class at each client, in the first run that has them."""
    for run in (run for group in groups for run in group.runs):
        counts = _counts(run)
        if counts:
            names = run.made.get("sites")
            told = isinstance(names, list) and len(names) == len(counts)
            return {
                "seed": as_text(run.settings.get("seed")),
                "clients": run.made.get("clients") if isinstance(run.made.get("clients"), int) else len(counts),
                "names": [str(name) for name in names] if told and names else None,
                "counts": counts,
            }
    return None


def accuracies(group: Group) -> list[float]:
    """The quantiles of the clients' accuracies at the end, from the lowest client to the highest, mean over seeds."""
    seeds = [values for run in group.runs if (values := run.records.client_accuracies)]
    alike = [values for values in seeds if len(values) == len(seeds[0])]
    return [short(value) for value in np.mean(alike, 0).tolist()] if alike else []


def classes(groups: list[Group], places: list[int]) -> list[dict[str, Any]]:
    """The accuracy and the forgetting of each class over the rounds, mean over seeds, of some of the groups."""
    found = ((place, _classes(groups[place])) for place in places)
    return [{"group": place} | table for place, table in found if table]


def _classes(group: Group) -> dict[str, Any] | None:
    seeds = []  # the rounds, the accuracies [n, classes] and what is forgotten, of each run
    for run in group.runs:
        known = run.records.classes
        if len(known.places) > 1:
            table = known.table()
            seeds.append((run.records.column("round")[list(known.places)], table, forgotten(table)))
    if not seeds or len({table.shape[1] for _, table, _ in seeds}) > 1:
        return None
    rounds = functools.reduce(np.intersect1d, (rounds for rounds, _, _ in seeds))
    if len(rounds) < 2:
        return None
    if len(rounds) > MOST_TIMES:
        rounds = rounds[np.linspace(0, len(rounds) - 1, MOST_TIMES).round().astype(int)]

    def mean(part: int) -> list[list[float | None]]:
        each = np.array([seed[part][np.searchsorted(seed[0], rounds)] for seed in seeds]).mean(0)
        return [[None if value != value else short(value, 3) for value in row] for row in each.T.tolist()]

    return {"rounds": rounds.astype(int).tolist(), "accuracy": mean(1), "forgetting": mean(2)}


def forgotten(table: Floats) -> Floats:
    """[n, classes] the best accuracy so far minus the present one.

    >>> forgotten(np.array([[0.5, 0.9], [0.75, 0.4]])).tolist()
    [[0.0, 0.0], [0.0, 0.5]]
    """
    return np.fmax.accumulate(table, 0) - table


def _counts(run: Run) -> list[list[int]]:
    """The table [made] holdings of run.toml; empty if it is missing or has another form."""
    lines = run.made.get("holdings")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        return []
    rows = [line.split() for line in lines]
    whole = all(len(row) == len(rows[0]) and all(len(n) < 12 and n.isdecimal() for n in row) for row in rows)
    return [[int(n) for n in row] for row in rows] if rows and rows[0] and whole else []
