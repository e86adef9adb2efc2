"""Every site's scores: the server's, the personal and the super model side by side, at the round that validation chooses and in
the last one; every personal model on every site; how often the selector chose which model.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from undrift.report.load import Group, Run, number
from undrift.report.scores import Metric, best_record, metric_of

KINDS = ("global", "personal", "super")
ENDS = ("local", "centralized")  # shown first and last: what every other method lies between


class Part(NamedTuple):
    """A table of the report."""

    title: str
    rows: list[list[str]]
    legend: str


def tables(groups: list[Group]) -> list[Part]:
    """What there is to say of sites; nothing where the runs have none."""
    metric = metric_of(groups)
    name = metric.name.removeprefix("own_")
    scored = [g for g in groups if any(_at_end(run) for run in g.runs)]
    if not scored or name == metric.name:
        return []
    scored.sort(key=lambda g: ENDS.index(g.algorithm) * 2 - 1 if g.algorithm in ENDS else 0)
    titles = _site_names(scored[0].runs[0])
    measured = next(iter((_at_end(scored[0].runs[0]) or {})["sites"]["test"].values()))
    parts = [_scores(scored, metric, m, titles) for m in measured if m == name or m.startswith(f"{name}_")]
    parts += [_crossed(g, name, titles) for g in scored if g.algorithm == "local" and _crossed_of(g.runs[0], name)]
    parts += [_chosen(g, titles, "test") for g in scored if _chosen_of(g.runs[0], "test")]
    parts += [_chosen(g, titles, "unseen") for g in scored if _chosen_of(g.runs[0], "unseen")]
    parts += [_thresholds(g, name, titles) for g in scored if _thresholds_of(g.runs[0])]
    unseen = [g for g in scored if "unseen" in (_at_end(g.runs[0]) or {})["sites"]]
    return [*parts, _unseen(unseen, name)] if unseen else parts


def _scores(groups: list[Group], metric: Metric, name: str, titles: list[str]) -> Part:
    rows = [["method", "model", "round", *titles, "client average", "all samples"]]
    for group in groups:
        for when, find in (("validation", _chosen_record), ("last", lambda run, _: _at_end(run))):
            found = [record for run in group.runs if (record := find(run, metric))]
            for kind in KINDS:
                values = [r["sites"]["test"][kind][name] for r in found if kind in r["sites"].get("test", {})]
                if values:
                    rows.append([group.label, kind, when, *_row(values), _overall(found, kind, name)])
    legend = (
        f"Test {name} of each site, mean over seeds, ± the standard deviation of the client average, the unweighted mean "
        "of the sites. The last column is the mean over all test samples, for what serves the clients. Rounds: the one with the "
        "best validation score, where there are validation samples, and the last one. Local and Centralized are the two ends."
    )
    return Part(f"Sites: {name}", rows, legend)


def _row(values: list[list[float]]) -> list[str]:
    """The mean of each site over seeds, and the client average."""
    sites = [statistics.fmean(seeds) for seeds in zip(*values, strict=True)]
    averages = [statistics.fmean(seed) for seed in values]
    spread = f" ± {statistics.stdev(averages):.4f}" if len(averages) > 1 else ""
    return [*(f"{value:.4f}" for value in sites), f"{statistics.fmean(averages):.4f}{spread}"]


def _overall(records: list[dict[str, Any]], kind: str, name: str) -> str:
    best = [list(r["sites"]["test"])[-1] for r in records]
    values = [
        v for r, b in zip(records, best, strict=True) if b == kind and (v := number(r, f"own_{name}_all")) is not None
    ]
    return f"{statistics.fmean(values):.4f}" if values else "-"


def _crossed(group: Group, name: str, titles: list[str]) -> Part:
    """Every client's model on every site."""
    found = [_crossed_of(run, name) for run in group.runs if _crossed_of(run, name)]
    rows = [["model", *titles, "client average"]]
    for k, title in enumerate(titles):
        rows.append([title, *_row([matrix[k] for matrix in found])])
    return Part(
        f"Every model on every site: {group.label}",
        rows,
        f"Test {name} in the last round of the model of the site on the left.",
    )


def _chosen(group: Group, titles: list[str], split: str) -> Part:
    """How often the selector chose which model."""
    counts = [_chosen_of(run, split) for run in group.runs if _chosen_of(run, split)]
    rows = [["site", "global", *titles]]
    for k, title in enumerate(["the unseen one"] if split == "unseen" else titles):
        total = [sum(seed[k][m] for seed in counts) for m in range(len(titles) + 1)]
        rows.append([title, *(f"{count / max(sum(total), 1):.2f}" for count in total)])
    gammas = [value for run in group.runs if (value := number(_at_end(run) or {}, "gamma")) is not None]
    told = f" The threshold was {', '.join(f'{g:g}' for g in gammas)}." if gammas else ""
    about = "an unseen site" if split == "unseen" else "test samples"
    return Part(
        f"Chosen models, {about}: {group.label}", rows, f"The share of a site's samples, in the last round.{told}"
    )


def _unseen(groups: list[Group], name: str) -> Part:
    """The site that took no part in training."""
    rows = [["method", *KINDS]]
    for group in groups:
        found = [(_at_end(run) or {})["sites"]["unseen"] for run in group.runs if _at_end(run)]
        values = ([seed[kind][name][0] for seed in found if kind in seed] for kind in KINDS)
        rows.append([group.label, *(f"{statistics.fmean(v):.4f}" if v else "-" for v in values)])
    return Part(
        "The unseen site",
        rows,
        f"Test {name} of the site that was left out of training, in the last round, mean over seeds.",
    )


def _thresholds(group: Group, name: str, titles: list[str]) -> Part:
    """On the unseen site: without a threshold, and with the one that is best there."""
    rows = [["threshold", "global", *titles, name]]
    for which, title in (("none", "0"), ("best", "best")):
        found = [_thresholds_of(run)[which] for run in group.runs if _thresholds_of(run)]
        total = [sum(seed["chosen"][m] for seed in found) for m in range(len(titles) + 1)]
        gammas = "" if which == "none" else f" ({', '.join(format(seed['gamma'], 'g') for seed in found)})"
        shares = [f"{count / max(sum(total), 1):.2f}" for count in total]
        score = statistics.fmean(seed["scores"][name] for seed in found)
        rows.append([f"{title}{gammas}", *shares, f"{score:.4f}"])
    return Part(
        f"The threshold on the unseen site: {group.label}",
        rows,
        "The share of its samples for which each model was chosen, and their score, in the last round. The best threshold is "
        "found on the unseen samples themselves: it says how much a threshold could do, not what is to be had.",
    )


def everywhere_unseen(tasks: list[list[Group]]) -> Part | None:
    """Each method on the left-out sites of several data sets, for what serves: the super model, else the server's."""
    name = metric_of(tasks[0]).name.removeprefix("own_")
    left_out = [
        groups for groups in tasks if any("unseen" in (_at_end(g.runs[0]) or {}).get("sites", {}) for g in groups)
    ]
    if len(left_out) < 2:
        return None
    titles = [str(groups[0].runs[0].settings.get("dataset")) for groups in left_out]
    rows = [["method", *titles, "mean"]]
    tables = [
        {g.label.replace(f" ({title})", ""): g for g in groups} for title, groups in zip(titles, left_out, strict=True)
    ]
    for label in dict.fromkeys(label for table in tables for label in table):
        values = []
        for table in tables:
            ended = [_at_end(run) for run in (table[label].runs if label in table else [])]
            found = [record["sites"]["unseen"] for record in ended if record and "unseen" in record["sites"]]
            scores = [seed["super" if "super" in seed else "global"][name][0] for seed in found]
            values.append(statistics.fmean(scores) if scores else None)
        known = [v for v in values if v is not None]
        mean = f"{statistics.fmean(known):.4f}" if len(known) == len(values) else "-"
        rows.append([label, *("-" if v is None else f"{v:.4f}" for v in values), mean])
    legend = f"Test {name} of the site that each data set leaves out of training, in the last round, mean over seeds."
    return Part("Unseen sites", rows, legend)


def _thresholds_of(run: Run) -> Any:
    return (_at_end(run) or {}).get("sites", {}).get("unseen_thresholds")


def _at_end(run: Run) -> dict[str, Any] | None:
    return next((r for r in reversed(run.records) if isinstance(r.get("sites"), dict)), None)


def _chosen_record(run: Run, metric: Metric) -> dict[str, Any] | None:
    record = best_record(run, metric, metric.validation)
    return record if record and isinstance(record.get("sites"), dict) else None


def _crossed_of(run: Run, name: str) -> Any:
    return (_at_end(run) or {}).get("sites", {}).get("crossed", {}).get(name)


def _chosen_of(run: Run, split: str) -> Any:
    return (_at_end(run) or {}).get("sites", {}).get("chosen", {}).get(split)


def _site_names(run: Run) -> list[str]:
    count = len(next(iter((_at_end(run) or {})["sites"]["test"].values()))["loss"])
    named = run.made.get("sites")
    return list(named) if isinstance(named, list) and len(named) == count else [f"client {k + 1}" for k in range(count)]
