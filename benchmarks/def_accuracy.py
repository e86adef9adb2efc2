"""Test accuracy of DEF, DEF-A and their rivals on CIFAR-10 with 16 simulated workers: the thesis' Tables 5 and 6, Figure 8.

    python benchmarks/def_accuracy.py --json def.json [--seconds 480] [--folder runs/def-accuracy]
    python benchmarks/def_accuracy.py --json def.json --table

The runs are done in the order of what matters most, and written to the JSON file as each one ends. After --seconds no round
is begun; the same command goes on, with runs that are in the file left out and an interrupted one resumed from its
checkpoint in the folder. --json may be given several times: all are read, the last is written.

ResNet-20 with BatchNorm (each worker's own statistics), batch 16 a worker (256 in all), momentum 0.9, weight decay 5e-4, 30
passes, rate 0.2 after one pass of warm-up, a tenth of it after 15 and 22. SAEF and PSync are one path (lambda = 1), whose x
and y are tested; so are DEF (y) and DEF-A (x). BatchNorm's statistics are taken anew at the tested weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from undrift.folder import RunFolder
from undrift.parallel import run_parallel

COMMON: dict[str, Any] = {
    "dataset": "cifar10", "model": "resnet20", "workers": 16, "batch": 16, "rounds": 30, "lr": 0.2, "momentum": 0.9,
    "weight_decay": 5e-4, "warmup": 1.0, "lr_drops": "15,22", "eval_every": 3, "checkpoint_every": 6, "statistics": 20,
    "execution": "stacked", "replay": True, "precision": "tf32",
}  # fmt: skip
Job = tuple[str, dict[str, Any]]
COLUMNS = {  # the thesis' columns: which runs, and which of their two models
    "EF": ("ef", "x"), "SAEF": ("saef", "x"), "PSync": ("saef", "y"), "DEF": ("def lam=0.3", "y"), "DEF-A": ("def lam=0.3", "x"),
    "DEF auto": ("def lam=auto", "y"), "DEF-A auto": ("def lam=auto", "x"),
}  # fmt: skip


class OutOfTime(Exception):
    """No more rounds now."""


def jobs(rate: float) -> list[Job]:
    """Every run by name, the most important first."""
    found: list[Job] = []

    def add(method: str, ratio: float, seed: int, lam: str = "", lr: float = rate) -> None:
        name = (
            f"{method}{f' lam={lam}' if lam else ''} ratio={ratio:g} seed={seed}{f' lr={lr:g}' if lr != rate else ''}"
        )
        found.append((name, {"method": method, "ratio": ratio, "seed": seed, "lr": lr} | ({"lam": lam} if lam else {})))

    def all_methods(ratio: float, seed: int) -> None:
        add("def", ratio, seed, "0.3")
        add("saef", ratio, seed)
        add("ef", ratio, seed)

    for seed in (0, 1, 2):
        add("sgd", 1, seed)
        for ratio in (64, 1024):
            all_methods(ratio, seed)
        if seed == 0:
            for ratio in (64, 1024):
                add("def", ratio, 0, "auto")
            for lam in ("0.1", "0.2", "0.4", "0.6", "0.8"):
                add("def", 64, 0, lam)
            for ratio in (16, 256):
                all_methods(ratio, 0)
            for ratio in (64, 1024):  # does EF fail because of its rate?
                for factor in (0.25, 0.0625):
                    add("ef", ratio, 0, lr=rate * factor)
            add("ef21", 64, 0)
    return found


def curve(records: list[dict[str, Any]]) -> list[list[float | None]]:
    """Of each evaluated round: its number, the training loss, and the accuracies of x and y."""
    points = []
    for record in records:
        if record["accuracy"] is not None:
            x, y = (record.get(f"{which}_accuracy", record["accuracy"]) for which in "xy")
            points.append([record["round"], record["train_loss"], x, y])
    return points


def run_all(arguments: argparse.Namespace, done: dict[str, Any]) -> None:
    began = time.monotonic()

    def watch(record: dict[str, Any], rounds: int) -> None:
        if time.monotonic() - began > arguments.seconds and record["round"] < rounds:
            raise OutOfTime

    common = COMMON | {k: v for k, v in vars(arguments).items() if k in COMMON and v is not None}
    todo = [(n, s) for n, s in jobs(common["lr"]) if n not in done and all(w in n.split() for w in arguments.only)]
    print(f"{len(todo)} runs to do, {len(done)} done", flush=True)
    for name, settings in todo:
        if time.monotonic() - began > arguments.seconds:
            break
        folder = Path(arguments.folder) / name.replace(" ", "-")
        try:
            result = run_parallel(common | settings, out=folder, resume=RunFolder(folder).exists(), progress=watch)
        except OutOfTime:
            break
        seconds = [record["seconds"] for record in result.records]
        last = result.records[-1]
        done[name] = common | settings | {
            "curve": curve(result.records), "stopped": result.stopped, "seconds": round(sum(seconds), 1),
            "bytes": sum(record["bytes_up"] for record in result.records), "lambda": last.get("lambda"),
        }  # fmt: skip
        Path(arguments.json[-1]).write_text(json.dumps(done, indent=1))
        print(f"{name}: {done[name]['curve'][-1]} {result.stopped}, {sum(seconds):.0f} s", flush=True)


def scores(done: dict[str, Any], start: str, which: str, at: int = 10**9) -> list[float]:
    """The accuracies in percent of the runs whose name begins so, one a seed, at the last evaluation up to round `at`."""
    found = []
    for name, run in done.items():
        if name.startswith(f"{start} seed=") and " lr=" not in name:
            points = [point for point in run["curve"] if point[0] <= at]
            value = points[-1][2 if which == "x" else 3] if points else None
            diverged = run["stopped"] == "diverged" and at >= run["rounds"]
            found.append(float("nan") if value is None or diverged else 100 * value)
    return found


def cell(values: list[float]) -> str:
    if not values:
        return "–"
    if any(value != value for value in values):
        return f"diverges ({sum(value != value for value in values)} of {len(values)})"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def tables(done: dict[str, Any]) -> None:
    first = next(iter(done.values()))
    drop = int(str(first["lr_drops"]).split(",")[0])
    print(f"\n{first['model']} on {first['dataset']}, {first['workers']} workers, batch {first['batch']} each, "
          f"{first['rounds']} passes, test accuracy in %; n = {len(scores(done, 'sgd ratio=1', 'x'))} seeds at most")  # fmt: skip
    print("\n| ratio | SGD | " + " | ".join(COLUMNS) + " |\n|" + " --- |" * (2 + len(COLUMNS)))
    print(f"| 1 | {cell(scores(done, 'sgd ratio=1', 'x'))} |" + " – |" * len(COLUMNS))
    for ratio in (16, 64, 256, 1024):
        cells = [cell(scores(done, f"{runs} ratio={ratio}", which)) for runs, which in COLUMNS.values()]
        print(f"| {ratio} | – | " + " | ".join(cells) + " |")
    print("\n| λ at ratio 64, seed 0 | DEF | DEF-A |\n| --- | --- | --- |")
    for lam in ("0.1", "0.2", "0.3", "0.4", "0.6", "0.8", "auto"):
        both = [cell(scores(done, f"def lam={lam} ratio=64", which)[:1]) for which in "yx"]
        known = done.get("def lam=auto ratio=64 seed=0", {}).get("lambda")
        print(f"| {lam}{f' (ends at {known:.2f})' if lam == 'auto' and known else ''} | {both[0]} | {both[1]} |")
    print(f"\n| before the first drop (round {drop}) | SGD | DEF | DEF-A |\n| --- | --- | --- | --- |")
    for ratio in (64, 1024):
        early = [cell(scores(done, f"def lam=0.3 ratio={ratio}", which, drop)) for which in "yx"]
        print(f"| {ratio} | {cell(scores(done, 'sgd ratio=1', 'x', drop))} | {early[0]} | {early[1]} |")
    for name, run in done.items():
        if " lr=" in name or name.startswith("ef21"):
            print(f"{name}: {run['curve'][-1] if run['curve'] else ''} {run['stopped']}")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="append", required=True)
    options.add_argument("--seconds", type=float, default=480.0)
    options.add_argument("--folder", default="runs/def-accuracy")
    options.add_argument("--only", nargs="*", default=[], help="words that a run's name must have, such as sgd seed=0")
    options.add_argument("--table", action="store_true", help="only print the tables")
    for name, value in COMMON.items():
        if not isinstance(value, bool):
            options.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=None)
    arguments = options.parse_args()
    done: dict[str, Any] = {}
    for path in map(Path, arguments.json):
        done |= json.loads(path.read_text()) if path.exists() else {}
    if not arguments.table:
        run_all(arguments, done)
    if done:
        tables(done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
