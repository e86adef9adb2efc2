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
            return dict(json.loads(file.readline()))

    @functools.cached_property
    def last_with_sites(self) -> dict[str, Any] | None:
        return self.read(self.with_sites[-1]) if self.with_sites else None


def read_records(path: Path) -> Records:
    """The rounds of a file. A last line that is cut off is skipped: the run goes on, or was killed."""
    starts = array("q")
    with_sites: list[int] = []
    columns: dict[str, array[float]] = {}
    start, broken = 0, False
    try:
        with path.open("rb") as file:
            for line in file:
                if broken:
                    raise BadRunFolder(f"{path} is damaged in line {len(starts) + 1}: not the JSON of a round")
                record = parse(line)
                if record is None:
                    broken = True  # which only the last line may be
                    continue
                if isinstance(record.get("sites"), dict):
                    with_sites.append(len(starts))
                append(columns, record, len(starts))
                starts.append(start)
                start += len(line)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise BadRunFolder(f"cannot read {path}: {error.strerror}") from error
    return Records(path, starts, {key: finished(column, len(starts)) for key, column in columns.items()}, with_sites)


def parse(line: bytes) -> dict[str, Any] | None:
    """The record in a line, with a whole number as its round; None if there is none."""
    try:
        record = json.loads(line)
        return record | {"round": int(record["round"])} if isinstance(record, dict) else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


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
