"""The summary as rows of strings, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from undrift.report.load import Group
from undrift.report.scores import Spread, at_validation_name, default_target, metric_of, on_test_name, on_validation
from undrift.report.summary import MORE, Summary, pick_settings, summarise

NOTHING = "-"


class Cell(NamedTuple):
    """What is shown, and what it is sorted by."""

    text: str
    value: float | str | None


class Column(NamedTuple):
    name: str
    cell: Callable[[Summary], Cell]
    better: str = ""  # "higher" or "lower", where one is


def columns(groups: list[Group], target: float | None, brief: bool = False) -> list[Column]:
    """The columns of the table; the default target is the score that even the worst group reaches.

    A brief table fits in a terminal: it omits columns that hardly differ between methods.
    """
    metric = metric_of(groups)
    target = default_target(groups) if target is None else target
    goal = f"{metric.name} {target:g}" if target is not None else "target"
    rows = summarise(groups, target)
    better = "higher" if metric.higher else "lower"
    found = [
        Column("method", lambda row: _words(row.group.label)),
        *([] if brief else [Column("seeds", lambda row: Cell(str(len(row.group.runs)), len(row.group.runs)))]),
    ]
    if any(row.at_best_validation for row in rows):
        found.append(Column(at_validation_name(metric), lambda row: _cell(row.at_best_validation, _score), better))
    if not on_validation(groups, metric):
        found.append(Column(on_test_name(metric), lambda row: _cell(row.best_on_test, _score), better))
    how = {pick.group.label: pick.how for pick in pick_settings(groups)}
    if any(how.values()):
        found.append(Column("picked", lambda row: _words(how.get(row.group.label, "").removeprefix("setting picked "))))
    found += [
        Column(f"last {metric.name}", lambda row: _cell(row.last, _score), better),
        Column(f"rounds to {goal}", lambda row: _cell(row.rounds_to_target, _count), "lower"),
        Column(f"bytes to {goal}", lambda row: _bytes(row.bytes_to_target), "lower"),
        Column("bytes per round", lambda row: _bytes(row.bytes_per_round)),
    ]
    if any(row.network_seconds_to_target for row in rows):
        name = f"network seconds to {goal}"
        found.append(Column(name, lambda row: _cell(row.network_seconds_to_target, _short), "lower"))
    if not brief:
        consistency = Column("consistency at the end", lambda row: _cell(row.consistency, _short))
        found += [
            Column("gradients per round", lambda row: _cell(row.gradients_per_round, _count, hide_zero=True)),
            *([consistency] if any(row.consistency for row in rows) else []),
            Column("seconds per round", lambda row: _cell(row.seconds_per_round, _short)),
            Column("rounds run", lambda row: Cell(_rounds(row.group), min(run.rounds for run in row.group.runs))),
        ]
    return found


def cells(groups: list[Group], target: float | None, found: list[Column]) -> list[list[Cell]]:
    """A row for each group."""
    target = default_target(groups) if target is None else target
    return [[column.cell(row) for column in found] for row in summarise(groups, target)]


def table(groups: list[Group], target: float | None, brief: bool = False) -> list[list[str]]:
    """A header and a row for each group, as text."""
    found = columns(groups, target, brief)
    return [[column.name for column in found], *([c.text for c in row] for row in cells(groups, target, found))]


def more_columns(groups: list[Group]) -> list[Column]:
    """Further measures: the columns that any group has."""
    rows = summarise(groups, None)
    headings = [heading for _, heading, _ in MORE if any(row.more[heading] for row in rows)]

    def measure(heading: str) -> Column:
        return Column(heading, lambda row: _cell(row.more[heading], _short))

    return [Column("method", lambda row: _words(row.group.label)), *map(measure, headings)]


def more_table(groups: list[Group]) -> list[list[str]]:
    found = more_columns(groups)
    return [[column.name for column in found], *([c.text for c in row] for row in cells(groups, None, found))]


def _words(text: str) -> Cell:
    return Cell(text, text)


def _cell(spread: Spread | None, form: Callable[[float], str], hide_zero: bool = False) -> Cell:
    return Cell(show(spread, form, hide_zero), spread.mean if spread else None)


def _bytes(spread: Spread | None) -> Cell:
    return Cell(show_bytes(spread), spread.mean if spread else None)


def show(spread: Spread | None, form: Callable[[float], str], hide_zero: bool = False) -> str:
    """Mean ± standard deviation, and the number of seeds if some have no value."""
    if spread is None:
        return NOTHING
    text = form(spread.mean)
    if spread.deviation is not None and not (hide_zero and spread.deviation == 0):
        text += f" ± {_deviation(spread.deviation)}" if form is _short else f" ± {form(spread.deviation)}"
    return text + _missing_seeds(spread)


def show_bytes(spread: Spread | None) -> str:
    if spread is None:
        return NOTHING
    size, unit = next(((s, u) for s, u in UNITS if spread.mean >= s), (1, "B"))
    text = _short(spread.mean / size)
    if spread.deviation:
        text += f" ± {_deviation(spread.deviation / size)}"
    return f"{text} {unit}{_missing_seeds(spread)}"


UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def _deviation(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _missing_seeds(spread: Spread) -> str:
    return f" ({spread.seeds} of {spread.of})" if spread.seeds < spread.of else ""


def _rounds(group: Group) -> str:
    lengths, diverged = [run.rounds for run in group.runs], sum(run.stopped == "diverged" for run in group.runs)
    text = str(min(lengths)) if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
    return f"{text} ({diverged} diverged)" if diverged else text


def _score(value: float) -> str:
    return f"{value:.4f}"


def _count(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _short(value: float) -> str:
    """Three significant digits, without an exponent below 100,000."""
    return f"{value:.0f}" if 1000 <= abs(value) < 100_000 else f"{value:.3g}"
