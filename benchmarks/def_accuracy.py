"""Test accuracy of DEF, DEF-A and their rivals on CIFAR-10 with 16 simulated workers: the thesis' Tables 5 and 6, Figure 8.

    python benchmarks/def_accuracy.py --json def.json [--seconds 480] [--folder runs/def-accuracy]
    python benchmarks/def_accuracy.py --json def.json --table

The runs are done in the order of what matters most, and written to the JSON file as each one ends. After --seconds no round
is begun; the same command goes on, with runs that are in the file left out and an interrupted one resumed from its
checkpoint in the folder. --json may be given several times: all are read, the last is written.

A ResNet-9, batch 8 a worker (128 in all), momentum 0.9, weight decay 5e-4, 20 passes, one of warm-up, a tenth of the rate after
13 and 17. That makes 7,000 steps: what counts is how often a block is sent, 110 times at ratio 64 and 7 times at 1024 (in the
thesis' 200 epochs some 1,200 and 76 times). BatchNorm's statistics are taken anew for the weights that are tested. SAEF and PSync
are one path (lambda = 1), whose x and y are tested; so are DEF (y) and DEF-A (x).

Several processes share the work, and a GPU, by --only, each with its file: sgd, ratio=64, ratio=1024, ratio=16, ratio=256.

Every method at every ratio is tried with the same two rates under seed 0, and goes on with the one that is best on a tenth of
the training samples, which nobody trains on; a diverged run counts as zero. PSync and DEF-A have the rates of SAEF and DEF,
whose runs they are. DEF is run with the λ of the thesis, 0.3, and with 0.6, the best one of the sweep. A run is ended as
diverged when a pass has a mean training loss above 10.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from undrift.dataparallel.command import run_parallel
from undrift.jobs.folder import RunFolder

COMMON: dict[str, Any] = {
    "dataset": "cifar10", "model": "resnet9", "workers": 16, "batch": 8, "rounds": 20, "lr": 0.05, "momentum": 0.9,
    "weight_decay": 5e-4, "warmup": 1.0, "lr_drops": "13,17", "eval_every": 13, "checkpoint_every": 10, "statistics": 20,
    "execution": "stacked", "replay": True, "compile": True, "precision": "tf32", "val_fraction": 0.1,
}  # fmt: skip
FACTORS = (1.0, 0.25)  # of the rate, tried for every method
Job = tuple[str, dict[str, Any]]
COLUMNS = {  # the thesis' columns: which runs, and which of their two models
    "EF": ("ef", "x"), "SAEF": ("saef", "x"), "PSync": ("saef", "y"), "DEF": ("def lam=0.3", "y"), "DEF-A": ("def lam=0.3", "x"),
    "DEF, λ 0.6": ("def lam=0.6", "y"), "DEF-A, λ 0.6": ("def lam=0.6", "x"), "DEF, λ auto": ("def lam=auto", "y"),
    "DEF-A, λ auto": ("def lam=auto", "x"),
}  # fmt: skip


HOPELESS = 10.0  # a mean training loss of a pass that no run comes back from; guessing has 2.3


class OutOfTime(Exception):
    """No more rounds now."""


class Diverged(Exception):
    """The loss of a pass was hopeless."""


def named(method: str, ratio: float, seed: int, lr: float, lam: str = "") -> Job:
    name = f"{method}{f' lam={lam}' if lam else ''} ratio={ratio:g} lr={lr:g} seed={seed}"
    return name, {"method": method, "compressor": "rbgs", "ratio": ratio, "seed": seed, "lr": lr} | (
        {"lam": lam} if lam else {}
    )


def best_rate(done: dict[str, Any], method: str, ratio: float, rates: list[float], lam: str = "") -> float | None:
    """The rate that is best on the validation samples; None while one is not known."""
    tried = {lr: done.get(named(method, ratio, 0, lr, lam)[0]) for lr in rates}
    if any(run is None for run in tried.values()):
        return None
    return max(rates, key=lambda lr: 0.0 if tried[lr]["stopped"] == "diverged" else tried[lr]["validation"])  # type: ignore[index]


def next_jobs(done: dict[str, Any], rates: list[float]) -> list[Job]:
    """The runs that can be done now, the most important first: rates are tried before other seeds are run with the best."""
    found: list[Job] = []
    entrants = [
        ("sgd", 1, ""),
        *((m, r, lam) for r in (64, 1024) for m, lam in (("def", "0.3"), ("saef", ""), ("ef", ""), ("def", "0.6"))),
    ]
    others = [(m, r, lam) for r in (16, 256) for m, lam in (("def", "0.3"), ("saef", ""), ("ef", ""))]
    for method, ratio, lam in entrants:
        found += [named(method, ratio, 0, lr, lam) for lr in rates]
    for seed in (1, 2):
        for method, ratio, lam in entrants:
            chosen = best_rate(done, method, ratio, rates, lam)
            found += [] if chosen is None else [named(method, ratio, seed, chosen, lam)]
    for ratio in (64, 1024):
        chosen = best_rate(done, "def", ratio, rates, "0.3")
        found += [] if chosen is None else [named("def", ratio, 0, chosen, "auto")]
    chosen = best_rate(done, "def", 64, rates, "0.3")
    found += [] if chosen is None else [named("def", 64, 0, chosen, lam) for lam in ("0.1", "0.2", "0.4", "0.6", "0.8")]
    for method, ratio, lam in [*others, ("ef21", 64, "")]:
        found += [named(method, ratio, 0, lr, lam) for lr in rates]
    return [job for job in found if job[0] not in done]


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
        if record["train_loss"] > HOPELESS:
            raise Diverged
        if time.monotonic() - began > arguments.seconds and record["round"] < rounds:
            raise OutOfTime

    common = COMMON | {k: v for k, v in vars(arguments).items() if k in COMMON and v is not None}
    rates = [common["lr"] * factor for factor in FACTORS]
    while todo := [job for job in next_jobs(done, rates) if all(word in job[0].split() for word in arguments.only)]:
        if time.monotonic() - began > arguments.seconds:
            break
        name, settings = todo[0]
        folder = Path(arguments.folder) / name.replace(" ", "-")
        try:
            result = run_parallel(common | settings, out=folder, resume=RunFolder(folder).exists(), progress=watch)
            records, stopped = result.records, result.stopped
        except Diverged:
            records, stopped = RunFolder(folder).records(), "diverged"
        except OutOfTime:
            break
        seconds = [record["seconds"] for record in records]
        last = records[-1] if records else {}
        done[name] = common | settings | {
            "curve": curve(records), "stopped": stopped, "seconds": round(sum(seconds), 1),
            "bytes": sum(record["bytes_up"] for record in records), "lambda": last.get("lambda"),
            "validation": last.get("val_accuracy"), "rates": rates,
        }  # fmt: skip
        Path(arguments.json[-1]).write_text(json.dumps(done, indent=1))
        print(f"{name}: {done[name]['curve'][-1:]} {stopped}, {sum(seconds):.0f} s", flush=True)


def scores(done: dict[str, Any], start: str, which: str, at: int = 10**9) -> list[float]:
    """The accuracies in percent of the runs whose name begins so, one a seed, at the last evaluation up to round `at`."""
    found = []
    for name, run in done.items():
        if name.startswith(f"{start} lr=") and run["lr"] == rate_of(done, start):
            points = [point for point in run["curve"] if point[0] <= at]
            value = points[-1][2 if which == "x" else 3] if points else None
            diverged = run["stopped"] == "diverged" and at >= run["rounds"]
            found.append(float("nan") if value is None or diverged else 100 * value)
    return found


def rate_of(done: dict[str, Any], start: str) -> float | None:
    """The rate with which runs whose names begin so are compared: the best one, or the only one that was run."""
    mine = [run for name, run in done.items() if name.startswith(f"{start} lr=")]
    if not mine:
        return None
    first = mine[0]
    tried = sorted({run["lr"] for run in mine})
    return (
        tried[0]
        if len(tried) == 1
        else best_rate(done, first["method"], first["ratio"], first["rates"], first.get("lam", ""))
    )


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
    rate = rate_of(done, "def lam=0.3 ratio=64")
    print(f"\n| λ at ratio 64, seed 0, rate {rate} | DEF | DEF-A |\n| --- | --- | --- |")
    for lam in ("0.1", "0.2", "0.3", "0.4", "0.6", "0.8", "auto"):
        run = done.get(f"def lam={lam} ratio=64 lr={rate:g} seed=0") if rate else None
        if run:
            ends = f" (ends at {run['lambda']:.2f})" if lam == "auto" else ""
            print(f"| {lam}{ends} | {100 * run['curve'][-1][3]:.2f} | {100 * run['curve'][-1][2]:.2f} |")
    print(
        f"\n| before the first drop (round {drop}) | SGD | DEF | DEF-A | DEF, λ 0.6 | DEF-A, λ 0.6 |\n|" + " --- |" * 6
    )
    for ratio in (64, 1024):
        early = [cell(scores(done, f"def lam={lam} ratio={ratio}", w, drop)) for lam in ("0.3", "0.6") for w in "yx"]
        print(f"| {ratio} | {cell(scores(done, 'sgd ratio=1', 'x', drop))} | " + " | ".join(early) + " |")
    print("\n| run, seed 0 | rate | validation accuracy | test accuracy of x and y |\n| --- | --- | --- | --- |")
    for name, run in done.items():
        if run["seed"] == 0 and run["curve"]:
            both = " and ".join(f"{100 * value:.2f}" for value in run["curve"][-1][2:] if value is not None)
            chosen = " (taken)" if run["lr"] == rate_of(done, name.partition(" lr=")[0]) else ""
            validation = "diverges" if run["stopped"] == "diverged" else f"{100 * run['validation']:.2f}"
            print(f"| {name.partition(' lr=')[0]} | {run['lr']:g}{chosen} | {validation} | {both} |")


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
