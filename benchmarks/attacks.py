"""Ten methods under four attacks, with the plain mean and with a robust rule; and every rule under FedAvg.

    python benchmarks/attacks.py [--seeds 3] [--json benchmarks/results/attacks.json]

Handwritten digits (in the package) on 20 clients, Dirichlet 0.5, all of them in every round, 5 local steps of 32 samples, an
MLP with 32 hidden units, 30 rounds. A share of the clients, the same all through a run, is hostile. The number is the accuracy on
the test samples after the last round, in percent, with its deviation over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import undrift

SETTINGS: dict[str, Any] = {
    "dataset": "digits", "partition": "dirichlet:0.5", "clients": 20, "cohort": 20, "steps": 5, "batch": 32,
    "rounds": 30, "eval_every": 30, "device": "cpu", "execution": "stacked",
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavgm": {"beta1": 0.5},
    "fedprox": {"mu": 0.1},
    "fedadam": {"server_lr": 0.01},
    "scaffold": {"lr": 0.1},
    "feddyn": {"alpha": 0.1},
    "fedcm": {},
    "mimelite": {},
    "domo": {},
    "fedsam": {},
}
ATTACKS = ["", "signflip:0.2:5", "scale:0.2:20", "gauss:0.2:1", "labelflip:0.3"]
RULES = ["mean", "median", "trimmed:0.2", "krum:4", "krum:4:10", "geometric", "clip:1", "bound:1"]
GUARD = "geometric"  # of the table of methods


def small_mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 32), nn.ReLU(), nn.Linear(32, classes))


def accuracy(method: str, attack: str, rule: str, seed: int) -> float:
    fields = {"lr": 0.2} | METHODS[method]
    settings = SETTINGS | {"algorithm": method, "attack": attack, "aggregate": rule, "seed": seed, "set": fields}
    result = undrift.run(model=small_mlp, **settings)
    return float(result.records[-1]["accuracy"])


def cell(found: list[float]) -> str:
    return f"{100 * statistics.mean(found):.0f}" + (f" ±{100 * statistics.stdev(found):.0f}" if len(found) > 1 else "")


def table(first: str, columns: list[str], rows: dict[str, list[str]]) -> str:
    lines = [[first, *columns], ["---"] * (1 + len(columns)), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(runs: dict[str, list[float]]) -> str:
    """The two tables as Markdown, from accuracies by "method attack rule"."""

    def of(method: str, attack: str, rule: str) -> str:
        return cell(runs[f"{method} {attack or 'none'} {rule}"])

    both = {m: [f"{of(m, a, 'mean')}, {of(m, a, GUARD)}" for a in ATTACKS] for m in METHODS}
    rules = {rule: [of("fedavg", a, rule) for a in ATTACKS] for rule in RULES}
    names = [a or "none" for a in ATTACKS]
    return f"{table(f'mean, {GUARD}', names, both)}\n\n{table('fedavg with', names, rules)}\n"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    wanted = [(m, a, r) for m in METHODS for a in ATTACKS for r in ("mean", GUARD)]
    wanted += [("fedavg", a, r) for a in ATTACKS for r in RULES if r not in ("mean", GUARD)]
    runs: dict[str, list[float]] = {}
    began = time.time()
    for number, (method, attack, rule) in enumerate(wanted, 1):
        found = [accuracy(method, attack, rule, seed) for seed in range(given.seeds)]
        runs[f"{method} {attack or 'none'} {rule}"] = found
        print(
            f"{number} of {len(wanted)}: {method}, {attack or 'none'}, {rule}: {cell(found)}",
            file=sys.stderr,
            flush=True,
        )
    if given.json:
        about = {"settings": SETTINGS, "fields": {m: {"lr": 0.2} | f for m, f in METHODS.items()}, "seeds": given.seeds}
        about |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "cores": os.cpu_count()}
        about |= {"seconds": round(time.time() - began)}
        given.json.write_text(json.dumps(about | {"accuracy": runs}, indent=1) + "\n")
    print(tables(runs))


if __name__ == "__main__":
    main()
