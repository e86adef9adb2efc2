"""Finds the federation that `undrift sweep demo` shows: one in which FedAvg forgets, and others do not.

    python benchmarks/demo_search.py [--json FILE]

For every federation of the list each method has the same four rates. Its rate is the one with which it holds its accuracy
best: the mean of the accuracy on validation samples over the second half of the rounds, and over three seeds that the demo
does not have.
Only then are test samples looked at: a federation is worth what the worst of SCAFFOLD, GradMA-S and the best other method
forgets less than FedAvg, in standard errors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from undrift.jobs.config import RunConfig
from undrift.jobs.packs import run_packed
from undrift.jobs.sweep import resolve_federated

CLIENTS, COHORTS, STEPS = (40, 100), (2, 5), (10,)
METHODS = ("fedavg", "scaffold", "gradma-s", "feddyn", "fedacg", "mifa")
RATES = (0.02, 0.05, 0.1, 0.2)
SEEDS = (100, 101, 102)
COMMON = {
    "dataset": "digits", "model": "mlp", "partition": "similarity:0", "batch": 16, "rounds": 120, "eval_every": 4,
    "val_fraction": 0.1, "checkpoint_every": 10**6, "device": "cpu",
}  # fmt: skip
Records = list[dict[str, Any]]


def runs(method: str, federation: Mapping[str, int]) -> dict[float, list[Records]]:
    """The records of a method at every rate and seed; all are one program."""
    given: list[RunConfig] = [
        resolve_federated({**COMMON, **federation, "algorithm": method, "seed": seed, "set": {"lr": rate}}, {})
        for rate, seed in itertools.product(RATES, SEEDS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / str(n) for n in range(len(given))]
        found = run_packed(given, folders, [lambda record, rounds: None] * len(given), leave_models=False)
    return {rate: found[n * len(SEEDS) : (n + 1) * len(SEEDS)] for n, rate in enumerate(RATES)}


def second_half(records: Records, name: str) -> float | None:
    """The mean of a number over the second half of the rounds; None for a run that did not get there."""
    known = [r[name] for r in records if 2 * r["round"] > COMMON["rounds"] and r.get(name) is not None]
    whole = records[-1]["round"] == COMMON["rounds"] and all(math.isfinite(value) for value in known)
    return statistics.fmean(known) if known and whole else None


def over_seeds(every: Sequence[Records], name: str) -> tuple[float, float] | None:
    """Mean and standard deviation; None if a seed has none."""
    values = [value for records in every if (value := second_half(records, name)) is not None]
    return (statistics.fmean(values), statistics.stdev(values)) if len(values) == len(every) else None


def pick(method: str, federation: Mapping[str, int]) -> dict[str, Any]:
    """The rate with which a method holds its accuracy on validation samples, and what it then does on test samples."""
    found = runs(method, federation)
    held = {rate: over_seeds(every, "val_accuracy") for rate, every in found.items()}
    rate = max(RATES, key=lambda each: held[each][0] if held[each] else -1.0)  # type: ignore[index]
    scores = {name: over_seeds(found[rate], name) for name in ("accuracy", "forgetting")}
    return {
        "method": method,
        "lr": rate,
        **{n: None if s is None else [round(v, 4) for v in s] for n, s in scores.items()},
    }


def errors(worse: Sequence[float], better: Sequence[float]) -> float:
    """How much less the second forgets, in standard errors of the difference."""
    error = math.sqrt((worse[1] ** 2 + better[1] ** 2) / len(SEEDS))
    return (worse[0] - better[0]) / max(error, 1e-9)


def worth(picked: Sequence[Mapping[str, Any]]) -> float:
    """The least of three gaps to FedAvg: SCAFFOLD's, GradMA-S's, and that of the best other method."""
    forgets = {each["method"]: each["forgetting"] for each in picked}
    if not all(forgets[name] for name in ("fedavg", "scaffold", "gradma-s")):
        return -math.inf
    gaps = {n: errors(forgets["fedavg"], f) for n, f in forgets.items() if f and n != "fedavg"}
    others = [gap for name, gap in gaps.items() if name not in ("scaffold", "gradma-s")]
    return min(gaps["scaffold"], gaps["gradma-s"], max(others, default=-math.inf))


def main() -> None:
    arguments = argparse.ArgumentParser(description="find the demo's federation")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    torch.set_num_threads(1)  # the vectors are short
    tried = []
    for clients, cohort, steps in itertools.product(CLIENTS, COHORTS, STEPS):
        federation, began = {"clients": clients, "cohort": cohort, "steps": steps}, time.process_time()
        picked = [pick(method, federation) for method in METHODS]
        tried.append({**federation, "worth": round(worth(picked), 2), "picked": picked})
        print(
            f"{federation}: {tried[-1]['worth']:.1f} standard errors, {time.process_time() - began:.0f} s of processor time"
        )
        for each in picked:
            print("   ", each, flush=True)
        if given.json:
            about = {"command": "python benchmarks/demo_search.py", "common": COMMON, "rates": RATES, "seeds": SEEDS}
            given.json.write_text(json.dumps(about | {"tried": tried}, indent=1) + "\n")
    print("best:", max(tried, key=lambda each: each["worth"]))


if __name__ == "__main__":
    main()
