"""Virtual seconds to an accuracy with servers that do and do not wait, at three spreads of speed; the memory of 10,000 clients.

    python benchmarks/asynchronous.py [--seeds 3] [--part times|memory] [--json FILE]

Fifty of 100 clients with skewed samples of digits are at work at a time, in every method. Rounds wait for all fifty, or for the
first 40 of them; FedBuff's server steps after ten answers, FedAsync's after each. Each method has that rate of a small grid which
is the fastest at the middle spread with another seed. The memory is the largest resident set of a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import undrift
from undrift.data.load import load_dataset
from undrift.jobs.config import build_algorithm, from_mapping
from undrift.jobs.run import build_simulation
from undrift.simulate.simulation import Simulation

TARGET, SPREADS, RATES, CHOSEN_BY = 0.9, (0.25, 1.0, 2.0), (0.05, 0.1, 0.2, 0.4, 0.8), 100
COMMON: dict[str, Any] = {
    "dataset": "digits", "model": "mlp", "partition": "dirichlet:0.1", "clients": 100, "steps": 5, "batch": 32,
    "stop_at": f"accuracy={TARGET}", "checkpoint_every": 100_000, "execution": "stacked", "device": "cpu",
}  # fmt: skip
BUFFER: dict[str, Any] = {"asynchronous": True, "concurrent": 50, "cohort": 10, "rounds": 2000, "eval_every": 5}
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg, waits for all 50": {"algorithm": "fedavg", "cohort": 50, "rounds": 400, "eval_every": 1},
    "FedAvg, waits for 40 of 50": {
        "algorithm": "fedavg",
        "cohort": 40,
        "over_select": 10,
        "rounds": 400,
        "eval_every": 1,
    },
    "FedAsync": {"algorithm": "fedasync", **BUFFER, "cohort": 1, "rounds": 20_000, "eval_every": 50},
    "FedBuff": {"algorithm": "fedbuff", **BUFFER},
    "SCAFFOLD + FedBuff": {"algorithm": "scaffold+fedbuff", **BUFFER},
}
MANY: dict[str, Any] = {
    "dataset": "mnist", "model": "mlp", "partition": "iid", "clients": 10_000, "steps": 5, "batch": 6, "algorithm": "fedbuff",
    "asynchronous": True, "concurrent": 1000, "cohort": 10, "rounds": 200, "clock": "lognormal:1", "eval_every": 100,
    "checkpoint_every": 100, "device": "cpu",
}  # fmt: skip


def seconds_to_target(method: str, spread: float, lr: float, seed: int) -> dict[str, Any]:
    """A run up to the target: virtual seconds and what else it took; None if it did not come there."""
    settings = COMMON | METHODS[method] | {"clock": f"lognormal:{spread}", "seed": seed, "lr": lr}
    result = undrift.run(settings)
    last = result.records[-1]
    alike = simulation_of(settings)
    heard = {client for t in range(last["round"]) for client in alike.attendance(t).ids.tolist()}
    reached = result.stopped == "accuracy"
    ages = [record["staleness_mean"] for record in result.records if "staleness_mean" in record]
    return {
        "method": method, "spread": spread, "lr": lr, "seed": seed, "server_steps": last["round"],
        "seconds": last["virtual_seconds"] if reached else None,
        "answers": sum(record["clients"] - record["dropped"] for record in result.records),
        "staleness": statistics.mean(ages) if ages else 0.0, "heard": len(heard),
    }  # fmt: skip


def simulation_of(settings: dict[str, Any]) -> Simulation:
    """The run before its first round, which knows who will answer when."""
    config = from_mapping(settings)
    data = load_dataset(config.dataset)
    return build_simulation(config, build_algorithm(config), data, config.model, torch.device("cpu"))


def fastest(rows: list[dict[str, Any]]) -> float:
    return float(min(rows, key=lambda row: row["seconds"] or float("inf"))["lr"])


def times(seeds: int) -> list[dict[str, Any]]:
    rows = []
    for method in METHODS:
        lr = fastest([seconds_to_target(method, SPREADS[1], lr, CHOSEN_BY) for lr in RATES])
        for spread in SPREADS:
            rows += [seconds_to_target(method, spread, lr, seed) for seed in range(seeds)]
            print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def memory(found: Any, out: str) -> None:
    began = time.perf_counter()
    result = undrift.run(MANY, out=out)
    last = result.records[-1]
    found.put({
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "seconds": time.perf_counter() - began,
        "server_steps": last["round"], "virtual_seconds": last["virtual_seconds"], "accuracy": last["accuracy"],
        "staleness_mean": statistics.mean(record["staleness_mean"] for record in result.records),
        "staleness_max": max(record["staleness_max"] for record in result.records), "parameters": result.about["parameters"],
    })  # fmt: skip


def alone(out: Path) -> dict[str, Any]:
    """The memory of a run in a process of its own."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    process = context.Process(target=memory, args=(found, str(out)))
    process.start()
    process.join()  # what it leaves is small
    if process.exitcode:
        raise SystemExit("the run of 10,000 clients failed")
    answer: dict[str, Any] = found.get()
    return answer


def show(found: dict[str, Any]) -> None:
    print(f"virtual seconds to {TARGET:.0%} of the test samples, mean over seeds")
    print("(server steps; mean staleness; clients of 100 that were heard)\n")
    print("| method | lr | " + " | ".join(f"spread {spread:g}" for spread in SPREADS) + " |")
    print("| --- | --- |" + " --- |" * len(SPREADS))
    for method in METHODS:
        mine = [row for row in found["times"] if row["method"] == method]
        cells = []
        for spread in SPREADS:
            rows = [row for row in mine if row["spread"] == spread]
            there = [row["seconds"] for row in rows if row["seconds"] is not None]
            steps, age, heard = (
                statistics.mean(row[name] for row in rows) for name in ("server_steps", "staleness", "heard")
            )
            missed = f", {len(rows) - len(there)} of {len(rows)} did not come there" if len(there) < len(rows) else ""
            text = f"{statistics.mean(there):.0f}" if there else "none"
            cells.append(f"{text} ({steps:.0f}; {age:.1f}; {heard:.0f}){missed}")
        print(f"| {method} | {mine[0]['lr']:g} | " + " | ".join(cells) + " |")
    if "memory" in found:
        print(f"\n10,000 clients, 1,000 at work: {json.dumps(found['memory'])}")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--seeds", type=int, default=3)
    asked.add_argument("--part", choices=("times", "memory"))
    asked.add_argument("--json", type=Path, default=Path("benchmarks/results/asynchronous.json"))
    asked.add_argument("--out", type=Path, default=Path("runs/benchmark-asynchronous"))
    arguments = asked.parse_args()
    found: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    if arguments.part != "memory":
        found["times"] = times(arguments.seeds)
    if arguments.part != "times":
        found["memory"] = alone(arguments.out)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if "times" in found:
        show(found)


if __name__ == "__main__":
    main()
