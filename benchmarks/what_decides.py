"""The tables of docs/what-decides.md, from the folder of `undrift sweep what-decides`.

python benchmarks/what_decides.py FOLDER --json benchmarks/results/what-decides.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path

from undrift.jobs.course import commit
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
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("--json", type=Path, help="also write every run's scores there")
    asked = options.parse_args()
    runs: dict[Choice, Run] = {}
    for run in load([asked.folder]):
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
    if asked.json:
        named = [dict(zip(("method", "model", "weights", "rate"), choice, strict=True)) for choice in runs]
        each = [
            dict(zip(("best", "picked", "last_five", "validation"), scores(run), strict=True)) for run in runs.values()
        ]
        rows = [
            of | {name: round(value, 2) for name, value in one.items()} for of, one in zip(named, each, strict=True)
        ]
        asked.json.write_text(json.dumps({"commit": commit(), "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
