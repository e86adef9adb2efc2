"""The summary as rows of strings, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable

from undrift.report.load import Group
from undrift.report.scores import Spread, at_validation_name, default_target, metric_of, on_test_name, on_validation
from undrift.report.summary import MORE, Summary, pick_settings, summarise

NOTHING = "-"


def table(groups: list[Group], target: float | None, brief: bool = False) -> list[list[str]]:
    """A header and a row for each group; the default target is the score that even the worst group reaches.

    A brief table fits in a terminal: it omits columns that hardly differ between methods.
    """
    metric = metric_of(groups)
    target = default_target(groups) if target is None else target
    goal = f"{metric.name} {target:g}" if target is not None else "target"
    rows = summarise(groups, target)
    columns: list[tuple[str, Callable[[Summary], str]]] = [
        ("method", lambda row: row.group.label),
        *([] if brief else [("seeds", lambda row: str(len(row.group.runs)))]),
    ]
    if any(row.at_best_validation for row in rows):
        columns.append((at_validation_name(metric), lambda row: show(row.at_best_validation, _score)))
    if not on_validation(groups, metric):
        columns.append((on_test_name(metric), lambda row: show(row.best_on_test, _score)))
    how = {pick.group.label: pick.how for pick in pick_settings(groups)}
    if any(how.values()):
        columns.append(("picked", lambda row: how.get(row.group.label, "")))
    columns += [
        (f"last {metric.name}", lambda row: show(row.last, _score)),
        (f"rounds to {goal}", lambda row: show(row.rounds_to_target, _count)),
        (f"bytes to {goal}", lambda row: show_bytes(row.bytes_to_target)),
        ("bytes per round", lambda row: show_bytes(row.bytes_per_round)),
    ]
    if any(row.network_seconds_to_target for row in rows):
        columns.append((f"network seconds to {goal}", lambda row: show(row.network_seconds_to_target, _short)))
    if not brief:
        columns += [
            ("gradients per round", lambda row: show(row.gradients_per_round, _count, hide_zero=True)),
            ("consistency at the end", lambda row: show(row.consistency, _short)),
            ("seconds per round", lambda row: show(row.seconds_per_round, _short)),
            ("rounds run", lambda row: _rounds(row.group)),
        ]
    return [[name for name, _ in columns], *([cell(row) for _, cell in columns] for row in rows)]


def more_table(groups: list[Group]) -> list[list[str]]:
    """Further measures: a header and a row for each group, with the columns that any group has."""
    rows = summarise(groups, None)
    headings = [heading for _, heading, _ in MORE if any(row.more[heading] for row in rows)]
    cells = ([show(row.more[heading], _short) for heading in headings] for row in rows)
    return [["method", *headings], *([row.group.label, *line] for row, line in zip(rows, cells, strict=True))]


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
    lengths = [run.rounds for run in group.runs]
    return str(min(lengths)) if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"


def _score(value: float) -> str:
    return f"{value:.4f}"


def _count(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _short(value: float) -> str:
    """Three significant digits, without an exponent below 100,000."""
    return f"{value:.0f}" if 1000 <= abs(value) < 100_000 else f"{value:.3g}"
