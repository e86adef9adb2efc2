"""GradMA-S's server step at a million parameters beside the time to read the server's memory once, in one run.

    python benchmarks/memory.py [--device cpu|cuda] [--json FILE]

100 slots, 10 new updates a round, 150 clients. The step is the server's whole share of a round as the engines call it
(`round.server_part`): the mean of the updates, momentum, who is remembered, the new rows and their products, the
quadratic programme begun with the last active set, the projection; on a GPU it is replayed as a CUDA graph, as in a
run. The updates are those of clients with unequal data: a
common direction, ten directions of which every client has its own mixture, and noise; some constraints are then active.
Reading is the sum of all entries of the memory. Both are medians over the same rounds, with the same threads.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from undrift.algorithms.base import Cohort, Up
from undrift.algorithms.gradma_s import GradMAS
from undrift.core.trees import leaves, map_leaves
from undrift.jobs.course import commit
from undrift.oracle.net import Net
from undrift.round.order import ServerState, first_state
from undrift.simulate.choose import keep_freed_memory
from undrift.simulate.graphs import record_graph

CLIENTS, COHORT, SLOTS, SIDE, CLASSES = 150, 10, 100, 1000, 10  # 1000 * 1000 = 10^6 parameters


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    work()
    wait()
    return 1e3 * (time.perf_counter() - began)


def measure(device: torch.device, rounds: int, warm: int) -> dict[str, object]:
    if device.type == "cpu":
        keep_freed_memory()  # as the simulator does
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    net = Net(nn.Linear(SIDE, SIDE, bias=False)).to(device)
    alg = GradMAS(slots=SLOTS)
    x0, buffers = (v.to(device) for v in net.start())
    state = first_state(alg, net, x0, buffers, CLIENTS)
    directions, mixture = normal(1 + CLASSES, len(x0)), normal(CLIENTS, CLASSES)

    ids, d, ones = torch.arange(COHORT, device=device), normal(COHORT, len(x0)), torch.ones(COHORT, 1, device=device)
    up = Up(d)
    cohort = Cohort(ids, torch.arange(COHORT, device=device), ones / COHORT, ones, 0.1, CLIENTS, net.layout)

    def server_part() -> ServerState:
        mean, companion = alg.gather(state.companion, up, cohort)
        x, server = alg.server_step(state.server, state.x, mean, up, cohort)
        return ServerState(x, state.buffers, server, companion)

    def step() -> None:
        nonlocal state
        state = server_part()

    def in_place() -> None:
        new = server_part()
        for old, tensor in zip(leaves(state), leaves(new), strict=True):
            if old.data_ptr() != tensor.data_ptr():  # the memory's rows are written where they are
                old.copy_(tensor)

    if device.type == "cuda":  # everything lies on the device, and the step is recorded, as in the engine
        state = map_leaves(lambda t: t.to(device, copy=True), state)
        step = record_graph(in_place, leaves(state), device)
    steps, reads, active = [], [], []
    for t in range(warm + rounds):
        ids.copy_(torch.randperm(CLIENTS, generator=torch.Generator().manual_seed(t))[:COHORT].sort().values)
        share = torch.cat([torch.full((COHORT, 1), 0.3, device=device), mixture[ids]], 1)
        d.copy_(1e-3 * (share @ directions + normal(COHORT, len(x0))))
        took = milliseconds(step, device)
        read = milliseconds(partial(torch.sum, state.server.memory.rows), device)
        if t >= warm:
            steps.append(took)
            reads.append(read)
            active.append(int(state.server.active.sum()))
    assert bool((state.server.memory.ids >= 0).all()), "the memory is full"
    result = {"server_step_ms": statistics.median(steps), "read_ms": statistics.median(reads)}
    quartiles = {"server_step": statistics.quantiles(steps, n=4)[::2], "read": statistics.quantiles(reads, n=4)[::2]}
    facts = {name: int(value) for name, value in alg.facts(state.server).items()}
    return result | {
        "ratio": result["server_step_ms"] / result["read_ms"], "quartiles": quartiles,
        "active": [min(active), max(active)], "failed": facts["qp_failed"], "evictions": facts["evictions"],
    }  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--warm", type=int, default=40, help="rounds before, which fill the memory")
    arguments.add_argument("--json", type=Path, help="write the results to this file too")
    chosen = arguments.parse_args()
    device = torch.device(chosen.device)
    found = measure(device, chosen.rounds, chosen.warm)
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {chosen.device}, {where}, {torch.get_num_threads()} threads")
    print(f"GradMA-S's server, 10^6 parameters, {SLOTS} slots, {COHORT} updates a round, {chosen.rounds} rounds")
    for name, key in (("server step", "server_step"), ("read the memory once", "read")):
        low, high = found["quartiles"][key]  # type: ignore[index]
        print(f"{name:22}{found[key + '_ms']:10.2f} ms   quartiles {low:.2f} to {high:.2f}")
    print(f"ratio {found['ratio']:.2f}; active constraints {found['active']}, programmes that failed {found['failed']}")
    line = json.dumps({"benchmark": "memory", "device": where, "torch": torch.__version__, "commit": commit(), **found})
    print(line)
    if chosen.json:
        chosen.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
