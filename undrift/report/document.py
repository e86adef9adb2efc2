"""What a report says, as one JSON document. Its form is described in docs/report.md; the page is a function of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from undrift.core.errors import UnknownName
from undrift.core.papers import papers_of
from undrift.report import clients, drawings, sites
from undrift.report.curves import axes_of, corners, curve, measures_of, room, short
from undrift.report.load import Group, Run, as_text, by_task, group_runs, number, varying_settings
from undrift.report.scores import metric_of, on_validation, rank, score, score_name
from undrift.report.significance import TEST, difference, holm
from undrift.report.summary import pick_settings, verdict
from undrift.report.text import Cell, Column, cells, columns, more_columns

Defaults = Callable[[str, str], Mapping[str, Any]]  # the defaults of a command's settings and an algorithm's fields
KINDS = {
    "run": "Simulated federation", "deploy": "Real federation", "dp": "Data-parallel training", "pipe": "One network in blocks",
}  # fmt: skip
MOST_DRAWN = 10  # groups whose curves are shown at first
MOST_TESTED = 40  # methods that are compared in pairs
MORE_LEGEND = (
    "Forgetting: the mean over classes of the best earlier test accuracy minus the current one. The loss on absent "
    "clients is over the training samples of those who were not in the last cohort; the clients' accuracy is on their "
    "own training samples, at these quantiles of the clients. Constraints are those active in a quadratic programme, "
    "mean over rounds (server) or local steps (clients)."
)
TABLE_LEGEND = (
    "Mean ± standard deviation over seeds (n − 1); a single seed has none. "
    "Targets are measured on the test set. Bytes count both directions."
)


def document(
    runs: list[Run], target: float | None, defaults: Defaults | None = None, growing: bool = False
) -> dict[str, Any]:
    """The report on these runs. Of `growing` runs the groups keep their order, and that runs are unfinished is no news."""
    groups = group_runs(runs)
    tasks = by_task(groups)
    titles = [title_of(rivals) for rivals in tasks]
    unseen = sites.unseen_sites(tasks) if tasks else None
    seen = room(len(runs), max((len(measures_of(rivals, metric_of(rivals))) for rivals in tasks), default=0))
    return {
        "form": 1,
        "title": "; ".join(titles) if len(tasks) < 3 else f"{len(runs)} runs, {len(tasks)} tasks",
        "facts": _facts(runs, groups),
        "notes": _notes([] if growing else runs, groups),
        "tables": [_part(unseen)] if unseen else [],
        "sections": [
            {"title": title} | _section(rivals, target, *seen, defaults or (lambda command, algorithm: {}), growing)
            for title, rivals in zip(titles, tasks, strict=True)
        ],
        "cite": _papers(groups),
        "made": _origins(runs),
    }


def title_of(groups: list[Group]) -> str:
    """What the groups of one task are, for people."""
    return f"{KINDS.get(groups[0].kind, groups[0].kind)}: {groups[0].task}"


def _facts(runs: list[Run], groups: list[Group]) -> str:
    if not runs:
        return "This page fills in as soon as a run finishes its first round."
    seeds = dict.fromkeys(as_text(run.settings.get("seed")) for run in runs)
    listed = ", ".join(seeds) if len(seeds) <= 12 else f"{len(seeds)} different ones"
    return f"{_count(len(runs), 'run')} in {_count(len(groups), 'group')}; seeds: {listed}."


def _notes(runs: list[Run], groups: list[Group]) -> list[str]:
    """What a reader should know before the results."""
    notes = []
    for what, concerned in (("Diverged, and ended early", _is_diverged), ("Not finished", _is_unfinished)):
        found = [f"{r.folder} ({r.rounds} of {r.settings['rounds']} rounds)" for r in runs if concerned(r)]
        if found:
            notes.append(f"{what}: {', '.join(found)}")
    repeats = [str(run.folder) for group in groups for run in group.repeats]
    if repeats:
        notes.append(f"Left out of the results, because they repeat a seed of their group: {', '.join(repeats)}")
    return notes


def _is_diverged(run: Run) -> bool:
    return run.stopped == "diverged"


def _is_unfinished(run: Run) -> bool:
    rounds = number(run.settings, "rounds")
    return rounds is not None and run.rounds < rounds and not run.settings.get("stop_at") and not _is_diverged(run)


def _section(
    groups: list[Group], target: float | None, drawn: int, points: int, defaults: Defaults, growing: bool
) -> dict[str, Any]:
    """The groups of one task, the best first; those of growing runs keep their order, and the table is sorted on the page."""
    groups = groups if growing else rank(groups)
    metric = metric_of(groups)
    picks = {pick.group.label for pick in pick_settings(groups)}
    shown = [place for place, group in enumerate(groups) if len(groups) <= MOST_DRAWN or group.label in picks]
    axes, measures = axes_of(groups), measures_of(groups, metric)
    shared: dict[tuple[int, ...], int] = {}  # lists of rounds, which most curves have in common
    found = [
        {key: c for key in (m.key for m in measures[:drawn]) if (c := curve(group, key, points))} for group in groups
    ]
    settings, differing = _settings(groups, defaults)
    chosen_by = metric.validation if on_validation(groups, metric) else metric.name
    return {
        "kind": groups[0].kind,
        "task": groups[0].task,
        "verdict": verdict(groups),
        "metric": {"key": metric.name, "better": "higher" if metric.higher else "lower", "score": score_name(groups)},
        "shown": shown[:MOST_DRAWN],
        "axes": [{"key": axis.key, "label": axis.label} for axis in axes],
        "measures": [measure._asdict() for measure in measures[:drawn]],
        "undrawn": [measure.label for measure in measures[drawn:]],
        "points": points if any(c.thinned for curves in found for c in curves.values()) else None,
        "groups": [
            {
                "label": group.label,
                "algorithm": group.algorithm,
                "settings": differing[place],
                "commands": _commands(group),
                "runs": [
                    {
                        "seed": as_text(run.settings.get("seed")),
                        "rounds": run.rounds,
                        "score": _short_or_none(score(run, metric, chosen_by)),
                        "spent": {axis.key: corners(run, axis) for axis in axes},
                    }
                    for run in group.runs
                ],
                "curves": {
                    key: {"at": shared.setdefault(tuple(c.rounds), len(shared)), "runs": c.runs}
                    for key, c in found[place].items()
                },
                "client_accuracies": clients.accuracies(group),
            }
            for place, group in enumerate(groups)
        ],
        "rounds": list(map(list, shared)),
        "growing": growing,
        "table": _table("Results", columns(groups, target), groups, target, TABLE_LEGEND),
        "tests": _tests(groups, picks, chosen_by),
        "tables": [*_more(groups), *map(_part, sites.tables(groups)), *_failures(groups)],
        "holdings": clients.holdings(groups),
        "classes": clients.classes(groups, shown[:MOST_DRAWN]),
        "drawings": drawings.of_groups(groups),
        "settings": settings,
    }


def _tests(groups: list[Group], picks: set[str], chosen_by: str) -> dict[str, Any]:
    """Every compared group against every other, seed by seed; rows are the ones that the others are compared with."""
    metric = metric_of(groups)
    places = [k for k, group in enumerate(groups) if len(groups) <= MOST_TESTED or group.label in picks][:MOST_TESTED]

    def by_seed(group: Group) -> dict[str, float]:
        found = ((as_text(run.settings.get("seed")), score(run, metric, chosen_by)) for run in group.runs)
        return {seed: value for seed, value in found if value is not None}

    scores = [by_seed(groups[k]) for k in places]
    rows = []
    for reference in scores:
        found = [None if other is reference else difference(other, reference) for other in scores]
        ps = holm([each.p if each else None for each in found])
        rows.append(
            [[short(f.mean), _short_or_none(p), f.seeds] if f else None for f, p in zip(found, ps, strict=True)]
        )
    return {"name": TEST, "groups": places, "rows": rows}


def _table(title: str, found: list[Column], groups: list[Group], target: float | None, legend: str) -> dict[str, Any]:
    return {
        "title": title,
        "columns": [{"name": column.name, "better": column.better} for column in found],
        "rows": [[_sortable(cell) for cell in row] for row in cells(groups, target, found)],
        "legend": legend,
    }


def _sortable(cell: Cell) -> list[Any]:
    """Text, and what it is sorted by if that is something else."""
    return [cell.text] if cell.text == cell.value else [cell.text, cell.value]


def _part(part: sites.Part) -> dict[str, Any]:
    header, *rows = part.rows
    return {
        "title": part.title,
        "columns": [{"name": name, "better": ""} for name in header],
        "rows": [[_sortable(Cell(text, _leading_number(text))) for text in row] for row in rows],
        "legend": part.legend,
    }


def _leading_number(text: str) -> float | str | None:
    """
    >>> _leading_number("0.5 ± 0.1"), _leading_number("-"), _leading_number("fedavg 2")
    (0.5, None, 'fedavg 2')
    """
    match = re.match(r"-?\d+(\.\d+)?(?![\w.])", text)
    return float(match[0]) if match else None if text == "-" else text


def _more(groups: list[Group]) -> list[dict[str, Any]]:
    found = more_columns(groups)
    return [_table("More measures", found, groups, None, MORE_LEGEND)] if len(found) > 1 else []


def _failures(groups: list[Group]) -> list[dict[str, Any]]:
    """The runs in which clients failed, or sent what was not finite."""
    rows = [["method", "seed", "dropped clients", "of", "rounds with a drop", "first round with a drop"]]
    for group in groups:
        for run in group.runs:
            dropped, invited = run.records.amounts("dropped"), run.records.amounts("clients")
            lost = np.flatnonzero(dropped)
            if len(lost):
                first = f"{run.records.column('round')[lost[0]]:.0f}"
                numbers = f"{dropped.sum():.0f}", f"{invited.sum():.0f}", str(len(lost)), first
                rows.append([group.label, as_text(run.settings.get("seed")), *numbers])
    why = "These clients failed to answer, or sent an update that was not finite; the round went on without them."
    return [_part(sites.Part("Dropped clients", rows, why))] if len(rows) > 1 else []


def _settings(groups: list[Group], defaults: Defaults) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The settings that all groups share and that are no defaults, the number of the others, and what differs in each group."""
    firsts = [group.runs[0] for group in groups]
    varying = {*varying_settings(firsts), "algorithm"}
    usual = [defaults(run.command, str(run.settings["algorithm"])) for run in firsts]
    common = {name: value for name, value in firsts[0].settings.items() if name not in {*varying, "seed"}}
    told = {name: as_text(value) for name, value in common.items() if not _is_default(name, value, usual[0])}
    differing = [
        {
            name: as_text(run.settings[name])
            for name in run.settings
            if name in varying and not (name in run.fields and _is_default(name, run.settings[name], known))
        }
        for run, known in zip(firsts, usual, strict=True)
    ]
    return {"shared": told, "defaults": len(common) - len(told)}, differing


def _is_default(name: str, value: Any, usual: Mapping[str, Any]) -> bool:
    return name in usual and as_text(usual[name]) == as_text(value)


def _commands(group: Group) -> list[str]:
    return [f"undrift {run.command} {shlex.quote(str(run.folder / 'run.toml'))} --out NEW" for run in group.runs]


def _papers(groups: list[Group]) -> list[str]:
    """The BibTeX entries of the methods that have one."""
    entries: dict[str, None] = {}
    for algorithm in dict.fromkeys(group.algorithm for group in groups):
        for part in algorithm.split("+"):
            try:
                entries |= dict.fromkeys(papers_of(part))
            except UnknownName:  # a method of the user's own
                continue
    return list(entries)


def _origins(runs: list[Run]) -> dict[str, str]:
    """The versions and machines that made the runs."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _flat(run.made):
            found.setdefault(name, {})[as_text(value)] = None
    return {name: _some(list(values)) for name, values in found.items()}


def _some(values: list[str]) -> str:
    return ", ".join(values) if len(values) <= 8 else f"{', '.join(values[:8])} and {len(values) - 8} others"


def _flat(made: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in made.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif name != "holdings":
            yield prefix + name, value


def _short_or_none(value: float | None) -> float | None:
    return None if value is None else short(value)


def _count(number_of: int, what: str) -> str:
    return f"{number_of} {what}{'' if number_of == 1 else 's'}"
