"""What slow moments of single devices cost: real processes with injected delays, beside virtual time and the thesis.

    python benchmarks/straggle.py [--batches 60] [--json FILE]

Three processes hold a block each. A block's work is a small linear layer and a sleep, 30 ms in the forward and 60 ms in
the backward, so that a busy machine hardly matters; with probability 1/3 a block's whole step, drawn by block and batch, is
longer by 20, 50, 100 or 150 %. Every method is slowed by the same draws and compared with itself undisturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipe import launch
from torch import Tensor, nn

from undrift.core import ranks
from undrift.core.streams import Purpose, stream
from undrift.pipeline.block import PipelineBlock
from undrift.pipeline.engines import build_engine, schedule_of
from undrift.pipeline.micro import MicroBatches
from undrift.pipeline.processes import Processes
from undrift.pipeline.schedule import Schedule
from undrift.pipeline.split import cut_model
from undrift.pipeline.straggle import CHANCE, SLOWDOWNS, THESIS, increase

BLOCKS, SECONDS, MICRO = 3, 0.030, 3
METHODS = ["fr", f"1f1b M={MICRO}", "1f1b M=6", *(f"dsp {queues}" for queues in THESIS if not queues.startswith("0"))]


class Device(nn.Module):
    """Takes its time in both directions; how much longer than usual depends on the block and the batch."""

    def __init__(self, k: int, micro: int) -> None:
        super().__init__()
        self.k, self.micro, self.slowdown, self.passes = k, micro, 0.0, 0

    def forward(self, h: Tensor) -> Tensor:
        batch = self.passes // self.micro
        slow = (stream(0, Purpose.SLOWNESS, self.k, batch) >> 11) * 2.0**-53 < CHANCE
        seconds = SECONDS / self.micro * (1 + self.slowdown * slow)
        time.sleep(seconds)
        if torch.is_grad_enabled():  # the pass with a graph ends a block's step
            self.passes += 1
        found: Tensor = Sleep.apply(h, 2 * seconds)  # type: ignore[no-untyped-call]
        return found


class Sleep(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


def measure(name: str, slowdown: float, batches: int) -> float:
    """Seconds for so many batches, all through."""
    method, _, how = name.partition(" ")
    micro = int(how.removeprefix("M=")) if how.startswith("M=") else 1
    torch.manual_seed(0)
    model = nn.Sequential()
    devices = []
    for k in range(BLOCKS):
        devices.append(Device(k, micro))
        model.append(nn.Linear(16, 16)).append(devices[-1])
    cut = cut_model(model, [2, 4])
    schedule = Schedule.bp(BLOCKS) if micro > 1 else schedule_of(method, BLOCKS, how)
    found = build_engine(
        PipelineBlock, cut, schedule, lambda p: torch.optim.SGD(p, 0.01), F.cross_entropy, None, 0, torch.device("cpu")
    )
    assert isinstance(found, Processes)
    run: Any = MicroBatches(found, method, micro, F.cross_entropy) if micro > 1 else found
    batch = torch.randn(12, 16), torch.randint(16, (12,))
    run.step(*batch)  # makes the connections
    run.flush()
    for device in devices:
        device.passes, device.slowdown = 0, slowdown
    dist.barrier()
    began = time.perf_counter()
    for _ in range(batches):
        run.step(*batch)
    run.flush()
    dist.barrier()
    return time.perf_counter() - began


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--batches", type=int, default=60)
    asked.add_argument("--json", type=Path)
    asked.add_argument("--rows", help=argparse.SUPPRESS)
    arguments = asked.parse_args()
    if arguments.rows:
        torch.set_num_threads(1)
        with ranks.join():
            found = {n: [measure(n, s / 100, arguments.batches) for s in (0, *SLOWDOWNS)] for n in METHODS}
        if os.environ["RANK"] == "0":
            Path(arguments.rows).write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        launch([__file__, *sys.argv[1:], "--rows", str(rows)], BLOCKS, 1)
        found = json.loads(rows.read_text())
    show(found, arguments.batches)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def show(found: dict[str, list[float]], batches: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "method",
        "ms a batch",
        *(f"+{s} %" for s in SLOWDOWNS),
        title="longer by, in per cent: measured (virtual time; thesis)",
    )
    for name, (usual, *slow) in found.items():
        queues = str(Schedule.fr(BLOCKS)) if name == "fr" else name.partition(" ")[2]
        cells = [f"{100 * (seconds / usual - 1):.1f}" for seconds in slow]
        if queues in THESIS:
            schedule = Schedule.parse(queues)
            virtual = [sum(increase(schedule, s, 1000, seed) for seed in range(3)) / 3 for s in SLOWDOWNS]
            cells = [f"{c} ({v:.1f}; {t:.1f})" for c, v, t in zip(cells, virtual, THESIS[queues], strict=True)]
        table.add_row(name, f"{1000 * usual / batches:.1f}", *cells)
    Console(width=None if sys.stdout.isatty() else 130).print(table)


if __name__ == "__main__":
    main()
