"""Tables of patients of several hospitals, from CSV files, as data sets of sites."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadData, MissingData
from undrift.data._formats import read_text

LARGEST = 1e30  # the largest number in a table


def table_folder(root: Path | None, name: str, files: tuple[str, ...]) -> Path:
    """The folder NAME of the data folder, which has all these files."""
    folder = None if root is None else root / name
    missing = [file for file in files if folder is None or not (folder / file).is_file()]
    if folder is None or missing:
        where = f"; the data folder is {root}" if root is not None else ""
        raise MissingData(
            f"{name} was not found{where}; set UNDRIFT_DATA to a folder with a folder {name}/ in it that holds {', '.join(files)}"
        )
    return folder


def read_rows(file: Path, columns: int) -> list[list[str]]:
    """The lines of a CSV file, split at commas, all with so many columns."""
    try:
        rows = [row for row in csv.reader(read_text(file).splitlines()) if row]
    except csv.Error as error:
        raise BadData(f"{file}: cannot be read as a table ({error})") from error
    for n, row in enumerate(rows, 1):
        if len(row) != columns:
            raise BadData(f"{file}: row {n} has {len(row)} columns instead of {columns}")
    return rows


def numbers(file: Path, rows: list[list[str]]) -> NDArray[np.float64]:
    """[n, columns]"""
    try:
        values = np.array(rows, dtype=np.float64)
    except ValueError as error:
        raise BadData(f"{file}: {error}; expected numbers") from error
    if not (np.abs(values) < LARGEST).all():  # NaN compares false
        raise BadData(f"{file}: a number is missing, not finite or too large")
    return values
