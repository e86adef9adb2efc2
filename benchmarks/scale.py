"""Memory and time of a round with 1e3 to 1e6 clients, and SCAFFOLD's client state in memory and on disk.

    python benchmarks/scale.py [--json FILE] [--folder DIR]

FedAvg on digits resampled to 20 samples a client (`resample:20`), logistic regression, 1000 clients a round whatever their
number, 2 local steps of batch 10: only the number of clients differs. SCAFFOLD with 100,000 clients, the `mlp`, 100 clients a
round: a place for everybody would take 38 GB. Every row is a whole `undrift.run` with a run folder in a process of its own;
the rows of one algorithm take turns, round by round, so that the machine's moods meet all of them.
"ms a round" is the median of the records, "checkpoint" the median of what comes after a round that has one, "last round"
includes the scores on the clients' own samples, "building" is all that comes before the first round, "peak RSS" is of all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import undrift
from undrift.jobs.course import commit

ROUNDS, CHECKPOINTS = 20, 5
COMMON = {
    "partition": "resample:20", "steps": 2, "batch": 10, "rounds": ROUNDS, "checkpoint_every": CHECKPOINTS,
    "eval_every": ROUNDS, "execution": "stacked", "device": "cpu",
}  # fmt: skip
CLIENTS = (1000, 10_000, 100_000, 1_000_000)
FEDAVG = {"algorithm": "fedavg", "model": "logreg", "cohort": 1000}
SCAFFOLD = {"algorithm": "scaffold", "model": "mlp", "clients": 100_000, "cohort": 100}
COLUMNS = {
    "algorithm": "", "clients": ",", "state": "", "ms a round": ".0f", "checkpoint ms": ".0f", "last round s": ".1f",
    "building s": ".1f", "peak RSS MB": ",.0f", "table GB": ".2f", "on disk GB": ".2f",
}  # fmt: skip


def measure(settings: dict[str, Any], folder: str | None, turns: Connection) -> None:
    """One run in a process of its own, which waits for its turn before every round and in the end sends what it found."""
    began, after = (
        time.perf_counter(),
        [],
    )  # after: seconds of a turn beside the round, such as a checkpoint of the one before

    def end_of_round(record: dict[str, Any], rounds: int) -> None:
        after.append(time.perf_counter() - began - record["seconds"])
        turns.send(None)
        wait()

    def wait() -> None:
        nonlocal began
        turns.recv()
        began = time.perf_counter()

    wait()
    with tempfile.TemporaryDirectory(dir=folder) as out:
        run = undrift.run(COMMON | settings, out=Path(out) / "run", progress=end_of_round)
        seconds = [record["seconds"] for record in run.records]
        found = {
            "algorithm": settings["algorithm"],
            "clients": settings["clients"],
            "state": settings.get("client_state", "none"),
            "ms a round": 1e3 * statistics.median(seconds[1:-1]),
            "checkpoint ms": 1e3 * statistics.median(after[CHECKPOINTS::CHECKPOINTS]),
            "last round s": seconds[-1],
            "building s": after[0],
            "peak RSS MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # kilobytes, on Linux
        }
        table = Path(out) / "run/clients.table"
        if table.exists():
            found["table GB"], found["on disk GB"] = table.stat().st_size / 1e9, table.stat().st_blocks * 512 / 1e9
    turns.send(found)


def compare(rows: list[dict[str, Any]], folder: str | None) -> list[dict[str, Any]]:
    """What each row's process finds; only one of them works at a time."""
    context, pipes = multiprocessing.get_context("spawn"), []
    for settings in rows:
        ours, theirs = context.Pipe()
        context.Process(target=measure, args=(settings, folder, theirs), daemon=True).start()
        theirs.close()  # so that a process that dies ends the wait
        pipes.append(ours)
    for _ in range(ROUNDS + 1):  # the last turn is for the end of the run
        found = []
        for pipe in pipes:
            pipe.send(None)
            found.append(pipe.recv())
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    arguments.add_argument(
        "--folder", default=None, metavar="DIR", help="where runs are written [the temporary folder]"
    )
    chosen = arguments.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")
    print("".join(f"{name:>14}" for name in COLUMNS))
    results = []
    for group in (
        [FEDAVG | {"clients": n} for n in CLIENTS],
        [SCAFFOLD | {"client_state": s} for s in ("memory", "disk")],
    ):
        for found in compare(group, chosen.folder):
            results.append(found)
            shown = [format(found[name], form) if name in found else "" for name, form in COLUMNS.items()]
            print("".join(f"{cell:>14}" for cell in shown), flush=True)
    report = {
        "benchmark": "scale",
        "torch": torch.__version__,
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "results": results,
    }
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
