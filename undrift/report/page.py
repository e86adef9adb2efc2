"""The report as one self-contained HTML file: a JSON document (document.py) and the scripts in web/ that show it."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
from html import escape
from pathlib import Path
from typing import Any

from undrift.core.errors import UndriftError
from undrift.report.document import Defaults, document
from undrift.report.load import Run, load, sweep_target

WEB = Path(__file__).parent / "web"
STYLES = ("uplot.min.css", "report.css")
SCRIPTS = (
    *("uplot.min.js", "elements.js", "lines.js", "chart.js", "grid.js", "table.js", "pictures.js"),
    *("view.js", "section.js", "report.js"),
)
SAME = "; connect-src 'self'"
LIVE = ("live.js", *SCRIPTS)  # scripts of the page that undrift watch serves
UPLOT = "uPlot 1.6.32, (c) Leon Sorokin, MIT licence"  # `make uplot` refreshes it; see web/uplot.LICENSE


def write(paths: list[Path], out: Path, target: float | None = None, defaults: Defaults | None = None) -> list[Run]:
    """Write the report on the runs in `paths`, and return them; the default target is that of a sweep.toml.

    Settings that equal `defaults` are not shown.
    """
    runs = load(paths)
    target = sweep_target(paths) if target is None else target
    page = html(runs, target, defaults).encode(errors="backslashreplace")  # a folder's name may hold what is no text
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(page)
        os.replace(temporary, out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UndriftError(f"cannot write {out}: {error.strerror}") from error
    return runs


def html(runs: list[Run], target: float | None, defaults: Defaults | None = None) -> str:
    return page_of(document(runs, target, defaults))


def page_of(content: dict[str, Any], live: bool = False) -> str:
    """The page that shows a document.

    It runs no script but those of this package, and loads nothing; a `live` one asks for new documents.
    """
    styles, scripts = "\n".join(map(_file, STYLES)), [_file(name) for name in (LIVE if live else SCRIPTS)]
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy_of(live)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>undrift: {escape(content['title'])}</title>\n<!-- Charts: {UPLOT} -->\n<style>{styles}</style>"
    )
    body = (
        f'<main id="report">{plain(content)}</main>\n'
        f'<script type="application/json" id="document">{as_script(content)}</script>\n'
        + "\n".join(f"<script>{script}</script>" for script in scripts)
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


@functools.cache
def policy_of(live: bool) -> str:
    """What the page may do: run these scripts, and if it is live, ask where it came from for documents."""
    styles, scripts = "\n".join(map(_file, STYLES)), [_file(name) for name in (LIVE if live else SCRIPTS)]
    return (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(styles)}; img-src data: blob:; "
        f"base-uri 'none'; form-action 'none'{SAME if live else ''}"
    )


def plain(content: dict[str, Any]) -> str:
    """Verdicts and tables as HTML: all there is where scripts do not run; else they put the whole report in its place."""
    parts = [f"<h1>{escape(content['title'])}</h1>", f'<p class="faint">{escape(content["facts"])}</p>']
    parts += [f'<p class="note">{escape(note)}</p>' for note in content["notes"]]
    tables = [content["live"]["table"]] if "live" in content else []
    parts += [plain_table(table) for table in (*tables, *content["tables"])]
    for section in content["sections"]:
        parts += [f"<h2>{escape(section['title'])}</h2>", f'<p class="verdict">{escape(section["verdict"])}</p>']
        parts += [plain_table(table) for table in (section["table"], *section["tables"])]
    parts.append('<p class="faint">With JavaScript, which this page brings along, there are curves, too.</p>')
    return "\n".join(parts)


def plain_table(table: dict[str, Any]) -> str:
    """A table of the document.

    >>> plain_table({"title": "<T>", "columns": [{"name": "a&b", "better": ""}], "rows": [[["<i>"]]], "legend": ""}).count("&lt;")
    3
    """
    head = "".join(f'<th scope="col">{escape(column["name"])}</th>' for column in table["columns"])
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name[0]))}</th>{"".join(f"<td>{escape(str(cell[0]))}</td>" for cell in cells)}</tr>'
        for name, *cells in table["rows"]
    )
    legend = f'<p class="faint">{escape(table["legend"])}</p>' if table["legend"] else ""
    return (
        f'<div class="card"><h3>{escape(table["title"])}</h3><div class="wide" tabindex="0" role="group" '
        f'aria-label="{escape("Table: " + table["title"])}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{legend}</div>"
    )


def as_script(content: Any) -> str:
    """JSON in plain ASCII that nothing in it can end: no tag and no comment begins in it.

    >>> as_script({"a": "</script><!--"})
    '{"a":"\\\\u003c/script\\\\u003e\\\\u003c!--"}'
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@functools.cache
def _file(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
