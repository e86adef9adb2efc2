"""One process beside several, each with a GPU of its own: clients shared out, DEF's workers, blocks of a network, islands.

    python benchmarks/multi_gpu.py [--ranks N] [--parts run,dp,pipe,islands] [--rounds T] [--json FILE]

Without --ranks there are as many as GPUs. With fewer than two GPUs the ranks are two processes on the CPU over gloo, and the
networks are small: a dry run, which says whether everything starts and agrees, and nothing about speed. Each part is run by one
process and by all ranks, one after the other. Printed for both: the median seconds of a round (of a step, for islands) after the
first two, and how far the last losses are apart. `islands` has DDP in place of one process, and says what each sends in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import undrift
from undrift.models.gpt import build

EVERY = 10  # local steps between two exchanges of islands
LARGE = {
    "run": "run --algorithm scaffold --dataset cifar10 --model resnet20-gn --clients 64 --cohort 64 --steps 10",
    "dp": "dp --method def --compressor rbgs --dataset cifar10 --model resnet20 --batch 128 --steps 50",
    "pipe": "pipe --method dsp --dataset cifar10 --model resnet164 --batch 128 --steps 50",
}
SMALL = {
    "run": "run --algorithm scaffold --model logreg --clients 8 --cohort 8 --steps 2 --device cpu",
    "dp": "dp --method def --compressor rbgs --model logreg --batch 16 --steps 3 --device cpu",
    "pipe": "pipe --method dsp --model mlp --batch 16 --steps 3 --device cpu",
}
PARTS = (*LARGE, "islands")
Found = dict[str, Any]


def launched(ranks: int) -> list[str]:
    """Python on so many ranks."""
    alone = [sys.executable, "-m"]
    return (
        alone if ranks == 1 else [*alone, "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    )


def do(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


def timed(part: str, ranks: int, all_ranks: int, rounds: int, small: bool, folder: Path) -> Found:
    """Seconds of a round and the last loss of a command on so many ranks; one rank plays the workers or blocks of all."""
    out = folder / f"{part}-{ranks}"
    given = (SMALL if small else LARGE)[part].split()
    cut = folder / "pipe-1" / "run.toml"  # where one process has cut the network, which it measures
    more = {"run": [], "dp": ["--workers", str(all_ranks)], "pipe": ["--blocks", str(all_ranks)]}[part]
    if part == "dp" and ranks > 1:
        more = []  # the ranks are the workers
    if part == "pipe" and ranks > 1:
        more = ["--cuts", str(tomllib.loads(cut.read_text())["set"]["cuts"])]
    lasting = ["--rounds", str(rounds), "--eval-every", str(rounds), "--out", str(out)]
    do([*launched(ranks), "undrift", *given, *more, *lasting])
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return {"seconds": statistics.median(r["seconds"] for r in records[2:]), "loss": records[-1]["loss"]}


def island(method: str, steps: int, small: bool, out: str) -> None:
    """One rank of a loop of one's own: DDP, or islands; rank 0 writes what it found."""
    gpu = torch.cuda.is_available() and not small
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model: nn.Module = build(
        (16 if small else 256,),
        64,
        **({"depth": 1, "width": 16, "heads": 2} if small else {"depth": 6, "width": 384, "heads": 6}),
    )
    model = model.to(device)
    outer = None if method == "ddp" else undrift.LocalSteps(model, **settings_of(method))
    trained = DistributedDataParallel(model) if outer is None else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    random, seconds, losses = torch.Generator().manual_seed(rank), [], []
    for _ in range(steps):
        began = time.perf_counter()
        ids = (
            torch.randint(0, 64, (4 if small else 32, 17 if small else 257), generator=random)
            .sort(-1)
            .values.to(device)
        )
        optimizer.zero_grad()
        loss = F.cross_entropy(trained(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if outer is not None:
            outer.correct()
        optimizer.step()
        if outer is not None:
            outer.step()
        losses.append(float(loss))  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    warm = seconds[2 * EVERY :]
    each = sum(warm) / len(warm)  # exchanges are in it
    parameters = sum(p.numel() for p in model.parameters())
    sent = 2 * (ranks - 1) / ranks * parameters * 4 if outer is None else outer.sent / ranks / steps
    if rank == 0:
        Path(out).write_text(json.dumps({"seconds": each, "loss": sum(losses[-EVERY:]) / EVERY, "bytes": round(sent)}))
    dist.destroy_process_group()


def settings_of(method: str) -> dict[str, Any]:
    """The arguments of LocalSteps."""
    name, _, compress = method.partition(" ")
    every = 2 * EVERY if name == "streaming-diloco" else EVERY
    return {"algorithm": name, "every": every, "compress": compress} | (
        {"set": {"fragments": 2}} if name == "streaming-diloco" else {}
    )


def islands(ranks: int, steps: int, small: bool, folder: Path) -> dict[str, Found]:
    found = {}
    for method in ("ddp", "diloco", "diloco int4", "streaming-diloco", "sparseloco"):
        out = folder / f"{method}.json"
        start = [
            *launched(ranks)[:-1],
            str(Path(__file__).resolve()),
            "--island",
            method,
            "--rounds",
            str(steps),
            "--out",
            str(out),
        ]
        do([*start, *(["--small"] if small else [])])
        found[method] = json.loads(out.read_text())
    return found


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--ranks", type=int, default=0)
    flags.add_argument("--parts", default=",".join(PARTS))
    flags.add_argument(
        "--rounds", type=int, default=0, help="rounds of each part; islands make ten times as many steps"
    )
    flags.add_argument("--json", type=Path)
    for name in ("--island", "--out"):
        flags.add_argument(name, help=argparse.SUPPRESS)
    flags.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.island:
        island(given.island, given.rounds, given.small, given.out)
        return
    gpus = torch.cuda.device_count()
    small = gpus < 2
    ranks, rounds = given.ranks or max(2, gpus), given.rounds or (4 if small else 10)
    if rounds < 3:
        flags.error("--rounds must be at least 3: the first two are not timed")
    if ranks < 2 or (not small and ranks > gpus):
        flags.error(f"--ranks must be at least 2{'' if small else f' and at most the {gpus} GPUs'}")
    print(
        f"{ranks} processes "
        + (f"on {gpus} GPUs" if not small else "on the CPU over gloo: a dry run, of which no time says anything")
    )
    result: Found = {"ranks": ranks, "gpus": gpus, "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for part in given.parts.split(","):
            if part == "islands":
                result[part] = islands(ranks, 10 * rounds, small, folder)
                for method, one in result[part].items():
                    paid = f"{1e3 * one['seconds']:9.2f} ms and {one['bytes']:,} bytes a rank and step"
                    print(f"islands {method:18} {paid}, loss {one['loss']:.4f}")
                continue
            alone, together = (timed(part, n, ranks, rounds, small, folder) for n in (1, ranks))
            result[part] = {"one": alone, "all": together}
            print(
                f"{part:7} {alone['seconds']:8.3f} s a round by one process, {together['seconds']:8.3f} s by {ranks}; "
                f"last losses {alone['loss']:.6f} and {together['loss']:.6f}"
            )
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
