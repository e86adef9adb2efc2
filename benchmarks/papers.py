"""The papers' tables on a GPU, in pieces of a few minutes, in the order of their importance.

    python benchmarks/papers.py --plan
    UNDRIFT_DATA=... python benchmarks/papers.py --minutes 8.5 --work WORK --bring BACK --out BACK

The same command again goes on where the last piece stopped, also on another machine: all that has to be taken along is the
folder BACK, which holds at most eight files of at most 16 MB, 64 MB together. `results.tar.xz` has every finished run;
`unfinished-*.tar.xz` have checkpoints, as far as they fit. WORK may stay on the machine. `--only` takes some of the items.

The plan estimates from times that were measured on an H200 (gpu.json, programmes.json, convolutions.json): a FedAvg round of each
network alone, the ratio of each method to it, and the share of a round that is left in packs. What was not measured is marked.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from undrift.core import stopping
from undrift.core.errors import UndriftError
from undrift.jobs.batch import Batch
from undrift.jobs.cells import Asked, Work
from undrift.jobs.reproduce import duration, left_of, reproduce
from undrift.jobs.results import Results, read_lines
from undrift.jobs.suite import load_suite

LARGEST, MOST_FILES, ALTOGETHER = 15 << 20, 8, 60 << 20  # of what is brought back
RATIOS = Path(__file__).parent / "results" / "gpu.json"


@dataclass(frozen=True)
class Item:
    """One command, and how long a FedAvg round (an epoch of `dp` and `pipe`) takes."""

    name: str
    suite: str
    ms: float
    share: float = 1.0  # what is left of it in packs
    model: str = "gradma-lenet5"  # whose ratios between methods are taken
    measured: bool = True
    columns: Sequence[str] = ()
    rows: Sequence[str] = ()
    seeds: int = 0
    tune: str = "grid"
    ratios: dict[str, float] = field(default_factory=dict)


DOMO = ("domo", "domo-s", "fedavgslm-z", "fedavgm")
HIGH = ("ratio-256", "ratio-1024")
CIFAR = {"ms": 16.3, "share": 0.5, "ratios": {"gradma": 2.52, "gradma-s": 1.11}}
NN = {"ms": 2.03, "share": 0.25, "model": "mlp", "ratios": {"gradma": 6.0, "gradma-s": 2.6}}
MNIST = ("mnist-0.01", "mnist-0.1", "mnist-1", "mnist-0.01-s5")
QUEUE = (
    Item("mnist", "gradma-table1", columns=MNIST, **NN),
    Item("mnist-s50", "gradma-table1", columns=["mnist-0.01-s50"], **NN | {"ms": 10.0}, measured=False),
    Item("cifar10-0.01", "gradma-table1", columns=["cifar10-0.01"], **CIFAR),
    Item("def-64", "def-table6", 390 * 10.0, measured=False, columns=["ratio-64"], seeds=1),
    Item("def-lambda", "def-table5", 390 * 10.0, measured=False, seeds=1),
    Item("def-high", "def-table6", 390 * 10.0, measured=False, columns=HIGH, rows=["saef", "def", "def-a"], seeds=1),
    Item("domo", "domo-gains", 98 * 9.1, columns=["vgg16-s10"], seeds=1),
    Item("domo-seeds", "domo-gains", 98 * 9.1, columns=["vgg16-s10"], rows=DOMO, seeds=3),
    Item("domo-beta", "domo-table16-half", 98 * 9.1, seeds=1),
    Item("cifar10-rest", "gradma-table1", columns=["cifar10-0.1", "cifar10-1"], **CIFAR),
    Item("fedmim", "fedmim-table1-resnet20", 10 * 40.0, measured=False, seeds=1, tune="none"),
    Item("fedmim-table3", "fedmim-table3-resnet20", 10 * 40.0, measured=False, seeds=1, tune="none"),
    Item("fedmim-resnet18", "fedmim-table1", 50 * 10.9, columns=["c10-0.3"], rows=["fedavg", "fedcm", "fedmim"], tune="none"),
    Item("fl-simulator", "fedmim-fl-simulator", 50 * 10.9, columns=["c10-0.6"], rows=["fedavg", "fedcm"], tune="none"),
    Item("dsp", "dsp-table1-resnet20", 390 * 10.0, measured=False, seeds=1, tune="none"),
    Item("mnist-table2", "gradma-table2", columns=[*MNIST, "mnist-0.01-s50"], **NN),
    Item("cifar10-table2", "gradma-table2", columns=["cifar10-0.01", "cifar10-0.1", "cifar10-1"], **CIFAR),
    Item("mnist-memory", "gradma-figure6", columns=["mnist-0.01", "mnist-0.1", "mnist-1"], **NN),
)  # fmt: skip


def asked(item: Item, work: Path, minutes: float = 0.0) -> Asked:
    return Asked(item.suite, work, item.columns, item.rows, item.seeds, item.tune, minutes=minutes)


def rounds_of(item: Item, work: Path, seen: set[str]) -> dict[str, tuple[int, int]]:
    """Rounds of trials at most, and of final runs, by algorithm; without those that are done, or in `seen`, to which it adds."""
    one = asked(item, work)
    suite = load_suite(one.suite, one.scale, one.columns, one.rows, one.seeds, at_hand=False)
    table = Work(suite, Batch(Results(work, suite.name), print), one)
    found: dict[str, tuple[int, int]] = {}
    for cell in suite.cells if "computed" not in suite.about else ():
        _, runs, trials = left_of(table, cell, seen)
        name = str(cell.settings.get("algorithm", cell.settings.get("method")))
        before = found.get(name, (0, 0))
        found[name] = before[0] + trials, before[1] + runs * cell.config(0, {}).rounds
    return found


def plan(items: Iterable[Item], work: Path) -> Iterator[str]:
    """A table in Markdown: what every item is expected to take on an H200."""
    ratios = {(row["model"], row["method"]): row["ratio"] for row in json.loads(RATIOS.read_text())["methods"]}
    yield "| item | command | rounds of trials | rounds of runs | GPU time |"
    yield "| --- | --- | --- | --- | --- |"
    total, seen = 0.0, set[str]()
    for item in items:
        rounds = rounds_of(item, work, seen)
        seconds = sum(
            (trials + finals) * item.ms * item.share * item.ratios.get(name, ratios.get((item.model, name), 1.0)) / 1000
            for name, (trials, finals) in rounds.items()
        )
        total += seconds
        trials, finals = (sum(each[n] for each in rounds.values()) for n in (0, 1))
        words = [item.suite]
        for flag, value in (("--columns", ",".join(item.columns)), ("--methods", ",".join(item.rows))):
            words += [flag, value] if value else []
        words += ["--tune", item.tune] + (["--seeds", str(item.seeds)] if item.seeds else [])
        guess = "" if item.measured else " (a guess)"
        yield f"| {item.name} | `{' '.join(words)}` | {trials:,} | {finals:,} | {duration(seconds)}{guess} |"
    yield f"| all | | | | {duration(total)} |"


def bring(folder: Path, work: Path) -> None:
    """Take over what an earlier piece brought back; runs that are here already stay as they are."""
    with tempfile.TemporaryDirectory() as name:
        there = Path(name)
        if (folder / "results.tar.xz").exists():
            with tarfile.open(folder / "results.tar.xz") as archive:
                archive.extractall(there, filter="data")
        known = {line["key"] for file in work.glob("*.jsonl") for line in read_lines(file)}
        for file in sorted(there.glob("*.jsonl")):
            new = [line for line in read_lines(file) if line["key"] not in known]
            with (work / file.name).open("a", encoding="utf-8") as out:
                out.writelines(json.dumps(line, allow_nan=False) + "\n" for line in new)
    for file in sorted(folder.glob("unfinished-*.tar.xz")):
        with tarfile.open(file) as archive:
            first = archive.getnames()[:1]
            if first and not (work / first[0]).exists():
                archive.extractall(work, filter="data")


def pack(files: Iterable[Path], root: Path) -> bytes:
    """Files as one archive, by their names below `root`."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:xz", preset=1) as archive:
        for file in files:
            archive.add(file, str(file.relative_to(root)))
    return held.getvalue()


def send_back(work: Path, out: Path) -> Iterator[str]:
    """Write the archives to `out`, and say what did not fit."""
    out.mkdir(parents=True, exist_ok=True)
    for file in out.glob("unfinished-*.tar.xz"):
        file.unlink()
    results = pack(sorted(f for f in work.iterdir() if f.suffix in (".jsonl", ".json", ".toml")), work)
    (out / "results.tar.xz").write_bytes(results)
    left, count = ALTOGETHER - len(results), MOST_FILES - 1
    folders = sorted((work / "runs").glob("*")) if (work / "runs").exists() else []
    sizes = {folder: sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) for folder in folders}
    for folder in sorted(folders, key=lambda each: sizes[each]):
        data = pack([folder], work) if count and sizes[folder] < 4 * LARGEST else b""
        if not data or len(data) > min(LARGEST, left):
            yield f"{folder.name} does not fit ({sizes[folder] / 1e6:.0f} MB); elsewhere it begins anew"
            continue
        (out / f"unfinished-{MOST_FILES - count}.tar.xz").write_bytes(data)
        left, count = left - len(data), count - 1


def main() -> None:
    arguments = argparse.ArgumentParser(description="the papers' tables in pieces")
    arguments.add_argument("--plan", action="store_true")
    arguments.add_argument("--minutes", type=float, default=8.5)
    arguments.add_argument("--work", type=Path, default=Path("runs/papers"))
    arguments.add_argument("--bring", type=Path, help="what the last piece brought back")
    arguments.add_argument("--out", type=Path, help="what is brought back")
    arguments.add_argument("--only", default="", help="names of items, with commas")
    given = arguments.parse_args()
    wanted = [name for name in given.only.split(",") if name]
    items = [item for item in QUEUE if not wanted or item.name in wanted]
    given.work.mkdir(parents=True, exist_ok=True)
    if given.bring:
        bring(given.bring, given.work)
    if given.plan:
        for line in plan(items, given.work):
            print(line)
        return
    try:
        with stopping.heed_signals(lambda how: print(how, flush=True)), stopping.within(60 * given.minutes) as left:
            for item in items:
                if left() < 5:
                    break
                print(f"== {item.name}, {left():.0f} s are left", flush=True)
                try:
                    reproduce(asked(item, given.work, left() / 60), lambda text: print(text, flush=True))
                except UndriftError as error:
                    print(f"{item.name}: {error}", flush=True)
    finally:
        if given.out:
            for line in send_back(given.work, given.out):
                print(line)
    print("free disk:", shutil.disk_usage(given.work).free >> 30, "GiB")


if __name__ == "__main__":
    main()
