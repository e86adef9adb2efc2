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


CLASSES = "class_accuracies"
READ_AGAIN = {"sites": dict, "client_accuracies": list}  # kept in the file; of each the last one is looked at


class Records:
    """The lines of rounds.jsonl. Numbers are columns [n]; a whole line is read again from the file where it is needed."""

    def __init__(
        self, path: Path, starts: array[int], columns: dict[str, Floats], last_with: dict[str, int], classes: Classes
    ) -> None:
        self.path, self.columns, self.classes = path, columns, classes
        self.starts = starts  # [n] where each line begins in the file
        self.last_with = last_with  # the place, counted from 0, of the last round with each of READ_AGAIN

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
        return self.read(self.last_with["sites"]) if "sites" in self.last_with else None

    @functools.cached_property
    def client_accuracies(self) -> list[float]:
        """The quantiles of the clients' accuracies that were recorded last; empty if there are none."""
        if "client_accuracies" not in self.last_with:
            return []
        values = self.read(self.last_with["client_accuracies"])["client_accuracies"]
        return values if len(values) > 1 and all(type(value) in (int, float) for value in values) else []


class Classes:
    """The accuracy of every class over the evaluated rounds, four bytes a number."""

    def __init__(self) -> None:
        self.places = array("q")  # [n] of the rounds, counted from 0
        self.flat = array("f")  # [n * classes]
        self.count = 0  # number of classes

    def append(self, values: Any, place: int) -> None:
        """Add a round's accuracies; None is NaN. What has another form is left out."""
        numbers = [math.nan if value is None else value for value in values] if isinstance(values, list) else []
        if not numbers or len(numbers) != (self.count or len(numbers)):
            return
        if all(type(value) in (int, float) and not abs(value) > 1 for value in numbers):
            self.count = len(numbers)
            self.places.append(place)
            self.flat.extend(numbers)

    def table(self) -> Floats:
        """[n, classes]"""
        return np.array(self.flat, dtype=np.float64).reshape(len(self.places), self.count)


def read_records(path: Path, run: str, least: Place | None = None) -> Records:
    """The rounds of that run in a file, which must reach `least`."""
    starts = array("q")
    last_with: dict[str, int] = {}
    classes = Classes()
    columns: dict[str, array[float]] = {}
    for start, record in read_placed_lines(path, run, least):
        if type(record.get("round")) is not int:
            raise BadRunFolder(f"{path} is damaged in line {len(starts) + 1}: it names no round")
        for key, kind in READ_AGAIN.items():
            if isinstance(record.get(key), kind):
                last_with[key] = len(starts)
        if CLASSES in record:
            classes.append(record[CLASSES], len(starts))
        append(columns, record, len(starts))
        starts.append(start)
    whole = {key: complete(column, len(starts)) for key, column in columns.items()}
    return Records(path, starts, whole, last_with, classes)


def append(columns: dict[str, array[float]], record: dict[str, Any], place: int) -> None:
    """Add the numbers of a record, which is the one at `place`, to their columns."""
    for key, value in record.items():
        if type(value) is float or (type(value) is int and abs(value) < 1e300):
            column = columns.setdefault(key, array("d"))
            if len(column) < place:
                column.extend([math.nan] * (place - len(column)))
            column.append(value)


def complete(column: array[float], length: int) -> Floats:
    """A column of full length, with NaN for what is not finite."""
    whole = np.full(length, np.nan)
    whole[: len(column)] = column
    whole[~np.isfinite(whole)] = np.nan
    return whole
