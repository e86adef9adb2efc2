"""The papers behind the methods: the BibTeX entries of each algorithm, method or rule."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from undrift.core.errors import UnknownName

BIBLIOGRAPHY = Path(__file__).parents[1] / "algorithms" / "papers.bib"


@functools.cache
def bibliography() -> dict[str, list[str]]:
    """The BibTeX entries by name; the field `undrift` of an entry lists its names."""
    entries: dict[str, list[str]] = {}
    for entry in re.findall(r"^@.*?^}", BIBLIOGRAPHY.read_text(), re.DOTALL | re.MULTILINE):
        names = re.search(r"^ *undrift *= *{(.*?)},?\n", entry, re.DOTALL | re.MULTILINE)
        if names is not None:
            for name in names[1].replace(",", " ").split():
                entries.setdefault(name, []).append(entry.replace(names[0], ""))
    return entries


def papers_of(name: str) -> list[str]:
    """The entries of an algorithm, of LOCAL+SERVER, of a method of `dataparallel` or `pipe`, or of a rule, without repetition.

    >>> papers_of("gradma-s")[0].splitlines()[0]
    '@inproceedings{luo2023gradma,'
    """
    for part in name.split("+"):
        if part not in bibliography():
            raise UnknownName("algorithm, method or rule", part, bibliography())
    return list(dict.fromkeys(entry for part in name.split("+") for entry in bibliography()[part]))
