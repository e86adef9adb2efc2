"""Milliseconds a batch of one model in K blocks: BP, BP-K, GPipe, 1F1B, FR and DSP on the same split, in one run.

    python benchmarks/pipe.py [--blocks 2] [--threads 1] [--link none,1gbit,100mbit] [--models mlp,resnet20] [--json FILE]

K processes with `threads` threads each, pinned to cores of their own, stand for K devices; "bp" is one of them alone, "bp all
threads" one process with all cores. The split is the one with which DSP's blocks are balanced (--split even: equally many
layers). Times are medians over turns in which every method has its go, so that a busy moment meets all, with full queues.
Idle is the share of the wall-clock time in which a block, on average, computes nothing; MB is by how much the process of
the largest block grows. A link's rate is limited between network namespaces, which need root, ip and tc; latency is not
simulated. PyTorch's 1F1B refuses fewer micro-batches than blocks. ResNet-20 cannot be cut into four equal parts: with four
blocks, --models mlp,resnet56 is the fairer choice.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from link import link as limited
from link import missing
from torch import Tensor, nn

from undrift.core import ranks
from undrift.models._resnet import cifar_resnet
from undrift.pipeline.block import PipelineBlock
from undrift.pipeline.engines import METHODS, build_engine, schedule_of
from undrift.pipeline.micro import MicroBatches
from undrift.pipeline.processes import Processes
from undrift.pipeline.schedule import Schedule
from undrift.pipeline.simulator import Simulator
from undrift.pipeline.split import balance_model, cut_model, layers_of

CPU = torch.device("cpu")
SIZES = {"mlp": (16, 128), "resnet20": (8, 64), "resnet56": (8, 64)}  # small and large batches


def network(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    if name.startswith("resnet"):
        return cifar_resnet(name, depth=int(name.removeprefix("resnet")))((3, 32, 32), 10)
    hidden = [layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(1024, 10))


def batch_of(name: str, size: int) -> tuple[Tensor, Tensor]:
    shape = (3, 32, 32) if name.startswith("resnet") else (1024,)
    return torch.randn(size, *shape), torch.randint(10, (size,))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9)


def contestants(blocks: int, size: int) -> list[str]:
    micro = [f"{kind} M={m}" for kind in ("gpipe", "1f1b") for m in (1, 4, 8) if size % m == 0]
    return ["bp", "bp all threads", "bp-k", *micro, "fr", "dsp", f"dsp {longer(blocks)}"]


def longer(blocks: int) -> str:
    """Queues longer than the shortest: p twice and m one and a half times as long, so that q stays 1."""
    p = (2,) * (blocks - 1) + (0,)
    return str(Schedule(p, tuple(3 * (blocks - 1 - k) for k in range(blocks))))


class Contestant:
    """A method on this rank, and the time that its block computed."""

    def __init__(self, name: str, model: str, cuts: list[int]) -> None:
        self.name, self.busy = name, 0.0
        method, _, how = name.partition(" ")
        self.alone = method == "bp"
        self.micro = int(how.removeprefix("M=")) if how.startswith("M=") else 0
        cut = cut_model(network(model), [] if self.alone else cuts)
        schedule = schedule_of(method, len(cut), how if ";" in how else "")
        self.fill = schedule.backward_lag[0] + 2
        kind = METHODS[method].block
        if self.alone:
            self.engine: Any = Simulator([kind(cut[0].module, 0, 0, sgd, F.cross_entropy)], schedule, CPU)
            self.watch(self.engine.blocks[0])
            return
        found = build_engine(kind, cut, schedule, sgd, F.cross_entropy, None, 0, CPU)
        assert isinstance(found, Processes)
        self.engine = MicroBatches(found, method, self.micro, F.cross_entropy) if self.micro else found
        self.watch(found.block)

    def watch(self, block: PipelineBlock) -> None:
        for target, names in ((block, ("forward", "backward")), (block, ("update",) if self.micro else ())):
            for each in names:
                setattr(target, each, self.timed(getattr(target, each)))

    def watch_stage(self) -> None:
        stage = self.engine.schedule._stage
        for each in ("forward_one_chunk", "backward_one_chunk"):
            setattr(stage, each, self.timed(getattr(stage, each)))

    def timed(self, work: Any) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*arguments, **options)
            finally:
                self.busy += time.perf_counter() - began

        return timed

    def go(self, batch: tuple[Tensor, Tensor], steps: int) -> tuple[float, float]:
        """Seconds a batch, and this rank's share of them in which it computed."""
        dist.barrier()
        self.busy, began = 0.0, time.perf_counter()
        if not self.alone or ranks.rank() == 0:
            for _ in range(steps):
                self.engine.step(*batch)
        dist.barrier()
        wall = time.perf_counter() - began
        return wall / steps, self.busy / wall


def prepared(
    name: str, model: str, cuts: list[int], batch: tuple[Tensor, Tensor]
) -> tuple[Contestant, float, int, float]:
    """A contestant with full queues, its seconds a batch, by how many bytes this process grew at most for it, and the
    bytes that it sends a batch."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    contestant = Contestant(name, model, cuts)
    contestant.go(batch, contestant.fill)
    if contestant.micro:
        contestant.watch_stage()
    sent = contestant.engine.bytes_up + contestant.engine.bytes_down
    seconds, _ = contestant.go(batch, 2)
    sent = contestant.engine.bytes_up + contestant.engine.bytes_down - sent
    return contestant, seconds, status("VmHWM") - before, sent / 2


def status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def measure(arguments: argparse.Namespace) -> None:
    """One rank of the race; rank 0 writes what came out."""
    rank, blocks, threads = int(os.environ["RANK"]), arguments.blocks, arguments.threads
    cores = sorted(os.sched_getaffinity(0))
    mine = set(cores[rank * threads : (rank + 1) * threads]) or set(cores)
    os.sched_setaffinity(0, mine)
    torch.set_num_threads(threads)
    rows = []
    with ranks.join():
        for model in arguments.models.split(","):
            for size in SIZES[model]:
                rows += race(arguments, model, size, blocks, threads, cores, mine)
                if rank == 0:
                    Path(arguments.rows).write_text(json.dumps(rows))
                    print(f"{model}, batch {size}, link {arguments.link}: done", flush=True)


def race(
    arguments: argparse.Namespace, model: str, size: int, blocks: int, threads: int, cores: list[int], mine: set[int]
) -> list[dict[str, Any]]:
    batch = batch_of(model, size)
    if arguments.split == "even":
        count = len(layers_of(network(model)))
        cuts = [count * k // blocks for k in range(1, blocks)]
    else:
        cuts = list(balance_model(network(model), blocks, *batch, F.cross_entropy, times=9).cuts)
    rows, running = [], []
    for name in contestants(blocks, size):
        if name.startswith("1f1b") and int(name.partition("=")[2]) < blocks:
            continue  # PyTorch refuses fewer micro-batches than stages
        contestant, seconds, peak, sent = prepared(name, model, cuts, batch)
        memory: list[Any] = [None] * blocks
        dist.all_gather_object(memory, (peak, sent))
        steps = max(2, int(arguments.seconds / ranks.first_rank_says(seconds)))
        running.append((contestant, steps, memory))
    found: dict[str, list[Any]] = {contestant.name: [] for contestant, _, _ in running}
    for _ in range(arguments.turns):
        for contestant, steps, _ in running:
            wide = contestant.name == "bp all threads" and ranks.rank() == 0
            if wide:
                os.sched_setaffinity(0, set(cores))
                torch.set_num_threads(len(cores))
            once = contestant.go(batch, steps)
            if wide:
                os.sched_setaffinity(0, mine)
                torch.set_num_threads(threads)
            each: list[Any] = [None] * blocks
            dist.all_gather_object(each, once)
            found[contestant.name].append(each)
    for contestant, _, memory in running:
        turns = found[contestant.name]
        used = 1 if contestant.alone else blocks
        rows.append(
            {
                "model": model, "batch": size, "link": arguments.link, "method": contestant.name, "cuts": cuts,
                "ms": 1000 * statistics.median(each[0][0] for each in turns),
                "spread": 1000 * (max(each[0][0] for each in turns) - min(each[0][0] for each in turns)),
                "idle": 1 - statistics.median(sum(busy for _, busy in each[:used]) / used for each in turns),
                "busy": [statistics.median(each[k][1] for each in turns) for k in range(used)],
                "kB": 0.0 if contestant.alone else sum(sent for _, sent in memory) / 1000,
                "MB": max(peak for peak, _ in memory[:used]) / 1e6,
            }
        )  # fmt: skip
    return rows


def launch(command: list[str], blocks: int, threads: int, link: str = "none") -> None:
    """Run a command as all the ranks of one group, with or without a limited link."""
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(limited(link, blocks)) if link != "none" else []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {
            "WORLD_SIZE": str(blocks), "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads),
            "MASTER_ADDR": "10.77.0.1" if spaces else "127.0.0.1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        running: list[subprocess.Popen[bytes]] = []
        stack.callback(end, running)
        for rank in range(blocks):
            inside = ["ip", "netns", "exec", spaces[rank][0]] if spaces else []
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {"GLOO_SOCKET_IFNAME": spaces[rank][1]} if spaces else {}
            running.append(subprocess.Popen([*inside, sys.executable, *command], env=os.environ | common | own))
        codes = [process.wait() for process in running]
        if any(codes):
            raise SystemExit("a rank failed")


def end(running: list[subprocess.Popen[bytes]]) -> None:
    """No rank outlives the benchmark, nor the namespace that it is in."""
    for process in running:
        process.kill()
        process.wait()


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    for model, size, link in dict.fromkeys((r["model"], r["batch"], r["link"]) for r in rows):
        these = [r for r in rows if (r["model"], r["batch"], r["link"]) == (model, size, link)]
        bp = next(r["ms"] for r in these if r["method"] == "bp")
        title = f"{model}, batch {size}, link {link}, cut at {these[0]['cuts']}"
        shown = Table("method", "ms a batch", "spread", "over bp", "idle", "kB a batch", "MB", title=title)
        for r in these:
            shown.add_row(
                r["method"], f"{r['ms']:.1f}", f"{r['spread']:.1f}", f"{bp / r['ms']:.2f}", f"{100 * r['idle']:.0f} %",
                f"{r['kB']:.0f}", f"{r['MB']:.0f}",
            )  # fmt: skip
        console.print(shown)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--blocks", type=int, default=2)
    asked.add_argument("--threads", type=int, default=0, help="of each block [cores / blocks]")
    asked.add_argument("--models", default="mlp,resnet20")
    asked.add_argument("--split", default="dsp", choices=("dsp", "even"))
    asked.add_argument("--link", default="none")
    asked.add_argument("--turns", type=int, default=7)
    asked.add_argument("--seconds", type=float, default=1.0, help="of each method's turn")
    asked.add_argument("--json", type=Path)
    asked.add_argument("--rows", help=argparse.SUPPRESS)
    arguments = asked.parse_args()
    arguments.threads = arguments.threads or max(1, len(os.sched_getaffinity(0)) // arguments.blocks)
    if arguments.rows:
        measure(arguments)
        return
    print(
        f"{arguments.blocks} blocks, {arguments.threads} threads each, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the ranks and namespaces are taken down
    rows: list[dict[str, Any]] = []
    for link in arguments.link.split(","):
        if link != "none" and missing():
            print(f"link {link}: skipped, a limited rate needs {', '.join(missing())}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "rows.json"
            command = [__file__, *sys.argv[1:], "--link", link, "--rows", str(found)]
            try:
                launch(command, arguments.blocks, arguments.threads, link)
            except OSError as error:
                print(f"link {link}: skipped, {error}")
                continue
            new = json.loads(found.read_text())
        show(new)
        rows += new
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
