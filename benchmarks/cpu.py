"""One FedAvg round on the CPU: undrift beside a plain per-client PyTorch loop, pfl-research and Flower, in one run.

    python benchmarks/cpu.py [--json FILE]      # needs: pip install 'undrift[bench]'; what is not installed is left out

100 clients, 10 a round, 5 local steps, batch 64; the MLP on MNIST-shaped and LeNet-5 on CIFAR-shaped data, and models that are
not computed in C as a whole (`BESIDE_THE_LOOP`), on which only undrift and the plain loop are run. Each rival
(benchmarks/rivals.py) has a process of its own (undrift changes how memory is handed back, which would help the others
too); they take turns, some rounds each, so that the machine's moods meet all of them. The figures are medians of rounds.
undrift's round is whole: sampling the cohort and its batches, uint8 to normalised floats, training, the server's step
and the record. The others are handed floats that are ready.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
from multiprocessing.connection import Connection
from pathlib import Path

import rivals
import torch
from rivals import BATCH, CLIENTS, COHORT, LR, MODELS, STEPS, Rounds

from undrift.algorithms.fedavg import FedAvg
from undrift.data.batches import Plan
from undrift.data.federation import federate
from undrift.jobs.course import commit
from undrift.oracle.net import Net
from undrift.simulate.simulation import Settings, Simulation

# and the packages they need; ray comes with flwr[simulation], not with flwr alone
RIVALS = {"undrift": "undrift", "plain loop": "torch", "pfl 0.6.0": "pfl", "Flower 1.41": "ray"}
# models beside the plain loop only, and rounds of a turn for the slow ones
BESIDE_THE_LOOP = {"gradma-nn": 10, "gradma-lenet5": 4, "resnet20-gn": 1, "unet": 1}


def undrift_rounds(model: str) -> tuple[Rounds, Simulation]:
    device = torch.device("cpu")
    how = "sites" if rivals.segments(model) else "iid"
    federation = federate(rivals.federated_data(model), how, CLIENTS, 0, device)
    settings = Settings(COHORT, Plan(BATCH, steps=STEPS), eval_every=10**9)
    net = Net(rivals.built(model), rivals.loss_of(model))
    simulation = Simulation(FedAvg(lr=LR), net, federation, settings, {}, device)
    return lambda count: [simulation.round().seconds for _ in range(count)], simulation


def rival(name: str, model: str, pipe: Connection) -> None:
    """One rival in a process of its own: answers a number of rounds with the seconds of each."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # pfl prints its metrics
    multiprocessing.current_process().name = "MainProcess"  # pfl sets itself up only under that name
    if name.startswith("Flower"):
        return rivals.serve_flower(model, pipe)
    simulation = None
    if name == "undrift":
        run, simulation = undrift_rounds(model)
    elif name == "plain loop":
        run = rivals.plain_rounds(rivals.built(model), *rivals.ready(model), rivals.loss_of(model))
    else:
        run = rivals.pfl_rounds(rivals.built(model), *rivals.ready(model))
    pipe.send("ready")
    while (count := pipe.recv()) is not None:
        seconds = run(count)
        pipe.send((seconds, simulation.execution.name if simulation and simulation.execution else ""))
    return None


def compare(model: str, names: list[str], turns: int, each: int) -> dict[str, object]:
    """Median ms a round of every rival; they take turns, so that only one works at a time."""
    if (short := model.partition(",")[0]) in BESIDE_THE_LOOP:
        names, each = ["undrift", "plain loop"], min(each, BESIDE_THE_LOOP[short])
    context = multiprocessing.get_context("spawn")
    pipes, times, notes, processes = {}, {name: [] for name in names}, {}, []
    for name in names:
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=rival, args=(name, model, theirs)))
        processes[-1].start()
        theirs.close()  # so that a rival that dies ends the wait
    try:
        for pipe in pipes.values():
            pipe.recv()  # ready: nobody is timed while another one starts
        for turn in range(turns + 1):
            for name, pipe in pipes.items():
                pipe.send(each)
                seconds, notes[name] = pipe.recv()
                times[name] += seconds if turn else []  # the first turn warms up
        for pipe in pipes.values():
            pipe.send(None)
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.terminate()
    ms = {name: [1e3 * s for s in t] for name, t in times.items()}
    medians = {name: statistics.median(t) for name, t in ms.items()}
    quarters = {name: statistics.quantiles(t, n=4)[::2] for name, t in ms.items()}
    least = {name: min(t) for name, t in ms.items()}
    ratio = {name: median / medians["undrift"] for name, median in medians.items()}
    found = {"ms": medians, "quartiles": quarters, "least": least, "ratio": ratio}
    return {"model": model, "execution": notes["undrift"]} | found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=10, help="of each rival in a turn")
    arguments.add_argument("--models", default=",".join(name.partition(",")[0] for name in MODELS))
    arguments.add_argument("--json", type=Path, help="write the results to this file too")
    chosen = arguments.parse_args()
    names = [name for name, package in RIVALS.items() if importlib.util.find_spec(package)]
    models = [model for model in MODELS if model.partition(",")[0] in chosen.models.split(",")]
    results = [compare(model, names, chosen.turns, chosen.rounds) for model in models]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")
    print(f"{'model':24}{'rival':14}{'ms a round':>12}{'quartiles':>22}{'least':>9}{'x undrift':>12}")
    for result in results:
        for name, ms in result["ms"].items():  # type: ignore[attr-defined]
            low, high = result["quartiles"][name]  # type: ignore[index]
            note = f"  ({result['execution']})" if name == "undrift" else ""
            ratio = result["ratio"][name]  # type: ignore[index]
            least = result["least"][name]  # type: ignore[index]
            spread = f"{low:.1f} to {high:.1f}"
            print(f"{result['model']:24}{name:14}{ms:12.1f}{spread:>22}{least:9.1f}{ratio:12.2f}{note}")
    line = json.dumps({"benchmark": "cpu", "torch": torch.__version__, "commit": commit(), "results": results})
    print(line)
    if chosen.json:
        chosen.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
