"""The page of a reproduced table, made from its JSON alone: verdict colours, curves with seed bands, claims; no scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from undrift.core.errors import BadData

COLOURS = {"agrees": "agrees", "order agrees": "order", "differs": "differs"}
MOST_CURVES = 16
WIDTH, HEIGHT, MARGIN = 420, 220, 34
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1rem auto; max-width: 76rem; padding: 0 1rem;
  color: #1b1f24; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.2rem; margin-top: 2.5rem } h3 { font-size: 1rem }
code { overflow-wrap: anywhere; background: #f6f8fa; padding: .1rem .3rem } nav { margin-bottom: 1rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { border: 1px solid #d0d7de; padding: .25rem .5rem; text-align: right; vertical-align: top; white-space: nowrap }
th { background: #f6f8fa; text-align: left } td.text { text-align: left; white-space: normal }
td small { display: block; color: #57606a } td.agrees { background: #d7f0db } td.order { background: #fff4c8 }
tr > th:first-child { position: sticky; left: 0; white-space: normal; min-width: 5.5rem }
td.text { min-width: 9rem } td.differs { background: #fbdcd9 }
.key span { display: inline-block; padding: .1rem .5rem; margin-right: .5rem; border: 1px solid #d0d7de }
.key .agrees { background: #d7f0db } .key .order { background: #fff4c8 } .key .differs { background: #fbdcd9 }
figure { display: inline-block; margin: .5rem 1rem .5rem 0; vertical-align: top; max-width: 100% } figcaption { font-weight: 600 }
svg { max-width: 100%; height: auto }
.legend { font-size: .8rem }
"""
INKS = (
    "#0969da", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#0a7d8c", "#57606a",
    "#bc4c00", "#4d2d00", "#6639ba", "#116329", "#a40e26", "#033d8b", "#99286e", "#2f363d",
)  # fmt: skip


MARKS = {"agrees": "✓", "order agrees": "≈", "differs": "✗"}
KEY = "".join(f'<span class="{COLOURS[word]}">{mark} {word}</span>' for word, mark in MARKS.items())


def page(verdict: Mapping[str, Any]) -> str:
    """The page of one table."""
    return html(verdict["title"], f"<h1>{escape(verdict['title'])}</h1>\n{section(verdict)}")


def section(verdict: Mapping[str, Any]) -> str:
    """What is said of one table, without its title."""
    command = f"<code>{escape(verdict['command'])}</code>" if verdict.get("command") else ""
    parts = [
        *(f"<p>{escape(text)}</p>" for text in (verdict["about"], remark(verdict)) if text),
        f"<p>{command}</p>" if command else "",
        f'<p class="key">{KEY}</p>' if any(cell["paper"] for cell in verdict["cells"]) else "",
        f'<div class="wide" tabindex="0">{table(verdict)}</div>',
        f"<p>{escape(correlations(verdict))}</p>",
        claims(verdict),
        curves(verdict),
    ]
    return "\n".join(part for part in parts if part)


def html(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>undrift: {escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


TUNED = {"none": "the suite's own", "grid": "picked from the paper's grid on validation samples"}


def remark(verdict: Mapping[str, Any]) -> str:
    """How the numbers were made."""
    small = "Tiny runs on embedded data, to try the suite out: nothing here says anything about the paper. "
    text = small if verdict["scale"] == "small" else ""
    text += f"Settings: {TUNED.get(verdict['tune'], verdict['tune'])}."
    if verdict["seconds"]:
        text += f" {verdict['seconds']:.0f} s of runs on {', '.join(verdict['devices'])}."
    spent = verdict["spent_on_tuning"]
    if spent["trials"]:
        text += f" {spent['trials']} trials, as many rounds as {spent['full_runs']:.1f} full runs, {spent['seconds']:.0f} s."
    if verdict["commits"]:
        text += f" Commit {', '.join(commit[:10] for commit in verdict['commits'])}."
    return text


def format_cell(number: Mapping[str, Any] | None) -> str:
    """
    >>> format_cell({"mean": 98.2234, "deviation": 0.051, "seeds": 3, "why": ""}), format_cell(None)
    ('98.22 ± 0.05', '–')
    """
    if number is None:
        return "–"
    if number["mean"] is None:
        return "never" if number["why"] == "-" else "diverges"
    digits = 2 if abs(number["mean"]) >= 1 else 4
    text = f"{number['mean']:.{digits}f}"
    return text if number["deviation"] is None else f"{text} ± {number['deviation']:.{digits}f}"


def table(verdict: Mapping[str, Any]) -> str:
    """Ours above the paper's, with the difference in standard errors."""
    cells = {(cell["row"], cell["column"]): cell for cell in verdict["cells"]}
    columns = [c for c in verdict["columns"] if any(place[1] == c for place in cells)]
    rows = [r for r in verdict["rows"] if any(place[0] == r for place in cells)]
    head = "".join(f"<th>{escape(verdict['columns'][c])}</th>" for c in columns)
    lines = [f"<tr><th>method ({escape(verdict['unit'])})</th>{head}</tr>"]
    for row in rows:
        tds = "".join(cell_html(cells.get((row, column))) for column in columns)
        lines.append(f"<tr><th>{escape(verdict['rows'][row])}</th>{tds}</tr>")
    return f"<table>{''.join(lines)}</table>"


def cell_html(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "<td></td>"
    colour = COLOURS.get(cell["verdict"], "")
    mark = MARKS.get(cell["verdict"], "")
    more = f"{mark} paper {format_cell(cell['paper'])}".strip() if cell["paper"] else ""
    if cell.get("errors") is not None:
        more += f"; {cell['errors']:+.1f} SE"
    said = cell["verdict"] + (f"; {cell['stand_in']}" if cell.get("stand_in") else "")
    title = said + (f"; picked {cell['picked']}" if cell.get("picked") else "")
    return f'<td class="{colour}" title="{escape(title)}">{escape(format_cell(cell["ours"]))}<small>{escape(more)}</small></td>'


def correlations(verdict: Mapping[str, Any]) -> str:
    """Spearman's rank correlation of each column."""
    found = verdict["rank_correlation"]
    each = [f"{verdict['columns'][c]}: {value:.2f}" for c, value in found["columns"].items() if value is not None]
    if not each:
        return "Rank correlation with the paper: nothing to compare yet."
    return f"Rank correlation with the paper over the methods: {'; '.join(each)}. Mean {found['mean']:.2f}."


def claims(verdict: Mapping[str, Any]) -> str:
    if not verdict["claims"]:
        return ""
    lines = ["<tr><th>the paper's claim</th><th>in its numbers</th><th>in ours</th><th>holds</th></tr>"]
    for claim in verdict["claims"]:
        colour = {True: "agrees", False: "differs", None: ""}[claim["holds"]]
        cells = (claim["text"], claim["in_paper"], claim["found"])
        tds = "".join(f'<td class="text">{escape(text)}</td>' for text in cells)
        lines.append(f'<tr>{tds}<td class="{colour}">{yes_or_no(claim["holds"])}</td></tr>')
    return f'<h3>Claims</h3><div class="wide" tabindex="0"><table>{"".join(lines)}</table></div>'


def yes_or_no(holds: bool | None) -> str:
    return {True: "yes", False: "no", None: "not run"}[holds]


def curves(verdict: Mapping[str, Any]) -> str:
    """A picture for each column: the mean over seeds, and the band between the lowest and the highest."""
    pictures = []
    for column, title in verdict["columns"].items():
        own = [c for c in verdict["cells"] if c["column"] == column and c.get("curves")][:MOST_CURVES]
        if own:
            named = [(verdict["rows"][c["row"]], c["curves"]) for c in own]
            pictures.append(f"<figure><figcaption>{escape(title)}</figcaption>{drawing(named)}</figure>")
    return "<h3>Curves</h3>\n" + "\n".join(pictures) if pictures else ""


def drawing(named: Sequence[tuple[str, Sequence[Sequence[Sequence[float]]]]]) -> str:
    """Curves as an SVG with a legend."""
    every = [point for _, seeds in named for curve in seeds for point in curve]
    last = max(point[0] for point in every)
    low, high = min(point[1] for point in every), max(point[1] for point in every)
    high = high if high > low else low + 1

    def at(x: float, y: float) -> str:
        across = MARGIN + (WIDTH - MARGIN - 6) * x / last
        return f"{across:.1f},{6 + (HEIGHT - MARGIN) * (high - y) / (high - low):.1f}"

    shapes, legend = [], []
    for n, (name, seeds) in enumerate(named):
        ink, rounds, values = INKS[n % len(INKS)], *join_seeds(seeds)
        mean = " ".join(at(x, y) for x, y in zip(rounds, values.mean(0), strict=True))
        top = [at(x, y) for x, y in zip(rounds, values.max(0), strict=True)]
        bottom = [at(x, y) for x, y in zip(rounds, values.min(0), strict=True)]
        if len(seeds) > 1:
            shapes.append(f'<polygon points="{" ".join(top + bottom[::-1])}" fill="{ink}" opacity=".15"/>')
        shapes.append(f'<polyline points="{mean}" fill="none" stroke="{ink}" stroke-width="1.5"/>')
        legend.append(
            f'<svg width="14" height="6" aria-hidden="true"><rect width="14" height="4" fill="{ink}"/></svg> {escape(name)} '
        )
    ticks = "".join(
        f'<text x="2" y="{y}" font-size="11">{value:.2g}</text>'
        for y, value in ((14, high), (HEIGHT - MARGIN + 6, low))
    )
    ticks += f'<text x="{WIDTH - 6}" y="{HEIGHT - 12}" font-size="11" text-anchor="end">round {last:g}</text>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(shapes)}{ticks}</svg>'
        f'<div class="legend">{"".join(legend)}</div>'
    )


def join_seeds(seeds: Sequence[Sequence[Sequence[float]]]) -> tuple[list[float], np.ndarray[Any, Any]]:
    """The rounds that all seeds have, and [seeds, rounds] values."""
    tables = [{point[0]: point[1] for point in curve} for curve in seeds]
    rounds = sorted(set.intersection(*(set(table) for table in tables)))
    return list(rounds), np.array([[table[r] for r in rounds] for table in tables])


def as_text(verdict: Mapping[str, Any]) -> Iterator[str]:
    """The table in lines."""
    for column in verdict["columns"]:
        own = [cell for cell in verdict["cells"] if cell["column"] == column and cell["ours"]]
        if not own:
            continue
        yield f"{verdict['columns'][column]} ({verdict['unit']})"
        for cell in own:
            errors = f"{cell['errors']:+.1f} SE" if cell.get("errors") is not None else ""
            row = f"  {verdict['rows'][cell['row']]:24} {format_cell(cell['ours']):>16}  paper {format_cell(cell['paper']):>16}"
            yield f"{row}  {errors:>10}  {cell['verdict']}{sending(cell)}"
    yield correlations(verdict)
    for claim in verdict["claims"]:
        holds = yes_or_no(claim["holds"])
        ours = "" if claim["found"] == holds else f"{claim['found']}; "
        yield f"claim: {claim['text']}: {holds} ({ours}in the paper {claim['in_paper'] or '–'})"


def sending(cell: Mapping[str, Any]) -> str:
    """What a run's messages would cost, where a suite asks for that.

    >>> sending({"bytes": 2.5e9, "network_seconds": {"100": 25.0, "1000": 2.5}})
    '  2.5 GB, 25 s at 100 Mbit/s, 2.5 s at 1000 Mbit/s'
    """
    if "bytes" not in cell:
        return ""
    size = next(
        (f"{cell['bytes'] / unit:.3g} {name}" for name, unit in (("GB", 1e9), ("MB", 1e6)) if cell["bytes"] >= unit), ""
    )
    times = [f"{seconds:.3g} s at {speed} Mbit/s" for speed, seconds in cell["network_seconds"].items()]
    return "  " + ", ".join([size or f"{cell['bytes']:g} bytes", *times])


def index(folder: Path) -> str:
    """A page that leads to the pages of all tables in a folder."""
    linked = ((f"{file.stem}.html", verdict) for file, verdict in verdicts_in(folder))
    return html("papers beside our runs", f"<h1>Papers beside our runs</h1>\n{overview(linked)}")


def verdicts_in(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The verdicts among a folder's files, by name."""
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadData(f"{file} is damaged: {error}") from error
        if isinstance(content, dict) and {"rank_correlation", "cells", "rows", "columns"} <= content.keys():
            yield file, content


def overview(linked: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """A line for each table, with what its cells and claims come to."""
    names = ("table", "cells run", "agree", "order agrees", "differ", "claims that hold", "rank correlation")
    lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"]
    for target, verdict in linked:
        words = [cell["verdict"] for cell in verdict["cells"]]
        mean = verdict["rank_correlation"]["mean"]
        numbers = [sum(word == each for word in words) for each in COLOURS]
        run = f"{sum(cell['ours'] is not None for cell in verdict['cells'])} of {len(words)}"
        known = [claim["holds"] for claim in verdict["claims"] if claim["holds"] is not None]
        held = f"{sum(known)} of {len(known)}" if known else "–"
        cells = [run, *numbers, held, "–" if mean is None else f"{mean:.2f}"]
        link = f'<a href="{escape(target)}">{escape(verdict["title"])}</a>'
        small = " (small)" if verdict["scale"] == "small" else ""
        lines.append(f"<tr><th>{link}{small}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<div class="wide" tabindex="0"><table>{"".join(lines)}</table></div>'
