"""Survival of patients with breast cancer of six regions, from FLamby's tables of TCGA-BRCA.

ogier du Terrail et al.: FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare
Settings. NeurIPS 2022; the data are TCGA's. 39 inputs; a target is an event, 1 for a death, and its time in days. Training and
test samples are FLamby's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from undrift.core.errors import BadData
from undrift.data._tables import numbers, read_rows, table_folder
from undrift.data.dataset import Dataset

COLUMNS = 42  # the patient, 39 inputs, event and time
REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")


def load(root: Path | None) -> Dataset:
    """Site k becomes client k under the partition `sites`."""
    folder = table_folder(root, "brca", ("brca.csv", "train_test_split.csv"))
    file, split = folder / "brca.csv", folder / "train_test_split.csv"
    rows, folds = read_rows(file, COLUMNS)[1:], read_rows(split, 3)[1:]
    values = numbers(file, [row[1:] for row in rows])
    part = {patient: fold for patient, _, fold in folds}
    known = {f"{half}_{site}": (half == "test", site) for half in ("train", "test") for site in range(len(REGIONS))}
    for patient, fold in part.items():
        if fold not in known:
            raise BadData(f"{split}: the fold of {patient} is {fold!r}; expected train_0 to test_5")
    kept = np.array([row[0] in part for row in rows], bool)  # a few patients are in no fold
    if kept.sum() != len(part):
        raise BadData(
            f"{split} has {len(part)} patients, of whom {kept.sum()} are in {file.name}; expected all of them once"
        )
    values = values[kept]
    test, site = (np.array(each) for each in zip(*(known[part[row[0]]] for row in rows if row[0] in part), strict=True))
    x, y = values[:, :-2].astype(np.float32), values[:, -2:].astype(np.float32)
    if not np.isin(y[:, 0], (0, 1)).all():
        raise BadData(f"{file}: an event is neither 0 nor 1")
    return Dataset(
        "brca", x[~test], y[~test], x[test], y[test], classes=1, task="survival", sites=site[~test].astype(np.int64),
        test_sites=site[test].astype(np.int64), site_names=REGIONS,
    )  # fmt: skip
