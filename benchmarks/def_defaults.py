"""Whether DEF's defaults learn: test losses after 400 steps beside SGD and AdamW, a gpt on Shakespeare and a network on CIFAR-10.

    UNDRIFT_DATA=... python benchmarks/def_defaults.py --json def-defaults.json [--only gpt]
    python benchmarks/def_defaults.py --json def-defaults.json --table

Simulated workers, one seed, a constant rate, no warm-up. All methods of a task have the rate that SGD has, the better of 0.1 and
0.2 (gpt), of 0.05 and 0.1 (CIFAR-10); those with AdamW have its usual 0.003. Runs that are in the file are not done again. DEF is
tested at y.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from undrift.dataparallel.command import run_parallel

STEPS = 400
TASKS: dict[str, dict[str, Any]] = {
    "gpt, 2 workers": {
        "dataset": "shakespeare(roles=20,length=64)", "model": "gpt(depth=2,width=64,heads=4)", "workers": 2, "batch": 8,
        "lr": 0.1,
    },
    "CIFAR-10, 4 workers": {"dataset": "cifar10", "model": "small-cnn", "workers": 4, "batch": 16, "lr": 0.05},
    "CIFAR-10, 16 workers": {"dataset": "cifar10", "model": "small-cnn", "workers": 16, "batch": 4, "lr": 0.05},
}  # fmt: skip
ADAM = {"lr": 0.003, "weight_decay": 0.01}
METHODS: dict[str, dict[str, Any]] = {
    "SGD": {"method": "sgd"},
    "DEF": {"method": "def"},
    "DEF, rbgs": {"method": "def", "compressor": "rbgs"},
    "DEF, rbgs, λ = 0.3": {"method": "def", "compressor": "rbgs", "lam": "0.3"},
    "DEF, topk": {"method": "def", "compressor": "topk"},
    "AdamW": {"method": "adamw"} | ADAM,
    "DEF-AdamW": {"method": "def-adamw"} | ADAM,
    "DEF-AdamW, rbgs": {"method": "def-adamw", "compressor": "rbgs"} | ADAM,
}
RATIOS = (16, 64)


def jobs(only: str) -> list[tuple[str, dict[str, Any]]]:
    """The runs, the most important first."""
    found = []
    for task, settings in TASKS.items():
        for method, own in METHODS.items():
            for ratio in (1,) if method in ("SGD", "AdamW") else RATIOS:
                found.append((f"{task}: {method}, ratio {ratio}", settings | own | {"ratio": float(ratio)}))
    return [job for job in found if only in job[0]]


def tables(done: dict[str, Any]) -> None:
    for task in TASKS:
        base = done.get(f"{task}: SGD, ratio 1")
        print(f"\n| {task} | ratio | test loss | over SGD's | λ at the end | bytes over SGD's |\n|" + " --- |" * 6)
        for name, run in done.items():
            if base and name.startswith(f"{task}: "):
                method, _, ratio = name.removeprefix(f"{task}: ").rpartition(", ratio ")
                finite = run["loss"] is not None and run["loss"] < 1e3
                loss = f"{run['loss']:.3f} | {run['loss'] / base['loss']:.3f}" if finite else "diverges | –"
                lam = "–" if run["lambda"] is None else f"{run['lambda']:.2f}"
                print(f"| {method} | {ratio} | {loss} | {lam} | {run['bytes'] / base['bytes']:.4f} |")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, required=True)
    options.add_argument("--only", default="", help="a part of the names of the runs")
    options.add_argument("--table", action="store_true", help="only print the tables")
    arguments = options.parse_args()
    done: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for name, settings in [] if arguments.table else jobs(arguments.only):
        if name in done:
            continue
        result = run_parallel(
            settings | {"rounds": 4, "steps": STEPS // 4, "eval_every": 4, "execution": "pool"}, out=None
        )
        last = result.records[-1]
        done[name] = settings | {
            "loss": last["loss"] if last["loss"] == last["loss"] else None, "stopped": result.stopped,
            "lambda": last.get("lambda"), "bytes": sum(record["bytes_up"] for record in result.records),
        }  # fmt: skip
        partial = arguments.json.with_suffix(".part")
        partial.write_text(json.dumps(done, indent=1) + "\n")
        os.replace(partial, arguments.json)
        print(f"{name}: {last['loss']}", flush=True)
    tables(done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
