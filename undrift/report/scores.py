"""The score of a run, the round that decides it, and its spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrift.report.load import Group, Run
from undrift.report.records import Floats


class Spread(NamedTuple):
    """Mean and standard deviation over the seeds that have a value."""

    mean: float
    deviation: float | None  # with n - 1; None for a single seed
    seeds: int
    of: int  # all seeds of the group


class Metric(NamedTuple):
    """The number that decides which model is better."""

    name: str  # the key in the records
    higher: bool  # whether higher is better

    @property
    def validation(self) -> str:
        return f"val_{self.name}"

    def best(self, values: list[float]) -> float:
        return max(values) if self.higher else min(values)

    def reaches(self, values: Floats, target: float) -> NDArray[np.bool_]:
        return values >= target if self.higher else values <= target


ACCURACY, LOSS = Metric("accuracy", True), Metric("loss", False)
# Preferred if all runs have them: the mean over clients of the score of each one's model on its own samples.
OWN = Metric("own_dice", True), Metric("own_accuracy", True)
DICE, CINDEX = Metric("dice", True), Metric("c_index", True)


def metric_of(groups: list[Group]) -> Metric:
    """A score on the clients' own samples if all runs have one, else accuracy, or loss if a run has no accuracy."""
    runs = [run for group in groups for run in group.runs]
    evaluated = [run for run in runs if has(run, "loss")]
    for metric in (*OWN, DICE, CINDEX):
        if evaluated and all(has(run, metric.name) for run in evaluated):
            return metric
    lacking = any(has(run, "loss") and not has(run, "accuracy") for run in runs)
    return LOSS if lacking else ACCURACY


def has_validation(group: Group, metric: Metric) -> bool:
    """Whether every evaluated run of the group has validation scores."""
    evaluated = [run for run in group.runs if has(run, metric.name)]
    return bool(evaluated) and all(best_place(run, metric, metric.validation) is not None for run in evaluated)


def on_validation(groups: list[Group], metric: Metric) -> bool:
    """Whether all groups that have a score can be compared at their best validation round."""
    scored = [group for group in groups if any(has(run, metric.name) for run in group.runs)]
    return bool(scored) and all(has_validation(group, metric) for group in scored)


def score_name(groups: list[Group]) -> str:
    """The name of the compared score, as in the table's heading."""
    metric = metric_of(groups)
    return at_validation_name(metric) if on_validation(groups, metric) else on_test_name(metric)


def at_validation_name(metric: Metric) -> str:
    return f"{metric.name} at best validation"


def on_test_name(metric: Metric) -> str:
    return f"best {metric.name} (chosen on test)"


def scores(groups: list[Group]) -> list[Spread | None]:
    """The scores of the groups, all by the same rule."""
    metric = metric_of(groups)
    chosen_by = metric.validation if on_validation(groups, metric) else metric.name
    return [over_seeds(group, lambda run: score(run, metric, chosen_by)) for group in groups]


def rank(groups: list[Group]) -> list[Group]:
    """Sort the groups, the best score first, groups without a score last."""
    sign = -1.0 if metric_of(groups).higher else 1.0
    rows = zip(groups, scores(groups), strict=True)
    return [group for group, _ in sorted(rows, key=lambda row: sign * row[1].mean if row[1] else math.inf)]


def default_target(groups: list[Group]) -> float | None:
    """The worst group's mean score, rounded to two decimals so that it is easier to reach."""
    means = [spread.mean for spread in scores(groups) if spread]
    if not means:
        return None
    if metric_of(groups).higher:
        return math.floor(round(min(means) * 100, 6)) / 100
    return math.ceil(round(max(means) * 100, 6)) / 100


def traffic(run: Run) -> Floats:
    """[n] the bytes of each round, down and up."""
    return run.records.amounts("bytes_down") + run.records.amounts("bytes_up")


def over_seeds(group: Group, value: Callable[[Run], float | None]) -> Spread | None:
    values = [v for v in map(value, group.runs) if v is not None]
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, len(values), len(group.runs))


def best_place(run: Run, metric: Metric, chosen_by: str) -> int | None:
    """The place of the first round that is best by the given key, among rounds with a test score."""
    tested = run.records.column(metric.name)
    chosen = np.where(np.isnan(tested), np.nan, run.records.column(chosen_by))
    if np.isnan(chosen).all():
        return None
    return int(np.nanargmax(chosen) if metric.higher else np.nanargmin(chosen))


def score(run: Run, metric: Metric, chosen_by: str, shown: str = "") -> float | None:
    """The test score, or another number, in the round that is best by the given key."""
    place = best_place(run, metric, chosen_by)
    return None if place is None else float(run.records.column(shown or metric.name)[place])


def has(run: Run, key: str) -> bool:
    return not np.isnan(run.records.column(key)).all()
