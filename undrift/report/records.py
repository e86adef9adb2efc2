"""The rounds of a run by column: a million of them as dicts would take gigabytes."""

from __future__ import annotations

import functools
import json
import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadRunFolder
from undrift.core.seals import Place, read_placed_lines

Floats = NDArray[np.float64]


class Records:
    """The lines of rounds.jsonl. Numbers are columns [n]; a whole line is read again from the file where it is needed."""

    def __init__(self, path: Path, starts: array[int], columns: dict[str, Floats], with_sites: list[int]) -> None:
        self.path, self.columns = path, columns
        self.starts = starts  # [n] where each line begins in the file
        self.with_sites = with_sites  # the places, counted from 0, of rounds with a table of sites

    def __len__(self) -> int:
        return len(self.starts)

    def column(self, key: str) -> Floats:
        """[n] the numbers under a key; NaN where a round has no finite one."""
        return self.columns[key] if key in self.columns else np.full(len(self), np.nan)

    def values(self, key: str) -> list[float]:
        """The finite numbers under a key."""
        column = self.column(key)
        values: list[float] = column[~np.isnan(column)].tolist()
        return values

    def amounts(self, key: str) -> Floats:
        """[n] the numbers under a key; 0 where a round has none."""
        return np.nan_to_num(self.column(key))

    def read(self, place: int) -> dict[str, Any]:
        """A whole round, counted from 0."""
        with self.path.open("rb") as file:
            file.seek(self.starts[place])
            record = dict(json.loads(file.readline()))
        del record["check"]
        return record

    @functools.cached_property
    def last_with_sites(self) -> dict[str, Any] | None:
        return self.read(self.with_sites[-1]) if self.with_sites else None


def read_records(path: Path, run: str, least: Place | None = None) -> Records:
    """The rounds of that run in a file, which must reach `least`."""
    starts = array("q")
    with_sites: list[int] = []
    columns: dict[str, array[float]] = {}
    for start, record in read_placed_lines(path, run, least):
        if type(record.get("round")) is not int:
            raise BadRunFolder(f"{path} is damaged in line {len(starts) + 1}: it names no round")
        if isinstance(record.get("sites"), dict):
            with_sites.append(len(starts))
        append(columns, record, len(starts))
        starts.append(start)
    return Records(path, starts, {key: finished(column, len(starts)) for key, column in columns.items()}, with_sites)


def append(columns: dict[str, array[float]], record: dict[str, Any], place: int) -> None:
    """Add the numbers of a record, which is the one at `place`, to their columns."""
    for key, value in record.items():
        if type(value) is float or (type(value) is int and abs(value) < 1e300):
            column = columns.setdefault(key, array("d"))
            if len(column) < place:
                column.extend([math.nan] * (place - len(column)))
            column.append(value)


def finished(column: array[float], length: int) -> Floats:
    """A column of full length, with NaN for what is not finite."""
    whole = np.full(length, np.nan)
    whole[: len(column)] = column
    whole[~np.isfinite(whole)] = np.nan
    return whole
