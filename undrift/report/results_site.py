"""A site of results: a page for each paper and one that leads to them, made from the verdicts of `undrift reproduce` alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from undrift.core.errors import BadData
from undrift.core.files import make_folder, replacing, writing
from undrift.core.papers import bibliography
from undrift.report.suite_page import html, overview, section, verdicts_in

WITHOUT = "other"  # the page of tables of no paper that is known


def write_site(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write index.html and PAPER.html for every verdict in these folders; return the files."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for folder in folders:
        for _, verdict in verdicts_in(folder):
            named = str(verdict.get("paper"))
            found[named if named in bibliography() else WITHOUT].append(verdict)
    if not found:
        raise BadData(f"no verdicts of undrift reproduce in {', '.join(map(str, folders))}")
    pages = {f"{paper}.html": page_of(paper, verdicts) for paper, verdicts in sorted(found.items())}
    files = []
    with writing(out):
        make_folder(out)
        for name, text in {"index.html": front(found), **pages}.items():
            with replacing(out / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
            files.append(out / name)
    return files


def front(found: dict[str, list[dict[str, Any]]]) -> str:
    """The page that leads to the others."""
    parts = ["<h1>Papers beside our runs</h1>", "<p>Every colour, correlation and claim is computed from the runs.</p>"]
    for paper, verdicts in sorted(found.items()):
        linked = ((f"{paper}.html#{verdict['suite']}", verdict) for verdict in verdicts)
        link = f'<a href="{escape(paper)}.html">{escape(title_of(paper))}</a>'
        parts.append(f"<h2>{link}</h2>\n{overview(linked)}")
    return html("papers beside our runs", "\n".join(parts))


def page_of(paper: str, verdicts: Sequence[dict[str, Any]]) -> str:
    """All tables of a paper."""
    links = " · ".join(f'<a href="#{escape(v["suite"])}">{escape(v["title"])}</a>' for v in verdicts)
    parts = [f"<h1>{escape(title_of(paper))}</h1>", f'<nav><a href="index.html">All papers</a> · {links}</nav>']
    for verdict in verdicts:
        parts.append(f'<h2 id="{escape(verdict["suite"])}">{escape(verdict["title"])}</h2>\n{section(verdict)}')
    return html(title_of(paper), "\n".join(parts))


def title_of(paper: str) -> str:
    """
    >>> title_of("domo"), title_of("other")
    ('Coordinating Momenta for Cross-silo Federated Learning', 'Other tables')
    """
    entries = bibliography().get(paper, [""])
    title = re.search(r"^ *title *= *{(.*?)},?$", entries[0], re.MULTILINE)
    return "Other tables" if title is None else re.sub(r"[{}]", "", title[1])
