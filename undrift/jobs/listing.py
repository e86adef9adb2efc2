"""What `undrift list` shows of each kind; nothing is imported for it (`core/outline.py`)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from undrift.algorithms.checks import looks_at_single_uploads
from undrift.core.errors import UnknownName
from undrift.core.names import algorithms_of, describe, names, outline_of
from undrift.core.outline import outline

KINDS = ("algorithms", "methods", "datasets", "models", "partitions", "trackers")


def entries_of(kind: str) -> list[dict[str, Any]]:
    """The names of a kind and what they are, as `undrift list KIND --json` prints them."""
    if kind not in KINDS:
        raise UnknownName("kind of list", kind, KINDS)
    if kind == "methods":
        return list_documented(outline("undrift.dataparallel.methods").FILES)
    if kind == "partitions":
        return list_documented(outline("undrift.data.partition").PARTITIONS)
    entries: list[dict[str, Any]] = [{"name": name, "about": describe(kind, name)} for name in names(kind)]
    for entry in entries if kind == "algorithms" else ():
        (alg,) = algorithms_of(outline_of(kind, entry["name"]))
        entry["server_needs"] = "single updates" if looks_at_single_uploads(alg) else "the sum of the updates"
        entry["fields"] = {f.name: f.default for f in dataclasses.fields(alg)}
    return entries


def list_documented(objects: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Objects by name, with the first line of their docstrings."""
    return [{"name": name, "about": (inspect.getdoc(o) or "").splitlines()[0]} for name, o in objects.items()]
