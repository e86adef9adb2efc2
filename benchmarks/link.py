"""Data-parallel training over a slow link, on one machine: DEF beside DDP, its fp16 hook, PowerSGD and Top-K.

    python benchmarks/link.py [--rates none,1gbit,100mbit] [--methods ...] [--json FILE]

Two network namespaces, joined by a virtual switch whose lines have a limited rate, hold one gloo rank each; latency is not
simulated. The network has 5.82 million parameters (784-2048-2048-10), the batch 64 samples a rank, the data are the
package's digits enlarged to 28 x 28. Printed: the median of the milliseconds of a step (measured in turns, so that a busy
moment meets all), bytes that a rank sends in a step (as the device counts them), steps until the model's loss on the test
samples is below a target (measured without a limit; all methods with one learning rate), and steps times milliseconds.

It needs root for the namespaces, ip and tc on the PATH, and says so where it has to skip.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BURST = {"100mbit": "64kb", "1gbit": "256kb"}
METHODS = ["ddp", "fp16", "powersgd1", "powersgd2", "powersgd4", "topk64", "def16", "def64", "def256", "def1024"]
WARM, STEPS = 3, 4  # steps before the clock runs, and in a turn


def missing() -> list[str]:
    """What a limited link needs and this machine lacks."""
    tools = [f"{tool} (package iproute2)" for tool in ("ip", "tc") if not shutil.which(tool)]
    return ["root", *tools] if os.geteuid() else tools


@contextlib.contextmanager
def link(rate: str, count: int = 2) -> Iterator[list[tuple[str, str]]]:
    """Namespaces joined by a switch in one more, and the device in each: 10.77.0.1, .2, ...

    A line has two ends, and an end limits what it sends: the device what leaves its namespace, the port what arrives.
    """
    own = f"undrift{os.getpid()}"
    switch, spaces = f"{own}-switch", [(f"{own}-{n}", f"v{n}") for n in range(count)]
    limit = ("rate", rate, "burst", BURST.get(rate, "256kb"), "latency", "20ms")
    try:
        for space in (switch, *(space for space, _ in spaces)):
            do("ip", "netns", "add", space)
        do("ip", "-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        for number, (space, device) in enumerate(spaces, 1):
            port = f"port{number}"
            do("ip", "link", "add", device, "netns", space, "type", "veth", "peer", "name", port, "netns", switch)
            do("ip", "-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", device)
            do("ip", "-n", space, "link", "set", "lo", "up")
            do("ip", "-n", space, "link", "set", device, "up")
            do("ip", "-n", switch, "link", "set", port, "up", "master", "bridge")
            for where, end in ((space, device), (switch, port)) if rate != "none" else ():
                do("tc", "-n", where, "qdisc", "add", "dev", end, "root", "tbf", *limit)
        yield spaces
    finally:
        for space in (switch, *(space for space, _ in spaces)):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def measured(rate: str, arguments: argparse.Namespace, converge: bool) -> dict[str, Any]:
    """What two ranks on such a link find, method by method."""
    with link(rate) as spaces, tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, (space, device) in enumerate(spaces):
            out = Path(folder) / f"{rank}.json"
            command = [
                sys.executable,
                __file__,
                "--rank",
                str(rank),
                "--json",
                str(out),
                "--methods",
                arguments.methods,
            ]
            command += ["--lr", str(arguments.lr), "--target", str(arguments.target), "--most", str(arguments.most)]
            command += ["--turns", str(arguments.turns)]
            environment = os.environ | {
                "GLOO_SOCKET_IFNAME": device, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29521", "WORLD_SIZE": "2",
                "RANK": str(rank), "OMP_NUM_THREADS": "1", "DEVICE": device,
            }  # fmt: skip
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", space, *command, *(["--converge"] if converge else [])], env=environment
                )
            )
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise OSError(f"the ranks on a link with rate {rate} ended with codes {codes}")
        found: dict[str, Any] = json.loads((Path(folder) / "0.json").read_text())
        return found


def be_a_rank(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    methods = arguments.methods.split(",")
    images, labels, test, test_labels = digits()
    rank = dist.get_rank()

    def passed() -> int:
        rows = Path("/proc/self/net/dev").read_text().splitlines()
        (line,) = (row for row in rows if row.strip().startswith(f"{os.environ['DEVICE']}:"))
        return int(line.split()[9])

    def step(model: Any, optimizer: Any, t: int) -> None:
        rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(t))[64 * rank : 64 * (rank + 1)]
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()

    found: dict[str, Any] = {name: {"ms": [], "bytes": 0, "steps": None, "loss": None} for name in methods}
    made = {name: trainer(name, arguments.lr) for name in methods}
    for turn in range(arguments.turns):
        for name in methods:
            model, optimizer = made[name]
            for t in range(WARM if turn == 0 else 1):
                step(model, optimizer, t)
            dist.barrier()
            before = passed()
            for t in range(STEPS):
                began = time.perf_counter()
                step(model, optimizer, 100 * turn + t)
                found[name]["ms"].append((time.perf_counter() - began) * 1e3)
            found[name]["bytes"] += (passed() - before) / (STEPS * arguments.turns)
    for name in methods if arguments.converge else []:
        del made[name]
        model, optimizer = trainer(name, arguments.lr)
        for t in range(arguments.most):
            step(model, optimizer, t)
            if (t + 1) % 5 == 0:
                evaluating = getattr(optimizer, "evaluating", contextlib.nullcontext)
                with evaluating(), torch.no_grad():
                    loss = float(F.cross_entropy(model(test), test_labels))
                found[name]["loss"] = loss
                if loss < arguments.target:
                    found[name]["steps"] = t + 1
                    break
    Path(arguments.json).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def trainer(name: str, lr: float) -> tuple[Any, Any]:
    """A model and its optimizer, as a user of the method would make them."""
    import torch
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    import undrift

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    single = name.startswith("powersgd")  # it aborts on gloo with more than one bucket
    model = DistributedDataParallel(net, bucket_cap_mb=1000 if single else 25)
    if name.startswith("def"):
        return model, undrift.DEF(model, lr=lr, momentum=0.9, ratio=int(name[3:]), lam=0.3, compressor="rbgs")
    if name.startswith("topk"):
        return model, undrift.EF(model, lr=lr, momentum=0.9, ratio=int(name[4:]), compressor="topk")
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif single:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=int(name[8:]), start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def digits() -> Any:
    import torch
    import torch.nn.functional as F

    from undrift.data.load import load_dataset

    data = load_dataset("digits")

    def enlarged(x: Any) -> Any:
        pictures = torch.tensor(x[:]).float().view(len(x), 1, 8, 8) / 255
        return F.interpolate(pictures, (28, 28), mode="bilinear").flatten(1) - 0.3

    labels = torch.tensor(data.y_train).long(), torch.tensor(data.y_test).long()
    return enlarged(data.x_train), labels[0], enlarged(data.x_test), labels[1]


def table(found: dict[str, dict[str, Any]], rates: list[str], shown: Callable[[str], None] = print) -> None:
    first = found[rates[0]]
    shown("| method | kB a step | steps to target | " + " | ".join(f"ms at {rate}" for rate in rates) + " | "
          + " | ".join(f"s to target at {rate}" for rate in rates) + " |")  # fmt: skip
    shown("| --- " * (3 + 2 * len(rates)) + "|")
    for name in first:
        ms = [statistics.median(found[rate][name]["ms"]) for rate in rates]
        steps = first[name]["steps"]
        ends = [f"{steps * each / 1e3:.1f}" if steps else "–" for each in ms]
        reached = steps or ("–" if first[name]["loss"] is None else f"not ({first[name]['loss']:.2f})")
        cells = [name, f"{first[name]['bytes'] / 1e3:,.0f}", reached, *(f"{each:.0f}" for each in ms), *ends]
        shown("| " + " | ".join(map(str, cells)) + " |")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rates", default="none,1gbit,100mbit")
    options.add_argument("--methods", default=",".join(METHODS))
    options.add_argument("--lr", type=float, default=0.02)
    options.add_argument("--target", type=float, default=0.3)
    options.add_argument("--most", type=int, default=400, help="steps after which the target counts as not reached")
    options.add_argument("--turns", type=int, default=3, help="how often each method is timed")
    options.add_argument("--no-target", action="store_true", help="only milliseconds and bytes")
    options.add_argument("--json", default="")
    options.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    options.add_argument("--converge", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.rank >= 0:
        be_a_rank(arguments)
        return 0
    if missing():
        print(f"skipped: a link with a limited rate needs {', '.join(missing())}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are taken down
    rates = arguments.rates.split(",")
    try:
        found = {rate: measured(rate, arguments, not arguments.no_target and rate == rates[0]) for rate in rates}
    except OSError as error:
        print(f"skipped: {error}")
        return 0
    table(found, rates)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
