"""Heart disease of patients of four hospitals, from the UCI's files: heart(train="site").

Janosi, Steinbrunn, Pfisterer, Detrano: Heart Disease. UCI Machine Learning Repository, 1988 (CC BY 4.0), as FLamby prepares it
(ogier du Terrail et al., NeurIPS 2022): 13 inputs, without three columns that are mostly missing; the label is disease or none;
training and test samples are FLamby's. Each hospital's inputs are normalised by its own training samples, or for training by
those of all with train="pooled". `unseen` are all test samples, normalised by the training samples of all.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadData, BadSetting
from undrift.data._tables import numbers, read_rows, table_folder
from undrift.data.dataset import Dataset

HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Hungary", "switzerland": "Switzerland", "va": "Long Beach"}
COLUMNS = 14
USED = (*range(10), 13)  # the others are mostly missing
CHOICES = {2: (2, 3, 4), 6: (1, 2)}  # columns of which each value but the first is an input of its own
# The numbers of the test samples among a hospital's complete rows.
TESTED = {
    "cleveland": """
        5 13 16 24 26 34 40 42 43 46 47 48 49 53 55 56 59 60 61 63 64 65 69 72 76 78 86 87 88 90 91 93 95 101 103 104 105
        113 116 123 128 133 134 135 136 137 151 152 154 156 157 160 163 165 170 171 179 180 188 190 192 197 201 202 203 211
        213 215 216 218 221 223 224 227 228 233 236 239 243 246 249 250 256 257 258 259 260 264 265 266 270 283 284 285 288
        289 290 292 294 295 296 297 298 301""",
    "hungarian": """
        3 7 16 21 25 26 27 28 29 32 34 35 36 41 47 48 49 51 53 58 60 61 64 68 73 74 75 84 85 87 89 91 95 104 107 110 111 112
        117 118 120 123 127 128 131 132 136 137 139 143 145 149 155 158 159 161 164 169 172 179 182 186 188 189 190 191 193
        194 196 199 202 203 204 206 213 219 223 224 234 236 239 243 248 250 251 252 254 258 259""",
    "switzerland": "5 6 7 8 13 14 18 19 20 22 24 28 29 32 40 41",
    "va": """
        1 5 6 9 12 26 29 33 35 36 38 39 41 42 45 47 54 60 61 62 64 66 67 68 73 75 76 78 79 85 88 92 97 98 110 111 112 114 117
        118 119 121 125 127 128""",
}
COMPLETE = {"cleveland": 303, "hungarian": 261, "switzerland": 46, "va": 130}
SMALLEST = 1e-9  # is added to a deviation


def load(root: Path | None, train: str = "site") -> Dataset:
    """Site k becomes client k under the partition `sites`."""
    if train not in ("site", "pooled"):
        raise BadSetting(f"train must be site or pooled, not {train!r}")
    files = tuple(f"processed.{name}.data" for name in HOSPITALS)
    folder = table_folder(root, "heart", files)
    tables = [read(folder / file, name) for file, name in zip(files, HOSPITALS, strict=True)]
    tested = [
        np.isin(np.arange(len(y)), np.array(TESTED[n].split(), int))
        for n, (_, y) in zip(HOSPITALS, tables, strict=True)
    ]
    site = np.repeat(np.arange(len(tables)), [len(y) for _, y in tables])
    x, y, test = np.concatenate([x for x, _ in tables]), np.concatenate([y for _, y in tables]), np.concatenate(tested)
    own = np.concatenate([normal(x, x[~test]) for (x, _), test in zip(tables, tested, strict=True)])
    pooled = normal(x, x[~test])
    trained = own if train == "site" else pooled
    return Dataset(
        "heart", trained[~test], y[~test], own[test], y[test], classes=1, task="binary", sites=site[~test],
        test_sites=site[test], site_names=tuple(HOSPITALS.values()), unseen=(pooled[test], y[test]),
    )  # fmt: skip


def read(file: Path, name: str) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """A hospital's complete inputs [n, 13] and labels [n]."""
    rows = [[cell.strip() for cell in row] for row in read_rows(file, COLUMNS)]
    if rows and rows[0][0] == "age":
        rows = rows[1:]
    kept = [[row[c] for c in USED] for row in rows if not {"?", ""}.intersection(row[c] for c in USED)]
    if len(kept) != COMPLETE[name]:
        raise BadData(
            f"{file} has {len(kept)} complete rows instead of {COMPLETE[name]}; its split would be another one"
        )
    values = numbers(file, kept)
    plain = [c for c in range(10) if c not in CHOICES]
    chosen = [values[:, c] == value for c, known in CHOICES.items() for value in known]
    x = np.concatenate([values[:, plain], np.stack(chosen, 1)], 1)
    return x, (values[:, -1] > 0).astype(np.float32)


def normal(x: NDArray[np.float64], train: NDArray[np.float64]) -> NDArray[np.float32]:
    """x less the mean of the training samples, over their deviation."""
    scaled: NDArray[np.float32] = ((x - train.mean(0)) / (train.std(0, ddof=1) + SMALLEST)).astype(np.float32)
    return scaled
