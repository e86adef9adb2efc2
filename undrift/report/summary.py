"""What the seeds of a group say together, which setting of a method is picked, and whether the methods differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from undrift.report.runs import Group, Run, by_task, number

FEW_SEEDS = 5  # below this, two standard errors are only an indication


class Spread(NamedTuple):
    """Mean and standard deviation over the seeds that have a value."""

    mean: float
    deviation: float | None  # with n - 1; None for a single seed
    seeds: int
    of: int  # seeds in the group


class Metric(NamedTuple):
    """What decides which model is better."""

    name: str  # the key in the records
    higher: bool  # whether higher is better

    @property
    def validation(self) -> str:
        return f"val_{self.name}"

    def best(self, values: list[float]) -> float:
        return max(values) if self.higher else min(values)

    def reached(self, value: float, target: float) -> bool:
        return value >= target if self.higher else value <= target


ACCURACY, LOSS = Metric("accuracy", True), Metric("loss", False)


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


class Pick(NamedTuple):
    """The group that stands for an algorithm."""

    group: Group
    how: str  # "setting picked on validation", "setting picked on test", or "" where there was one setting only


def metric_of(groups: list[Group]) -> Metric:
    """Accuracy, but loss where a run was evaluated and has no accuracy at all."""
    runs = [run for group in groups for run in group.runs]
    lacking = any(_has(run, "loss") and not _has(run, "accuracy") for run in runs)
    return LOSS if lacking else ACCURACY


def has_validation(group: Group, metric: Metric) -> bool:
    """Whether every evaluated run of the group has validation scores."""
    evaluated = [run for run in group.runs if _has(run, metric.name)]
    return bool(evaluated) and all(_best_record(run, metric, metric.validation) for run in evaluated)


def on_validation(groups: list[Group], metric: Metric) -> bool:
    """Whether all groups can be compared at their best validation round; groups without any score do not count."""
    scored = [group for group in groups if any(_has(run, metric.name) for run in group.runs)]
    return bool(scored) and all(has_validation(group, metric) for group in scored)


def score_name(groups: list[Group]) -> str:
    """What the compared score is, in the words of the table's column."""
    metric = metric_of(groups)
    return at_validation_name(metric) if on_validation(groups, metric) else on_test_name(metric)


def at_validation_name(metric: Metric) -> str:
    return f"{metric.name} at best validation"


def on_test_name(metric: Metric) -> str:
    return f"best {metric.name} (chosen on test)"


def scores(groups: list[Group]) -> list[Spread | None]:
    """The score by which the groups are compared: all by the same rule."""
    metric = metric_of(groups)
    chosen_by = metric.validation if on_validation(groups, metric) else metric.name
    return [_over_seeds(group, lambda run: _score(run, metric, chosen_by)) for group in groups]


def default_target(groups: list[Group]) -> float | None:
    """The worst group's mean score, rounded to two decimals towards the easier side."""
    means = [spread.mean for spread in scores(groups) if spread]
    if not means:
        return None
    if metric_of(groups).higher:
        return math.floor(round(min(means) * 100, 6)) / 100
    return math.ceil(round(max(means) * 100, 6)) / 100


def summarise(groups: list[Group], target: float | None) -> list[Summary]:
    """A row for each group; without a target, nothing is reached."""
    metric = metric_of(groups)
    return [_summary(group, metric, target) for group in groups]


def picked(groups: list[Group]) -> list[Pick]:
    """For each algorithm, in each task, its best setting: by validation where all groups of the task have it."""
    picks = []
    for rivals in by_task(groups):
        metric = metric_of(rivals)
        validation = on_validation(rivals, metric)
        key = metric.validation if validation else metric.name
        for algorithm in dict.fromkeys(group.algorithm for group in rivals):
            settings = [group for group in rivals if group.algorithm == algorithm]
            if len(settings) == 1:
                picks.append(Pick(settings[0], ""))
                continue
            means = {group.label: _over_seeds(group, lambda run: _best_of(run, metric, key)) for group in settings}
            known = {label: spread.mean for label, spread in means.items() if spread}
            best = metric.best(list(known.values())) if known else None
            choice = next((group for group in settings if known.get(group.label) == best), settings[0])
            picks.append(Pick(choice, f"setting picked on {'validation' if validation else 'test'}"))
    return picks


def verdict(groups: list[Group]) -> str:
    """Whether the methods are further apart than the seeds, task by task."""
    tasks = by_task(groups)
    if len(tasks) == 1:
        return _verdict(groups)
    return " ".join(f"{rivals[0].task}: {_verdict(rivals)}" for rivals in tasks)


def _verdict(groups: list[Group]) -> str:
    picks = picked(groups)
    if len(picks) == 1:  # one algorithm: its settings are compared
        compared, note = groups, ""
    else:
        compared, note = [pick.group for pick in picks], _picking_note(picks)
    rows = [(group, spread) for group, spread in zip(compared, scores(compared), strict=True) if spread]
    if len(rows) < 2:
        return "There are no two methods with a score, so there is nothing to compare."
    rows.sort(key=lambda row: row[1].mean, reverse=metric_of(compared).higher)
    (first, lead), (second, behind) = rows[:2]
    single = [group.label for group, spread in rows if spread.seeds < 2]
    if single:
        top = f"{first.label} has the best mean ({lead.mean:.4f}, {score_name(compared)})"
        if lead.mean == behind.mean:
            top = f"{first.label} and {second.label} are level ({lead.mean:.4f}, {score_name(compared)})"
        whose = "every method" if len(single) == len(rows) else ", ".join(single)
        return f"{top}, but there is only one seed for {whose}: nothing can be said without more seeds.{note}"
    return f"{_apart(rows, score_name(compared))} {_lead(rows)}{_length_note(compared)}{note}"


def _apart(rows: list[tuple[Group, Spread]], name: str) -> str:
    between = statistics.stdev([spread.mean for _, spread in rows])
    within = _pooled(rows)
    if within == 0.0:
        return f"The seeds of each method score exactly the same ({name}), so chance cannot be judged from them."
    verb = "are further apart than" if between > within else "are not further apart than"
    return (f"The methods {verb} the seeds: the standard deviation is {between:.4f} between the methods' means "
            f"and {within:.4f} between the seeds of a method ({name}).")


def _lead(rows: list[tuple[Group, Spread]]) -> str:
    (first, best), (second, next_best) = rows[:2]
    gap, error, seeds = abs(best.mean - next_best.mean), _standard_error(rows), min(best.seeds, next_best.seeds)
    if gap == 0.0:
        return f"{first.label} and {second.label} have the same mean ({best.mean:.4f})."
    if error == 0.0:
        return f"{first.label} has the best mean, {gap:.4f} ahead of {second.label}; run other seeds to judge that."
    if gap > 2 * error:
        caution = f"; with {seeds} seeds this is an indication, not a proof" if seeds < FEW_SEEDS else ""
        return (f"{first.label} is best: its lead over {second.label}, {gap:.4f}, is larger than twice the standard "
                f"error of the difference ({error:.4f}){caution}.")
    return (f"{first.label} has the best mean, but its lead over {second.label}, {gap:.4f}, is not larger than twice "
            f"the standard error of the difference ({error:.4f}), so the two cannot be told apart.")


def _pooled(rows: list[tuple[Group, Spread]]) -> float:
    """The standard deviation of the seeds within a group, over all groups."""
    freedom = sum(spread.seeds - 1 for _, spread in rows)
    return math.sqrt(sum((s.seeds - 1) * (s.deviation or 0.0) ** 2 for _, s in rows) / freedom)


def _standard_error(rows: list[tuple[Group, Spread]]) -> float:
    """Of the difference between the first two: from their own seeds or from all, whichever is larger.

    Two or three seeds can lie close together by luck; the seeds of the other methods guard against that.
    """
    (_, a), (_, b) = rows[:2]
    own = math.sqrt((a.deviation or 0.0) ** 2 / a.seeds + (b.deviation or 0.0) ** 2 / b.seeds)
    return max(own, _pooled(rows) * math.sqrt(1 / a.seeds + 1 / b.seeds))


def _length_note(groups: list[Group]) -> str:
    lengths = [run.rounds for group in groups for run in group.runs]
    if min(lengths) == max(lengths):
        return ""
    return f" The runs are not equally long ({min(lengths)} to {max(lengths)} rounds), which may favour some of them."


def _picking_note(picks: list[Pick]) -> str:
    how = {pick.how for pick in picks if pick.how}
    if not how:
        return ""
    if "setting picked on test" in how:
        return " Settings were picked on test, so methods with more settings are favoured."
    return " Settings were picked on validation."


def _summary(group: Group, metric: Metric, target: float | None) -> Summary:
    def over_seeds(value: Callable[[Run], float | None]) -> Spread | None:
        return _over_seeds(group, value)

    return Summary(
        group,
        best_on_test=over_seeds(lambda run: _score(run, metric, metric.name)),
        at_best_validation=(
            over_seeds(lambda run: _score(run, metric, metric.validation)) if has_validation(group, metric) else None),
        last=over_seeds(lambda run: next(reversed(_values(run, metric.name)), None)),
        rounds_to_target=over_seeds(lambda run: _cost_to_target(run, metric, target, lambda record: 1.0)),
        bytes_to_target=over_seeds(lambda run: _cost_to_target(run, metric, target, traffic)),
        bytes_per_round=over_seeds(lambda run: _mean([traffic(record) for record in run.records])),
        gradients_per_round=over_seeds(lambda run: _mean(_values(run, "gradients"))),
        consistency=over_seeds(lambda run: number(run.records[-1], "consistency") if run.records else None),
        seconds_per_round=over_seeds(lambda run: _median(_values(run, "seconds"))),
    )


def traffic(record: dict[str, Any]) -> float:
    """The bytes of a round, down and up."""
    return (number(record, "bytes_down") or 0.0) + (number(record, "bytes_up") or 0.0)


def _cost_to_target(
    run: Run, metric: Metric, target: float | None, cost: Callable[[dict[str, Any]], float]
) -> float | None:
    """What the rounds cost together up to the first one whose test score reaches the target."""
    spent = 0.0
    for record in run.records:
        spent += cost(record)
        value = number(record, metric.name)
        if value is not None and target is not None and metric.reached(value, target):
            return spent
    return None


def _over_seeds(group: Group, value: Callable[[Run], float | None]) -> Spread | None:
    values = [v for v in map(value, group.runs) if v is not None]
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, len(values), len(group.runs))


def _best_record(run: Run, metric: Metric, chosen_by: str) -> dict[str, Any] | None:
    """The round that is best by the given key among those with a test score; the first of equals."""
    rounds = [r for r in run.records if number(r, metric.name) is not None and number(r, chosen_by) is not None]
    best = metric.best([r[chosen_by] for r in rounds]) if rounds else None
    return next((r for r in rounds if r[chosen_by] == best), None)


def _score(run: Run, metric: Metric, chosen_by: str) -> float | None:
    """The test score in the round that is best by the given key."""
    record = _best_record(run, metric, chosen_by)
    return number(record, metric.name) if record else None


def _best_of(run: Run, metric: Metric, key: str) -> float | None:
    record = _best_record(run, metric, key)
    return number(record, key) if record else None


def _values(run: Run, key: str) -> list[float]:
    return [value for record in run.records if (value := number(record, key)) is not None]


def _has(run: Run, key: str) -> bool:
    return any(number(record, key) is not None for record in run.records)


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
