"""The report as one self-contained HTML file: tables, curves, settings, and commands to repeat the runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from undrift.core.errors import UndriftError
from undrift.report import drawings, sites
from undrift.report.charts import Curve, chart, colour, dash, over_megabytes, over_network_seconds, over_rounds
from undrift.report.load import Group, Run, as_text, by_task, group_runs, load, number, sweep_target, varying_settings
from undrift.report.scores import metric_of, rank
from undrift.report.summary import pick_settings, verdict
from undrift.report.text import more_table, table

MOST_CURVES = 10  # with more groups, the charts show one setting of each method

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1d2329; --faint: #5b6670; --line: #d5dade;
  --tint: #f2f5f7; --mark: #0072B2; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14181c; --ink: #e3e7ea; --faint: #9aa5ae; --line: #343c43; --tint: #1d2328;
    --mark: #56B4E9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 80rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 0 0 .3rem; }
p { margin: .5rem 0; max-width: 48rem; overflow-wrap: anywhere; }
.faint, footer { color: var(--faint); font-size: .9rem; }
.verdict { border-left: 4px solid var(--mark); background: var(--tint); padding: .6rem .9rem;
  margin-bottom: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; vertical-align: bottom; }
td { white-space: nowrap; }
td.words { white-space: normal; min-width: 8rem; }
dl { margin: .5rem 0; display: grid;
  grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .2rem 1rem; }
dt { color: var(--faint); font-size: .8rem; }
dd { margin: 0 0 .3rem; overflow-wrap: anywhere; }
.charts { margin: 1.2rem 0; display: grid; gap: 1.6rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); }
figure { margin: 0; max-width: 36rem; }
figure > svg { width: 100%; height: auto; display: block; }
figure > svg text, figure > svg tspan { fill: currentColor !important; }
figcaption { font-size: .85rem; display: flex; flex-wrap: wrap; gap: 0 1rem; }
figcaption svg { width: 1.8rem; height: .7rem; vertical-align: middle; margin-right: .3rem; }
details { border-bottom: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
pre { background: var(--tint); padding: .5rem .7rem; margin: .4rem 0; overflow-x: auto; font-size: .85rem;
  user-select: all; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); }
"""


def write(paths: list[Path], out: Path, target: float | None = None) -> list[Run]:
    """Write the report on the runs in `paths`, and return them; the default target is that of a sweep.toml."""
    runs = load(paths)
    target = sweep_target(paths) if target is None else target
    page = html(runs, target).encode(errors="backslashreplace")  # a folder's name may hold bytes that are no text
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(page)
        os.replace(temporary, out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UndriftError(f"cannot write {out}: {error.strerror}") from error
    return runs


def html(runs: list[Run], target: float | None) -> str:
    groups = group_runs(runs)
    tasks = by_task(groups)
    unseen = sites.unseen_sites(tasks)
    about = "; ".join(rivals[0].task for rivals in tasks) if len(tasks) < 3 else f"{len(tasks)} tasks"
    title = f"undrift: {about}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _overview(runs, groups),
        _part(unseen) if unseen else "",
        *(_results(rivals, target, f"t{i}", alone=len(tasks) == 1) for i, rivals in enumerate(tasks)),
        _dropped(groups),
        "<h2>Exact settings, and how to run it again</h2>",
        *(_repeat(group) for group in groups),
        _footer(runs),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(part for part in parts if part)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def _overview(runs: list[Run], groups: list[Group]) -> str:
    varying = {*varying_settings(runs), "seed"}
    common = {name: value for name, value in runs[0].settings.items() if name not in varying}
    seeds = dict.fromkeys(as_text(run.settings.get("seed")) for run in runs)
    count = f"{_count(len(runs), 'run')} in {_count(len(groups), 'group')}; seeds: {', '.join(seeds)}."
    notes = [f"<p>{escape(count)} Settings that all runs share:</p>", _list(common)]
    unfinished = [f"{r.folder} ({r.rounds} of {r.settings['rounds']} rounds)" for r in runs if _unfinished(r)]
    if unfinished:
        notes.append(f"<p><strong>Not at their last round:</strong> {escape(', '.join(unfinished))}</p>")
    repeats = [str(run.folder) for group in groups for run in group.repeats]
    if repeats:
        text = f"repeats a seed of its group and is left out of the results: {', '.join(repeats)}"
        notes.append(f"<p><strong>Left out:</strong> {escape(text)}</p>")
    return "<h2>What was run</h2>" + "".join(notes)


def _unfinished(run: Run) -> bool:
    rounds = number(run.settings, "rounds")
    return rounds is not None and run.rounds < rounds and not run.settings.get("stop_at")


def _results(groups: list[Group], target: float | None, name: str, alone: bool) -> str:
    """Table, verdict and charts of the groups of one task."""
    title = "Results" if alone else f"Results: {groups[0].task}"
    groups = rank(groups)
    charted, note = groups, ""
    if len(groups) > MOST_CURVES:
        charted = [pick.group for pick in pick_settings(groups)]
        note = f"<p>The charts show the setting picked for each method, not all {len(groups)} groups.</p>"
    if len(charted) > MOST_CURVES:
        note = f"<p>The charts show the best {MOST_CURVES} of {len(charted)} methods.</p>"
        charted = rank(charted)[:MOST_CURVES]
    return "\n".join(
        [
            f"<h2>{escape(title)}</h2>",
            f'<p class="verdict">{escape(verdict(groups))}</p>',
            '<p class="faint">The best come first.</p>',
            _table(table(groups, target)),
            '<p class="faint">Mean ± standard deviation over seeds (n - 1); none for a single seed. '
            "Targets are reached on the test set. Bytes are down and up together.</p>",
            _more(groups),
            *map(_part, sites.tables(groups)),
            note,
            f'<div class="charts">{_charts(charted, name)}</div>',
            '<p class="faint">Lines are means over seeds, bands go from the lowest seed to the highest; '
            "each ends where the first of its seeds ends.</p>",
            drawings.draw_groups(groups, name),
        ]
    )


def _more(groups: list[Group]) -> str:
    """Further measures, if the records have any."""
    rows = more_table(groups)
    if len(rows[0]) == 1:
        return ""
    legend = (
        "Forgetting: the mean over classes of the best earlier test accuracy minus the present one. The loss on absent "
        "clients is over the training samples of those who were not in the last cohort; the clients' accuracy is on their "
        "own training samples, at these quantiles of the clients. Constraints are those active in a quadratic programme, "
        "mean over rounds (server) or local steps (clients)."
    )
    return f'<h3>More measures</h3>{_table(rows)}<p class="faint">{escape(legend)}</p>'


def _part(part: sites.Part) -> str:
    return f'<h3>{escape(part.title)}</h3>{_table(part.rows)}<p class="faint">{escape(part.legend)}</p>'


def _charts(groups: list[Group], name: str) -> str:
    score = metric_of(groups).name
    by_rounds, by_traffic = over_rounds(groups, score), over_megabytes(groups, score)
    by_seconds, consistency = over_network_seconds(groups, score), over_rounds(groups, "consistency")
    losses = over_rounds(groups, "loss") if score != "loss" else []
    absent = [curve for curve in over_rounds(groups, "absent_loss") if len(curve.x) > 1]
    plans: list[tuple[str, list[Curve], str, str]] = [
        (f"Test {score} over rounds", by_rounds, "round", f"test {score}"),
        (f"Test {score} over traffic", by_traffic, "megabytes, down and up", f"test {score}"),
        (f"Test {score} over simulated network time", by_seconds, "seconds on the network", f"test {score}"),
        ("Test loss", losses, "round", "test loss"),
        ("Consistency: how far apart the local models end", consistency, "round", "mean squared distance"),
        ("Forgetting", over_rounds(groups, "forgetting"), "round", "mean over classes"),
        ("Loss on absent clients' data", absent, "round", "training loss"),
        (f"Validation {score}", over_rounds(groups, f"val_{score}"), "round", f"validation {score}"),
    ]
    figures = []
    for place, (title, curves, x_label, y_label) in enumerate(plans):
        log = curves is consistency
        if log:
            curves = [curve for curve in curves if (curve.mean > 0).any()]
        if curves:
            drawing = chart(curves, f"{name}c{place}", x_label, y_label, log)
            legend = "".join(_legend(groups[curve.place], curve.place) for curve in curves)
            figures.append(f"<figure><h3>{title}</h3>{drawing}<figcaption>{legend}</figcaption></figure>")
    return "\n".join(figures)


def _legend(group: Group, place: int) -> str:
    line = f'<path d="M0 5H28" stroke="{colour(place)}" stroke-width="3" stroke-dasharray="{dash(place)}"/>'
    return f'<span><svg viewBox="0 0 28 10" aria-hidden="true">{line}</svg>{escape(group.label)}</span>'


def _dropped(groups: list[Group]) -> str:
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
    if len(rows) == 1:
        return ""
    why = (
        "<p>These clients failed to answer, or sent an update that was not finite; the round went on without them.</p>"
    )
    return f"<h2>Dropped clients</h2>{why}{_table(rows)}"


def _repeat(group: Group) -> str:
    settings = {name: value for name, value in group.runs[0].settings.items() if name != "seed"}
    seeds = ", ".join(as_text(run.settings.get("seed")) for run in group.runs)
    files = (f"{run.command} {shlex.quote(str(run.folder / 'run.toml'))}" for run in group.runs)
    commands = "".join(f"<pre>{escape(f'undrift {file} --out NEW')}</pre>" for file in files)
    return f"<details><summary>{escape(group.label)}</summary>{_list(settings | {'seeds': seeds})}{commands}</details>"


def _footer(runs: list[Run]) -> str:
    versions: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _flat(run.made):
            versions.setdefault(name, {})[as_text(value)] = None
    if not versions:
        return "<footer><p>The runs do not say which versions made them.</p></footer>"
    table = _list({name: ", ".join(values) for name, values in versions.items()})
    return f"<footer><p>Made with</p>{table}</footer>"


def _flat(made: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in made.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _table(rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[1:])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    """Text may wrap, numbers may not."""
    words = ' class="words"' if len(text) > 12 and not text[0].isdigit() else ""
    return f"<td{words}>{escape(text)}</td>"


def _list(pairs: Mapping[str, Any]) -> str:
    """A compact table of names and values; a dash stands for an empty value."""
    items = ((escape(name), escape(as_text(value)) or "&ndash;") for name, value in pairs.items())
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in items) + "</dl>"


def _count(number_of: int, what: str) -> str:
    return f"{number_of} {what}{'' if number_of == 1 else 's'}"
