"""Tables of every site's scores: the server's, the personal and the super model in the best validation round and the last one;
every personal model on every site; how often the selector chose each model.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from undrift.core.errors import BadRunFolder
from undrift.report.load import Group, Run, number
from undrift.report.scores import Metric, best_place, metric_of

KINDS = ("global", "personal", "super")
SCORES = {"*": {"*": [float]}}  # by model and measure, one for each site
FORM = {  # the form of the table of sites in a record
    "test": SCORES, "val": SCORES, "unseen": SCORES, "crossed": {"*": [[float]]}, "chosen": {"*": [[float]]},
    "unseen_thresholds": {"*": {"gamma": float, "chosen": [float], "scores": {"*": float}}},
}  # fmt: skip
ENDS = ("local", "centralized")  # shown first and last: bounds for the other methods


class Part(NamedTuple):
    """A table of the report."""

    title: str
    rows: list[list[str]]
    legend: str


def tables(groups: list[Group]) -> list[Part]:
    """The tables of sites; none if the runs have no sites."""
    metric = metric_of(groups)
    name = metric.name.removeprefix("own_")
    scored = [g for g in groups if any(map(_last_sites, g.runs))]
    if not scored or name == metric.name:
        return []
    scored.sort(key=lambda g: ENDS.index(g.algorithm) * 2 - 1 if g.algorithm in ENDS else 0)
    titles = _site_names(scored[0].runs[0])
    measures = next(iter(_last_sites(scored[0].runs[0])["test"].values()))
    parts = [_scores(scored, metric, m, titles) for m in measures if m == name or m.startswith(f"{name}_")]
    parts += [
        _cross_table(g, name, titles) for g in scored if g.algorithm == "local" and _crossed_scores(g.runs[0], name)
    ]
    parts += [_choice_table(g, titles, "test") for g in scored if _choices(g.runs[0], "test")]
    parts += [_choice_table(g, titles, "unseen") for g in scored if _choices(g.runs[0], "unseen")]
    parts += [_thresholds(g, name, titles) for g in scored if _last_sites(g.runs[0]).get("unseen_thresholds")]
    unseen = [g for g in scored if "unseen" in _last_sites(g.runs[0])]
    return [*parts, _unseen(unseen, name)] if unseen else parts


def _scores(groups: list[Group], metric: Metric, name: str, titles: list[str]) -> Part:
    rows = [["method", "model", "round", *titles, "client average", "all samples"]]
    for group in groups:
        for when, find in (("validation", _validation_record), ("last", lambda run, _: _last_record(run))):
            records = [record for run in group.runs if (record := find(run, metric))]
            for kind in KINDS:
                values = [r["sites"]["test"][kind][name] for r in records if kind in r["sites"].get("test", {})]
                if values:
                    rows.append([group.label, kind, when, *_row(values), _overall(records, kind, name)])
    legend = (
        f"Test {name} of each site, mean over seeds, ± the standard deviation of the client average, the unweighted mean "
        "of the sites. The last column is the mean over all test samples with the clients' final choice of model. Rounds: the "
        "one with the best validation score, if there is one, and the last one. Local and Centralized are the two ends."
    )
    return Part(f"Sites: {name}", rows, legend)


def _row(values: list[list[float]]) -> list[str]:
    """The mean of each site over seeds, and the client average."""
    sites = [statistics.fmean(seeds) for seeds in zip(*values, strict=True)]
    averages = [statistics.fmean(seed) for seed in values]
    spread = f" ± {statistics.stdev(averages):.4f}" if len(averages) > 1 else ""
    return [*(f"{value:.4f}" for value in sites), f"{statistics.fmean(averages):.4f}{spread}"]


def _overall(records: list[dict[str, Any]], kind: str, name: str) -> str:
    serving = [record for record in records if list(record["sites"]["test"])[-1] == kind]
    values = [v for record in serving if (v := number(record, f"own_{name}_all")) is not None]
    return f"{statistics.fmean(values):.4f}" if values else "-"


def _cross_table(group: Group, name: str, titles: list[str]) -> Part:
    """Every client's model on every site."""
    matrices = [matrix for run in group.runs if (matrix := _crossed_scores(run, name))]
    rows = [["model", *titles, "client average"]]
    rows += [[title, *_row([matrix[k] for matrix in matrices])] for k, title in enumerate(titles)]
    legend = f"Test {name} in the last round of the model of the site on the left."
    return Part(f"Every model on every site: {group.label}", rows, legend)


def _choice_table(group: Group, titles: list[str], split: str) -> Part:
    """How often the selector chose each model."""
    counts = [count for run in group.runs if (count := _choices(run, split))]
    rows = [["site", "global", *titles]]
    for k, title in enumerate(["the unseen one"] if split == "unseen" else titles):
        rows.append([title, *_shares([seed[k] for seed in counts])])
    gammas = [value for run in group.runs if (value := number(_last_record(run) or {}, "gamma")) is not None]
    threshold = f" The threshold was {', '.join(f'{g:g}' for g in gammas)}." if gammas else ""
    about = "an unseen site" if split == "unseen" else "test samples"
    legend = f"The share of a site's samples, in the last round.{threshold}"
    return Part(f"Chosen models, {about}: {group.label}", rows, legend)


def _shares(counts: list[list[int]]) -> list[str]:
    """The share of each model, from each seed's counts."""
    total = [sum(seeds) for seeds in zip(*counts, strict=True)]
    return [f"{count / max(sum(total), 1):.2f}" for count in total]


def _unseen(groups: list[Group], name: str) -> Part:
    """The site that took no part in training."""
    rows = [["method", *KINDS]]
    for group in groups:
        seeds = [sites["unseen"] for run in group.runs if (sites := _last_sites(run))]
        values = ([seed[kind][name][0] for seed in seeds if kind in seed] for kind in KINDS)
        rows.append([group.label, *(f"{statistics.fmean(v):.4f}" if v else "-" for v in values)])
    legend = f"Test {name} of the site that was left out of training, in the last round, mean over seeds."
    return Part("The unseen site", rows, legend)


def _thresholds(group: Group, name: str, titles: list[str]) -> Part:
    """The unseen site without a threshold, and with the threshold that is best there."""
    rows = [["threshold", "global", *titles, name]]
    for which, title in (("none", "0"), ("best", "best")):
        seeds = [thresholds[which] for run in group.runs if (thresholds := _last_sites(run).get("unseen_thresholds"))]
        gammas = "" if which == "none" else f" ({', '.join(format(seed['gamma'], 'g') for seed in seeds)})"
        score = statistics.fmean(seed["scores"][name] for seed in seeds)
        rows.append([f"{title}{gammas}", *_shares([seed["chosen"] for seed in seeds]), f"{score:.4f}"])
    legend = (
        "The share of its samples for which each model was chosen, and their score, in the last round. The best threshold is "
        "found on the unseen samples themselves: it shows what a threshold could do at best."
    )
    return Part(f"The threshold on the unseen site: {group.label}", rows, legend)


def unseen_sites(tasks: list[list[Group]]) -> Part | None:
    """Each method on the left-out sites of several data sets, with the super model if there is one, else the server's."""
    name = metric_of(tasks[0]).name.removeprefix("own_")
    left_out = [groups for groups in tasks if any("unseen" in _last_sites(g.runs[0]) for g in groups)]
    if len(left_out) < 2:
        return None
    titles = [str(groups[0].runs[0].settings.get("dataset")) for groups in left_out]
    rows = [["method", *titles, "mean"]]
    tables = [{g.label: g for g in groups} for groups in left_out]
    for label in dict.fromkeys(label for table in tables for label in table):
        values = []
        for table in tables:
            last = [_last_sites(run) for run in (table[label].runs if label in table else [])]
            seeds = [sites["unseen"] for sites in last if "unseen" in sites]
            scores = [seed["super" if "super" in seed else "global"][name][0] for seed in seeds]
            values.append(statistics.fmean(scores) if scores else None)
        known = [v for v in values if v is not None]
        mean = f"{statistics.fmean(known):.4f}" if len(known) == len(values) else "-"
        rows.append([label, *("-" if v is None else f"{v:.4f}" for v in values), mean])
    legend = f"Test {name} of the site that each data set leaves out of training, in the last round, mean over seeds."
    return Part("Unseen sites", rows, legend)


def _last_record(run: Run) -> dict[str, Any] | None:
    return _check_sites(run, run.records.last_with_sites)


def _last_sites(run: Run) -> dict[str, Any]:
    """The sites of the last record that has them."""
    record = _last_record(run)
    return dict(record["sites"]) if record else {}


def _validation_record(run: Run, metric: Metric) -> dict[str, Any] | None:
    place = best_place(run, metric, metric.validation)
    record = {} if place is None else run.records.read(place)
    return _check_sites(run, record) if isinstance(record.get("sites"), dict) else None


def _check_sites(run: Run, record: dict[str, Any] | None) -> dict[str, Any] | None:
    """The record, if it has test scores of sites; they must have the form that a run writes."""
    if record is None or "test" not in record["sites"]:
        return None
    if not (_fits(record["sites"], FORM) and _of_one_length(record["sites"])):
        raise BadRunFolder(f"the scores of sites in {run.records.path} are damaged, in round {record['round']}")
    return record


def _fits(value: Any, form: Any) -> bool:
    """Whether a value has a form: `float`, a list or a table of one form, or a table with a form for each name."""
    if form is float:
        return isinstance(value, int | float)
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(each, form[0]) for each in value)
    if not isinstance(value, dict):
        return False
    return all(
        _fits(each, form.get(name, form.get("*"))) for name, each in value.items() if name in form or "*" in form
    )


def _of_one_length(sites: dict[str, Any]) -> bool:
    """Whether the test scores of every model are those of the same measures, the loss among them, and of the same sites."""
    models = list(sites.get("test", {}).values())
    measures = {frozenset(model) for model in models}
    lengths = {len(values) for model in models for values in model.values()}
    return len(measures) == len(lengths) == 1 and "loss" in next(iter(measures)) and lengths != {0}


def _crossed_scores(run: Run, name: str) -> Any:
    return _last_sites(run).get("crossed", {}).get(name)


def _choices(run: Run, split: str) -> Any:
    return _last_sites(run).get("chosen", {}).get(split)


def _site_names(run: Run) -> list[str]:
    count = len(next(iter(_last_sites(run)["test"].values()))["loss"])
    names = run.made.get("sites")
    return list(names) if isinstance(names, list) and len(names) == count else [f"client {k + 1}" for k in range(count)]
