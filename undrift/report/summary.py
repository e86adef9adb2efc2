"""Summarise each group, pick a setting for each method, and judge whether methods differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from undrift.report.load import Group, Run, by_task
from undrift.report.records import Floats
from undrift.report.scores import (
    Metric,
    Spread,
    has,
    has_validation,
    metric_of,
    on_validation,
    over_seeds,
    score,
    score_name,
    scores,
    traffic,
)

# Further numbers of the records: key, heading, and how a run's rounds are summarised.
MORE: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
    ("epsilon", "epsilon", lambda values: values[-1]),
    ("forgetting", "forgetting at the end", lambda values: values[-1]),
    ("forgetting", "mean forgetting", statistics.fmean),
    ("absent_loss", "loss on absent clients", lambda values: values[-1]),
    ("client_accuracy_p10", "clients' accuracy, 10 %", lambda values: values[-1]),
    ("client_accuracy_p50", "50 %", lambda values: values[-1]),
    ("client_accuracy_p90", "90 %", lambda values: values[-1]),
    ("qp_active", "server constraints active", statistics.fmean),
    ("local_qp_active", "local constraints active", statistics.fmean),
    ("qp_failed", "failed programmes", lambda values: values[-1]),
    ("evictions", "evictions", lambda values: values[-1]),
)
FEW_SEEDS = 5  # with fewer, two standard errors are only an indication
Rows = list[tuple[Group, Spread]]  # best first


class Summary(NamedTuple):
    """One row of the table."""

    group: Group
    best_on_test: Spread | None  # the best test score over the rounds, chosen on the test set
    at_best_validation: Spread | None  # the test score in the round that is best in validation
    last: Spread | None
    rounds_to_target: Spread | None
    bytes_to_target: Spread | None
    bytes_per_round: Spread | None  # down and up together
    gradients_per_round: Spread | None
    consistency: Spread | None  # in the last round
    seconds_per_round: Spread | None  # the median of a run's rounds
    network_seconds_to_target: Spread | None  # simulated, with --bandwidth or --latency
    more: dict[str, Spread | None]  # by the headings of MORE


class Pick(NamedTuple):
    """The group that stands for an algorithm."""

    group: Group
    how: str  # "setting picked on validation", "setting picked on test", or "" if there was one setting only


def summarise(groups: list[Group], target: float | None) -> list[Summary]:
    """A row for each group."""
    metric = metric_of(groups)
    return [_summary(group, metric, target) for group in groups]


def pick_settings(groups: list[Group]) -> list[Pick]:
    """Each algorithm's best setting in each task, by validation if all groups of the task have it."""
    picks = []
    for rivals in by_task(groups):
        metric = metric_of(rivals)
        validation = on_validation(rivals, metric)
        for algorithm in dict.fromkeys(group.algorithm for group in rivals):
            settings = [group for group in rivals if group.algorithm == algorithm]
            if len(settings) == 1:
                picks.append(Pick(settings[0], ""))
            else:
                choice = _best_setting(settings, metric, metric.validation if validation else metric.name)
                picks.append(Pick(choice, f"setting picked on {'validation' if validation else 'test'}"))
    return picks


def verdict(groups: list[Group]) -> str:
    """Say for each task whether the methods differ more than the seeds."""
    tasks = by_task(groups)
    if len(tasks) == 1:
        return _verdict(groups)
    return " ".join(f"{rivals[0].task}: {_verdict(rivals)}" for rivals in tasks)


def _best_setting(settings: list[Group], metric: Metric, key: str) -> Group:
    """The first setting with the best mean over seeds of the best value of `key`."""

    spreads = [(group, over_seeds(group, lambda run: score(run, metric, key, shown=key))) for group in settings]
    means = [spread.mean for _, spread in spreads if spread]
    best = metric.best(means) if means else None
    return next((group for group, spread in spreads if spread and spread.mean == best), settings[0])


def _verdict(groups: list[Group]) -> str:
    """Compare the picked settings of the methods, or all settings of a single method."""
    picks = pick_settings(groups)
    compared = [pick.group for pick in picks] if len(picks) > 1 else groups
    notes = _length_note(compared) + (_picking_note(picks) if len(picks) > 1 else "")
    rows = [(group, spread) for group, spread in zip(compared, scores(compared), strict=True) if spread]
    if not rows:
        ended = all(run.stopped == "diverged" for group in groups for run in group.runs)
        return f"No run has a score{': all of them diverged before their first test' if ended else ' yet'}."
    if len(rows) < 2:
        ((group, spread),) = rows
        seeds = "1 seed" if spread.seeds == 1 else f"{spread.seeds} seeds"
        score_is = f"{group.label} has {spread.mean:.4f} ({_in_brackets(score_name(compared))}; {seeds})"
        return f"{score_is}; there is no other score, so nothing to compare."
    rows.sort(key=lambda row: row[1].mean, reverse=metric_of(compared).higher)
    name = _in_brackets(score_name(compared))
    if any(spread.seeds < 2 for _, spread in rows):
        return _without_seeds(rows, name) + notes
    return f"{_apart(rows, name)} {_lead(rows)}{_forgetful(compared)}{notes}"


def _in_brackets(name: str) -> str:
    """The name of a score as it stands in brackets: "best accuracy, chosen on test"."""
    return name.replace(" (", ", ").removesuffix(")")


def _without_seeds(rows: Rows, name: str) -> str:
    (first, best), (second, next_best) = rows[:2]
    top = f"{first.label} has the best mean ({best.mean:.4f}, {name})"
    if best.mean == next_best.mean:
        top = f"{first.label} and {second.label} are level ({best.mean:.4f}, {name})"
    single = [group.label for group, spread in rows if spread.seeds < 2]
    whose = "every method" if len(single) == len(rows) else ", ".join(single)
    return f"{top}, but there is only one seed for {whose}: nothing can be said without more seeds."


def _apart(rows: Rows, name: str) -> str:
    between = statistics.stdev([spread.mean for _, spread in rows])
    within = _pooled_deviation(rows)
    if within == 0.0:
        return f"The seeds of each method score exactly alike ({name}), so chance cannot be judged from them."
    verb = "differ more than" if between > within else "differ no more than"
    return (
        f"The methods {verb} the seeds of one method do: the standard deviation is {between:.4f} between the "
        f"methods' means and {within:.4f} between the seeds of a method ({name})."
    )


def _lead(rows: Rows) -> str:
    (first, best), (second, next_best) = rows[:2]
    gap, error = abs(best.mean - next_best.mean), _standard_error(rows)
    ahead = f"its lead over {second.label}, {gap:.4f},"
    if gap == 0.0:
        return f"{first.label} and {second.label} have the same mean ({best.mean:.4f})."
    if error == 0.0:
        return f"{first.label} has the best mean; {ahead} cannot be judged without other seeds."
    if gap <= 2 * error:
        return (
            f"{first.label} has the best mean, but {ahead} is not larger than twice the standard error "
            f"of the difference ({error:.4f}): the two cannot be told apart without pairing the seeds, as p in the report does."
        )
    seeds = min(best.seeds, next_best.seeds)
    caution = f"; with {seeds} seeds this is an indication, not a proof" if seeds < FEW_SEEDS else ""
    return (
        f"{first.label} is best: {ahead} is larger than twice the standard error "
        f"of the difference ({error:.4f}){caution}."
    )


def _pooled_deviation(rows: Rows) -> float:
    """The standard deviation of the seeds within a group, over all groups."""
    freedom = sum(spread.seeds - 1 for _, spread in rows)
    return math.sqrt(sum((s.seeds - 1) * (s.deviation or 0.0) ** 2 for _, s in rows) / freedom)


def _standard_error(rows: Rows) -> float:
    """The standard error of the difference between the first two, from their seeds or from all, whichever is larger.

    Two or three seeds can be close by luck; the seeds of the other methods guard against that.
    """
    (_, a), (_, b) = rows[:2]
    of_two = math.sqrt((a.deviation or 0.0) ** 2 / a.seeds + (b.deviation or 0.0) ** 2 / b.seeds)
    return max(of_two, _pooled_deviation(rows) * math.sqrt(1 / a.seeds + 1 / b.seeds))


def _forgetful(groups: list[Group]) -> str:
    """Which method forgets most in the second half of its rounds, and which ones forget less by more than chance."""
    means = [(group, over_seeds(group, _forgotten)) for group in groups]
    rows = sorted(((g, s) for g, s in means if s and s.seeds > 1), key=lambda row: -row[1].mean)
    if len(rows) < 2:
        return ""
    (most, worst), others = rows[0], rows[1:]
    less = [row for row in others if worst.mean - row[1].mean > 2 * _standard_error([rows[0], row, *rows])]
    text = f" {most.label} forgets most: in the second half of the rounds its accuracy, averaged over classes, is "
    text += f"{worst.mean:.3f} ± {worst.deviation or 0.0:.3f} below the best that each class had."
    if not less:
        return f"{text} No other method forgets less by more than twice the standard error of the difference."
    named = ", ".join(f"{group.label} ({spread.mean:.3f} ± {spread.deviation or 0.0:.3f})" for group, spread in less)
    return f"{text} These forget less, by more than twice the standard error of the difference: {named}."


def _forgotten(run: Run) -> float | None:
    """The mean forgetting over the second half of the scored rounds."""
    known = run.records.values("forgetting")
    return _over(known[len(known) // 2 :], statistics.fmean)


def _length_note(groups: list[Group]) -> str:
    lengths = [run.rounds for group in groups for run in group.runs]
    low, high = min(lengths), max(lengths)
    return (
        f" The runs differ in length ({low} to {high} rounds), which may affect the comparison." if low < high else ""
    )


def _picking_note(picks: list[Pick]) -> str:
    how = {pick.how for pick in picks if pick.how}
    if not how:
        return ""
    if "setting picked on test" in how:
        return " Settings were picked on test, so methods with more settings are favoured."
    return " Settings were picked on validation."


def _summary(group: Group, metric: Metric, target: float | None) -> Summary:
    def spread(value: Callable[[Run], float | None]) -> Spread | None:
        return over_seeds(group, value)

    validated = has_validation(group, metric)
    return Summary(
        group,
        best_on_test=spread(lambda run: score(run, metric, metric.name)),
        at_best_validation=spread(lambda run: score(run, metric, metric.validation)) if validated else None,
        last=spread(lambda run: next(reversed(run.records.values(metric.name)), None)),
        rounds_to_target=spread(lambda run: _cost_to_target(run, metric, target, np.ones(len(run.records)))),
        bytes_to_target=spread(lambda run: _cost_to_target(run, metric, target, traffic(run))),
        bytes_per_round=spread(lambda run: _over(traffic(run).tolist(), statistics.fmean)),
        gradients_per_round=spread(lambda run: _over(run.records.values("gradients"), statistics.fmean)),
        consistency=spread(_last_consistency),
        seconds_per_round=spread(lambda run: _over(run.records.values("seconds"), statistics.median)),
        network_seconds_to_target=spread(lambda run: _network_seconds(run, metric, target)),
        more={
            heading: spread(lambda run: _over(run.records.values(key), stand))  # noqa: B023, used at once
            for key, heading, stand in MORE
        },
    )


def _last_consistency(run: Run) -> float | None:
    last = run.records.column("consistency")[-1:]
    return None if np.isnan(last).all() else float(last[0])


def _cost_to_target(run: Run, metric: Metric, target: float | None, cost: Floats) -> float | None:
    """The cost of all rounds up to the first whose test score reaches the target; `cost` [n] is that of each round."""
    if target is None:
        return None
    reached = np.flatnonzero(metric.reaches(run.records.column(metric.name), target))  # NaN reaches nothing
    return float(cost[: reached[0] + 1].sum()) if len(reached) else None


def _network_seconds(run: Run, metric: Metric, target: float | None) -> float | None:
    if not has(run, "network_seconds"):
        return None
    return _cost_to_target(run, metric, target, run.records.amounts("network_seconds"))


def _over(values: list[float], stand: Callable[[list[float]], float]) -> float | None:
    return float(stand(values)) if values else None
