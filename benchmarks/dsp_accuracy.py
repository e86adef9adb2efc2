"""Does staleness cost accuracy? CIFAR-10 in three blocks: BP, FR, DDG, DSP at the thesis' three lengths, and DNI, three seeds.

    UNDRIFT_DATA=... python benchmarks/dsp_accuracy.py [--out runs/dsp_accuracy] [--parallel 7] [--minutes 8.5] [--json FILE]

The thesis trains ResNet-164 for 300 epochs (Table 1); here it is a ResNet-9 for 18, with its batch, momentum and weight decay,
crops and flips, a rate of 0.02 that drops tenfold after epochs 12 and 16, and blocks cut at stages 1 and 3. All runs are
simulations of the pipeline in one process, several at a time on one GPU. When the minutes are over they stop at their last
checkpoint; the same command goes on, and prints what is finished.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from undrift.jobs.folder import RunFolder

THESIS = {  # Table 1, ResNet-164 on CIFAR-10, best top-1 in per cent
    "bp": 94.41, "fr": 94.55, "dsp 1,1,0;4,2,0": 94.68, "dsp 2,2,0;6,3,0": 93.98, "dsp 3,3,0;10,5,0": 93.37,
}  # fmt: skip
METHODS = ["bp", "fr", "ddg", "dsp 1,1,0;4,2,0", "dsp 2,2,0;6,3,0", "dsp 3,3,0;10,5,0", "dni"]


def folder_of(arguments: argparse.Namespace, name: str, seed: int) -> Path:
    plain = name.replace(" ", "-").replace(",", "").replace(";", "-")
    found: Path = arguments.out / f"{plain}-seed{seed}"
    return found


def command(arguments: argparse.Namespace, name: str, seed: int) -> list[str]:
    """The run from its start, or from its last checkpoint."""
    method, _, queues = name.partition(" ")
    folder = folder_of(arguments, name, seed)
    begin = [sys.executable, "-m", "undrift", "pipe", "--out", str(folder)]
    if (folder / "run.toml").exists():
        return [*begin, "--resume"]
    settings = {
        "method": method, "queues": queues, "cuts": "" if method == "bp" else arguments.cuts, "seed": seed,
        "dataset": arguments.dataset, "model": arguments.model, "batch": 128, "rounds": arguments.rounds,
        "lr": arguments.lr, "momentum": 0.9, "weight_decay": 5e-4, "warmup": 1.0, "lr_drops": arguments.drops,
        "steps": arguments.steps, "precision": "tf32",
    }  # fmt: skip
    given = {name: value for name, value in settings.items() if value not in ("", 0)}
    differences = [] if method in ("bp", "dni") else ["--differences"]
    return [*begin, *(w for n, v in given.items() for w in (f"--{n.replace('_', '-')}", str(v))), *differences]


def run_all(arguments: argparse.Namespace) -> int:
    """Run what is not finished, several at a time, until the time is over; how many are left."""
    root = str(Path(__file__).parent.parent)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    jobs = [(name, seed) for seed in range(arguments.seeds) for name in METHODS]
    jobs.sort(key=lambda job: job[0] != "dni")  # the slowest first
    waiting = [job for job in jobs if not RunFolder(folder_of(arguments, *job)).is_finished()]
    running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
    end = time.monotonic() + 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < arguments.parallel:
            job = waiting.pop(0)
            log = (folder_of(arguments, *job).with_suffix(".log")).open("ab")
            running[job] = subprocess.Popen(command(arguments, *job), stdout=log, stderr=log, env=environment)
        for job, process in list(running.items()):
            if process.poll() is not None:
                del running[job]
                state = "done" if process.returncode == 0 else f"failed, see {folder_of(arguments, *job)}.log"
                print(f"{job[0]} seed {job[1]}: {state}", flush=True)
        time.sleep(0.2)
    for process in running.values():
        process.kill()  # a checkpoint is complete or not there
        process.wait()
    return sum(not RunFolder(folder_of(arguments, *job)).is_finished() for job in jobs)


def scores(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Best and last test accuracy in per cent of each finished seed, and each block's gradient difference at both ends."""
    runs = [RunFolder(folder_of(arguments, name, seed)) for seed in range(arguments.seeds)]
    records = [run.records() for run in runs if run.is_finished()]
    found: dict[str, Any] = {"method": name, "seeds": len(records)}
    for what, pick in (("best", max), ("last", lambda values: values[-1])):
        found[what] = [100 * pick([r["accuracy"] for r in rs if r["accuracy"] is not None]) for rs in records]
    keys = [k for k in (records[0][0] if records else {}) if k.startswith("gradient_difference")]
    found["differences"] = {k: [records[0][0][k], records[0][-1][k]] for k in keys}
    found["seconds"] = [statistics.median(r["seconds"] for r in rs) for rs in records]
    return found


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "method",
        "seeds",
        "best accuracy %",
        "last %",
        "s a round",
        "thesis, R164 %",
        "gradient difference, first and last round, blocks 0, 1, 2",
    )
    for row in rows:
        apart = ", ".join(f"{a:.1e} {b:.1e}" for a, b in row["differences"].values())
        median = f"{statistics.median(row['seconds']):.1f}" if row["seconds"] else "-"
        thesis = THESIS.get(row["method"])
        table.add_row(
            row["method"], str(row["seeds"]), spread(row["best"]), spread(row["last"]), median,
            "-" if thesis is None else f"{thesis:.2f}", apart,
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def spread(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.fmean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path, default=Path("runs/dsp_accuracy"))
    asked.add_argument("--parallel", type=int, default=7)
    asked.add_argument("--minutes", type=float, default=8.5)
    asked.add_argument("--seeds", type=int, default=3)
    asked.add_argument("--dataset", default="cifar10")
    asked.add_argument("--model", default="resnet9")
    asked.add_argument("--cuts", default="stage1,stage3")
    asked.add_argument("--rounds", type=int, default=18)
    asked.add_argument("--steps", type=int, default=0)
    asked.add_argument("--lr", type=float, default=0.02)
    asked.add_argument("--drops", default="12,16")
    asked.add_argument("--json", type=Path)
    arguments = asked.parse_args()
    left = run_all(arguments)
    rows = [scores(arguments, name) for name in METHODS]
    show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    print(f"{left} runs are not finished: the same command goes on with them" if left else "all runs are finished")


if __name__ == "__main__":
    main()
