"""Drawn patients of several hospitals: synthetic-patients(sites=4, task="binary", patients=40, inputs=13, shift=1.0).

A patient has `inputs` numbers and a risk that is linear in them. Hospitals differ in size, in the means of the inputs and in
how high risks are, all multiplied by `shift`. With task="binary" the label says whether the patient is ill; with
task="survival" the target is an event and a time. A third of each hospital's patients are test samples; `unseen` are all of
them together.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from undrift.core.errors import BadSetting
from undrift.data.dataset import Dataset

STREAM = 0x9A71


def load(
    root: Path | None,
    sites: int = 4,
    task: str = "binary",
    patients: int = 40,
    inputs: int = 13,
    shift: float = 1.0,
    seed: int = 0,
) -> Dataset:
    if sites < 2 or patients < 6 or inputs < 1 or task not in ("binary", "survival"):
        raise BadSetting(
            "synthetic-patients needs sites >= 2, patients >= 6, inputs >= 1 and a task binary or survival, not "
            f"{sites}, {patients}, {inputs} and {task!r}"
        )
    weight = np.random.Generator(np.random.PCG64([seed, STREAM])).normal(size=inputs) / np.sqrt(inputs)
    inputs_of, targets_of, tests = [], [], []
    for site in range(sites):
        random = np.random.Generator(np.random.PCG64([seed, STREAM, site]))  # adding a site changes no earlier one
        n = round(patients * np.exp(shift * random.uniform(-0.7, 0.7)))
        x = random.normal(size=(n, inputs)) + shift * random.normal(size=inputs)
        risk = 2 * (x - x.mean(0)) @ weight + shift * random.normal()
        if task == "binary":
            y = (random.random(n) < 1 / (1 + np.exp(-risk))).astype(np.float64)
        else:
            died, left = random.exponential(1000 * np.exp(-risk)), random.exponential(2000, n)
            y = np.stack([died <= left, np.minimum(died, left)], 1)
        inputs_of.append(x.astype(np.float32))
        targets_of.append(y.astype(np.float32))
        tests.append(np.arange(n) % 3 == 2)
    x, y, test = np.concatenate(inputs_of), np.concatenate(targets_of), np.concatenate(tests)
    site_of = np.repeat(np.arange(sites), [len(part) for part in tests])
    return Dataset(
        "synthetic-patients", x[~test], y[~test], x[test], y[test], classes=1, task=task, sites=site_of[~test],
        test_sites=site_of[test], site_names=tuple(f"hospital {k + 1}" for k in range(sites)), unseen=(x[test], y[test]),
    )  # fmt: skip
