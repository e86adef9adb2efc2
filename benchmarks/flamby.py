"""FedAvg and SCAFFOLD on the four hospitals from FLamby's own initial models, beside its published accuracy seed by seed.

    UNDRIFT_DATA=... python benchmarks/flamby.py

FLamby draws a model by torch.manual_seed(42), ..., 46. Its SCAFFOLD weighs control variates by the hospitals' sizes, as it weighs
models; the paper's (and undrift's) c is their plain mean. `BySize` is that variant, in three lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import undrift
from undrift.algorithms.base import Cohort
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.scaffold import Scaffold
from undrift.core.vec import mean

SEEDS = range(42, 47)
PLACES = ("all test samples", "Cleveland", "Hungary", "Switzerland", "Long Beach")
TESTED = (254, 104, 89, 16, 45)  # patients
# From results_benchmark_fed_heart_disease/heart_seed42.csv to heart_seed46.csv.
PUBLISHED = {
    "FedAvg": (
        (0.752, 0.7638, 0.7638, 0.7008, 0.7598),
        (0.7596, 0.7212, 0.7404, 0.7308, 0.7019),
        (0.6966, 0.7416, 0.7528, 0.6742, 0.7303),
        (0.6875, 0.75, 0.5, 0.75, 0.5625),
        (0.6222, 0.6667, 0.5778, 0.6222, 0.7111),
    ),
    "SCAFFOLD": (
        (0.752, 0.7638, 0.7638, 0.7008, 0.7598),
        (0.75, 0.7212, 0.7404, 0.7212, 0.7019),
        (0.6966, 0.7416, 0.7528, 0.6742, 0.7303),
        (0.6875, 0.75, 0.5, 0.75, 0.5625),
        (0.6222, 0.6667, 0.5778, 0.6222, 0.7111),
    ),
}


@dataclass(frozen=True)
class BySize(Scaffold):
    """SCAFFOLD whose c is the mean of the c_i by size."""

    def gather(self, companion: Any, up: Any, cohort: Cohort) -> tuple[Tensor, Any]:
        c = companion.c + cohort.size / cohort.total * mean(up.dc, cohort.weight)
        return mean(up.d, cohort.weight), self.Companion(c)


def scores(algorithm: Any, seed: int) -> list[float]:
    torch.manual_seed(seed)
    linear = nn.Linear(13, 1)
    result = undrift.run(
        algorithm=algorithm, model=nn.Sequential(nn.Flatten(), linear), dataset="heart", partition="sites", cohort=4,
        steps=100, batch=4, rounds=15, eval_every=15, weights="size", seed=seed,
    )  # fmt: skip
    sites = result.records[-1]["sites"]
    return [sites["unseen"]["global"]["accuracy"][0], *sites["test"]["global"]["accuracy"]]


def main() -> None:
    for published, algorithm in (("FedAvg", FedAvg), ("SCAFFOLD", BySize), ("SCAFFOLD", Scaffold)):
        ours = [scores(algorithm(lr=0.001), seed) for seed in SEEDS]
        for k, place in enumerate(PLACES):
            apart = [round(abs(a[k] - b) * TESTED[k]) for a, b in zip(ours, PUBLISHED[published][k], strict=True)]
            numbers = " ".join(f"{row[k]:.4f}" for row in ours)
            print(f"{algorithm.__name__:9} {place:17} {numbers}   patients apart from FLamby's {published}: {apart}")


if __name__ == "__main__":
    main()
