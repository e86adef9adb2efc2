"""The papers behind the methods: entries of `algorithms/papers.bib`, by the names of the files that they belong to."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from undrift.core.errors import UnknownName

BIBLIOGRAPHY = Path(__file__).parents[1] / "algorithms" / "papers.bib"


@functools.cache
def bibliography() -> dict[str, list[str]]:
    """The BibTeX entries of each name; which names those are, an entry says in its field `undrift`."""
    found: dict[str, list[str]] = {}
    for entry in re.findall(r"^@.*?^}", BIBLIOGRAPHY.read_text(), re.DOTALL | re.MULTILINE):
        ours = re.search(r"^ *undrift *= *{(.*?)},?\n", entry, re.DOTALL | re.MULTILINE)
        if ours is not None:
            for name in ours[1].replace(",", " ").split():
                found.setdefault(name, []).append(entry.replace(ours[0], ""))
    return found


def papers_of(name: str) -> list[str]:
    """The entries of an algorithm, of LOCAL+SERVER or of a data-parallel method, each of them once.

    >>> papers_of("gradma-s")[0].splitlines()[0]
    '@inproceedings{luo2023gradma,'
    """
    for part in name.split("+"):
        if part not in bibliography():
            raise UnknownName("algorithm or method", part, bibliography())
    return list(dict.fromkeys(entry for part in name.split("+") for entry in bibliography()[part]))
