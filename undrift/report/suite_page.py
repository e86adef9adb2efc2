"""The page of a reproduced table, made from its JSON alone: verdict colours, curves with seed bands, claims; no scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = {"agrees": "agrees", "order agrees": "order", "differs": "differs"}
MOST_CURVES = 16
WIDTH, HEIGHT, MARGIN = 420, 220, 34
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1rem auto; max-width: 76rem; padding: 0 1rem;
  color: #1b1f24; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { border: 1px solid #d0d7de; padding: .25rem .5rem; text-align: right; vertical-align: top; white-space: nowrap }
th { background: #f6f8fa; text-align: left } td.text { text-align: left; white-space: normal }
td small { display: block; color: #57606a } td.agrees { background: #d7f0db } td.order { background: #fff4c8 }
td.differs { background: #fbdcd9 } .key span { padding: .1rem .5rem; margin-right: .5rem; border: 1px solid #d0d7de }
.key .agrees { background: #d7f0db } .key .order { background: #fff4c8 } .key .differs { background: #fbdcd9 }
figure { display: inline-block; margin: .5rem 1rem .5rem 0; vertical-align: top; max-width: 100% } figcaption { font-weight: 600 }
svg { max-width: 100%; height: auto }
.legend { font-size: .8rem }
"""
INKS = (
    "#0969da", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#0a7d8c", "#57606a",
    "#bc4c00", "#4d2d00", "#6639ba", "#116329", "#a40e26", "#033d8b", "#99286e", "#2f363d",
)  # fmt: skip


def page(verdict: Mapping[str, Any]) -> str:
    """The page of one table."""
    parts = [
        f"<h1>{escape(verdict['title'])}</h1>",
        *(f"<p>{escape(text)}</p>" for text in (verdict["about"], remark(verdict)) if text),
        '<p class="key"><span class="agrees">agrees</span><span class="order">order agrees</span>'
        '<span class="differs">differs</span></p>',
        f'<div class="wide">{table(verdict)}</div>',
        "<h2>Order of the methods</h2>",
        f"<p>{escape(correlations(verdict))}</p>",
        claims(verdict),
        curves(verdict),
    ]
    return html(verdict["title"], "\n".join(part for part in parts if part))


def html(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>undrift: {escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def remark(verdict: Mapping[str, Any]) -> str:
    """How the numbers were made."""
    text = f"Scale {verdict['scale']}, settings tuned by {verdict['tune']}."
    if verdict["seconds"]:
        text += f" {verdict['seconds']:.0f} s of runs on {', '.join(verdict['devices'])}."
    spent = verdict["spent_on_tuning"]
    if spent["trials"]:
        text += f" {spent['trials']} trials, as many rounds as {spent['full_runs']:.1f} full runs, {spent['seconds']:.0f} s."
    if verdict["commits"]:
        text += f" Commit {', '.join(commit[:10] for commit in verdict['commits'])}."
    return text


def shown(number: Mapping[str, Any] | None) -> str:
    """
    >>> shown({"mean": 98.2234, "deviation": 0.051, "seeds": 3, "why": ""}), shown(None)
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
    more = f"paper {shown(cell['paper'])}" if cell["paper"] else ""
    if cell.get("errors") is not None:
        more += f"; {cell['errors']:+.1f} SE"
    said = cell["verdict"] + (f"; {cell['stand_in']}" if cell.get("stand_in") else "")
    title = said + (f"; picked {cell['picked']}" if cell.get("picked") else "")
    return (
        f'<td class="{colour}" title="{escape(title)}">{escape(shown(cell["ours"]))}<small>{escape(more)}</small></td>'
    )


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
        lines.append(f'<tr>{tds}<td class="{colour}">{said(claim["holds"])}</td></tr>')
    return f'<h2>Claims</h2><div class="wide"><table>{"".join(lines)}</table></div>'


def said(holds: bool | None) -> str:
    return {True: "yes", False: "no", None: "not run"}[holds]


def curves(verdict: Mapping[str, Any]) -> str:
    """A picture for each column: the mean over seeds, and the band between the lowest and the highest."""
    pictures = []
    for column, title in verdict["columns"].items():
        own = [c for c in verdict["cells"] if c["column"] == column and c.get("curves")][:MOST_CURVES]
        if own:
            named = [(verdict["rows"][c["row"]], c["curves"]) for c in own]
            pictures.append(f"<figure><figcaption>{escape(title)}</figcaption>{drawing(named)}</figure>")
    return "<h2>Curves</h2>\n" + "\n".join(pictures) if pictures else ""


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
        ink, rounds, values = INKS[n % len(INKS)], *joined(seeds)
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


def joined(seeds: Sequence[Sequence[Sequence[float]]]) -> tuple[list[float], np.ndarray[Any, Any]]:
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
            row = f"  {verdict['rows'][cell['row']]:24} {shown(cell['ours']):>16}  paper {shown(cell['paper']):>16}"
            yield f"{row}  {errors:>10}  {cell['verdict']}"
    yield correlations(verdict)
    for claim in verdict["claims"]:
        yield f"claim: {claim['text']}: {said(claim['holds'])} ({claim['found']}; in the paper {claim['in_paper'] or '–'})"


def index(folder: Path) -> str:
    """A page that leads to the pages of all tables in a folder."""
    lines = [
        "<tr><th>table</th><th>cells run</th><th>agree</th><th>order agrees</th><th>differ</th><th>rank correlation</th></tr>"
    ]
    for file in sorted(folder.glob("*.json")):
        verdict = json.loads(file.read_text(encoding="utf-8"))
        if "rank_correlation" not in verdict:
            continue
        words = [cell["verdict"] for cell in verdict["cells"]]
        mean = verdict["rank_correlation"]["mean"]
        numbers = [sum(word == each for word in words) for each in COLOURS]
        cells = [sum(numbers), numbers[0], numbers[1], numbers[2], "–" if mean is None else f"{mean:.2f}"]
        link = f'<a href="{escape(file.stem)}.html">{escape(verdict["title"])}</a>'
        small = " (small)" if verdict["scale"] == "small" else ""
        lines.append(f"<tr><th>{link}{small}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    body = f'<h1>Papers beside our runs</h1>\n<div class="wide"><table>{"".join(lines)}</table></div>'
    return html("papers beside our runs", body)
