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


def page_of(content: dict[str, Any]) -> str:
    """The page that shows a document. It loads nothing, and runs no script but those of this package."""
    styles, scripts = "\n".join(map(_file, STYLES)), [_file(name) for name in SCRIPTS]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(styles)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>undrift: {escape(content['title'])}</title>\n<!-- Charts: {UPLOT} -->\n<style>{styles}</style>"
    )
    without = (
        "This page needs JavaScript, which it brings along. 'undrift report' prints the tables in a terminal, too."
    )
    body = (
        f'<main id="report"><noscript><p>{escape(without)}</p></noscript></main>\n'
        f'<script type="application/json" id="document">{as_script(content)}</script>\n'
        + "\n".join(f"<script>{script}</script>" for script in scripts)
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


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
