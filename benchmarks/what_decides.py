"""The tables of docs/what-decides.md, from the folder of `undrift sweep what-decides`.

python benchmarks/what_decides.py FOLDER
"""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path

from undrift.report.load import Run, load

Choice = tuple[str, str, str, float]  # method, model, weights, rate
NORMS = {"gradma-nn(norm=none)": "none", "gradma-nn": "BatchNorm"}
LAST = 5  # scored rounds whose mean is taken


def scores(run: Run) -> tuple[float, float, float, float]:
    """Per cent: the best on test samples, that of the round picked on validation samples, the mean of the last five, the best on
    validation samples.
    """
    test, validation = run.records.values("accuracy"), run.records.values("val_accuracy")
    at_best = test[validation.index(max(validation))]
    found = max(test), at_best, statistics.fmean(test[-LAST:]), max(validation)
    best, chosen, last, held = (100 * value for value in found)
    return best, chosen, last, held


def main() -> None:
    runs: dict[Choice, Run] = {}
    for run in load([Path(sys.argv[1])]):
        given = run.settings
        runs[given["algorithm"], given["model"], given["weights"], given["lr"]] = run
    rates = sorted({choice[3] for choice in runs})
    print("| normalisation | weights | method | " + " | ".join(f"rate {rate:g}" for rate in rates), end="")
    print(" | picked | best round | round picked on validation | mean of the last five |")
    print("| --- " * (len(rates) + 7) + "|")
    methods = dict.fromkeys(choice[0] for choice in runs)
    for model, weights, method in itertools.product(NORMS, ("size", "uniform"), methods):
        found = {
            rate: scores(runs[method, model, weights, rate]) for rate in rates if (method, model, weights, rate) in runs
        }
        if not found:
            continue
        picked = max(found, key=lambda rate: found[rate][3])
        best, chosen, last, _ = found[picked]
        every = " | ".join(f"{found[rate][0]:.1f}" if rate in found else "–" for rate in rates)
        print(
            f"| {NORMS[model]} | {weights} | {method} | {every} | {picked:g} | {best:.1f} | {chosen:.1f} | {last:.1f} |"
        )


if __name__ == "__main__":
    main()
