"""One FedAvg round on the CPU: undrift beside a plain per-client PyTorch loop and other frameworks, in one run.

    python benchmarks/cpu.py [--json FILE]                   # pip install 'undrift[bench]' and make rivals install the others
    python benchmarks/cpu.py --models '' --methods fedsm-extra,ensemble    # rounds of methods beside FedAvg's

100 clients, 10 a round, 5 local steps, batch 64; the MLP on MNIST-shaped and LeNet-5 on CIFAR-shaped data, and models that are
not computed in C as a whole (`BESIDE_THE_LOOP`), on which only undrift and the plain loop are run. Each rival
(benchmarks/rivals.py) has a process of its own (undrift changes how memory is handed back, which would help the others
too); they take turns, some rounds each, so that the machine's moods meet all of them. A rival that cannot be run says why.
undrift's round is whole: sampling the cohort and its batches, uint8 to normalised floats, training, the server's step
and the record. The others are handed floats that are ready, and their start is not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rivals
import torch
from rivals import BATCH, CLIENTS, COHORT, LR, MODELS, PACKAGES, STEPS, CannotRun, Rival, Turn

from undrift.data.batches import Plan
from undrift.data.federation import federate
from undrift.jobs.course import commit
from undrift.jobs.registry import algorithm_class, build_model
from undrift.oracle.net import Net
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation

# models beside the plain loop only, and rounds of a turn for the slow ones
BESIDE_THE_LOOP = {"gradma-nn": 10, "gradma-lenet5": 4, "resnet20-gn": 1, "unet": 1}
BEGIN = 10  # rounds before the second phase of a method that has one


def simulation(model: str, method: str = "fedavg", **fields: Any) -> Simulation:
    device = torch.device("cpu")
    how = "sites" if rivals.segments(model) else "iid"
    federation = federate(rivals.federated_data(model), how, CLIENTS, 0, device)
    settings = Settings(COHORT, Plan(BATCH, steps=STEPS), eval_every=10**9)
    alg, net = algorithm_class(method)(lr=LR, **fields), Net(rivals.built(model), rivals.criterion(model))
    for name, (other, outputs) in alg.networks(CLIENTS).items():
        net.add_network(name, Net(build_model(other, federation.shape, outputs, 0)))
    return Simulation(alg, net, federation, settings, {}, device)


def serve(model: str, pipe: Connection) -> None:
    """undrift as one of the rivals."""
    run = simulation(model)
    pipe.send("")
    while (count := pipe.recv()) is not None:
        records = [run.round() for _ in range(count)]
        loss = rivals.loss_of(run.net.layout.split(run.state.x), model)
        how = run.execution.name if run.execution else ""
        pipe.send(Turn([record.seconds for record in records], records[-1].gradients, loss, how))


def compare(model: str, names: list[str], turns: int, each: int) -> dict[str, Any]:
    """Times of a round of every rival; they take turns, so that only one works at a time."""
    if (short := model.partition(",")[0]) in BESIDE_THE_LOOP:
        names, each = [name for name in names if name in ("undrift", "plain loop")], min(each, BESIDE_THE_LOOP[short])
    running, played, why = dict[str, Rival](), dict[str, list[Turn]](), dict[str, str]()
    try:
        for name in names:
            try:
                running[name] = Rival(name, model)
            except CannotRun as reason:
                why[name] = str(reason)
        for _ in range(turns + 1):
            for name, rival in list(running.items()):
                try:
                    played.setdefault(name, []).append(rival.play(each))
                except CannotRun as reason:
                    why[name] = str(reason)
                    del running[name], played[name]
    finally:
        for rival in running.values():
            rival.end()
    if "undrift" not in played:
        raise SystemExit(f"undrift itself cannot run: {why.get('undrift', 'it is not among the rivals')}")
    rows = {}
    for name, turn in played.items():
        ms = [1e3 * s for t in turn[1:] for s in t.seconds]  # the first turn warms up
        steps, loss = turn[-1].steps, (turn[0].loss, turn[-1].loss)
        rows[f"{name} {running[name].version}".strip()] = {
            "ms": statistics.median(ms), "least": min(ms), "quartiles": statistics.quantiles(ms, n=4)[::2],
            "steps": steps, "loss": loss, "note": turn[-1].note,
        }  # fmt: skip
    for row in rows.values():
        row["ratio"] = row["ms"] / rows["undrift"]["ms"]
        row["ratio of least"] = row["least"] / rows["undrift"]["least"]
    return {"model": model, "rivals": rows, "cannot run": why}


def methods(names: list[str], turns: int) -> list[dict[str, Any]]:
    """Rounds of methods on the MLP, in their second phase if they have one, beside FedAvg's: processor time, and by the clock."""
    model = next(iter(MODELS))
    phased = {name: hasattr(algorithm_class(name), "begin") for name in names}
    runs = {
        name: simulation(model, name, **({"begin": BEGIN} if phased.get(name) else {})) for name in ["fedavg", *names]
    }
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for run in runs.values():
        while run.t <= BEGIN:
            run.round()
    for _ in range(turns):
        for name, run in runs.items():
            began = time.process_time()
            seconds = run.round().seconds
            spent[name].append((time.process_time() - began, seconds))
    of_cpu, of_clock = ({name: min(s[n] for s in t) for name, t in spent.items()} for n in range(2))
    return [
        {
            "method": name, "cpu ms": 1e3 * of_cpu[name], "cpu ratio": of_cpu[name] / of_cpu["fedavg"],
            "ms": 1e3 * of_clock[name], "ratio": of_clock[name] / of_clock["fedavg"],
        }
        for name in runs
    ]  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=10, help="of each rival in a turn")
    arguments.add_argument("--models", default=",".join(name.partition(",")[0] for name in MODELS))
    arguments.add_argument("--rivals", default=",".join(PACKAGES), help="comma separated; undrift is one")
    arguments.add_argument("--methods", default="", help="time rounds of these methods beside FedAvg's")
    arguments.add_argument("--json", type=Path, help="write the results to this file too")
    chosen = arguments.parse_args()
    found: dict[str, Any] = {"benchmark": "cpu", "torch": torch.__version__, "commit": commit()}
    found |= {"threads": torch.get_num_threads(), "processor": platform.processor() or platform.machine()}
    found["load before"] = os.getloadavg()[0]
    print(
        f"torch {torch.__version__}, {found['threads']} threads, {found['processor']}, load {found['load before']:.1f}"
    )
    if models := [model for model in MODELS if model.partition(",")[0] in chosen.models.split(",")]:
        names = [name for name in PACKAGES if name in chosen.rivals.split(",")]
        found["results"] = [compare(model, names, chosen.turns, chosen.rounds) for model in models]
    titles = ("ms a round", "quartiles", "x undrift", "least", "x undrift", "steps", "loss")
    for result in found.get("results", []):
        print(f"{result['model']:16}" + "".join(f"{title:>{18 if n == 1 else 11}}" for n, title in enumerate(titles)))
        for name, row in result["rivals"].items():
            low, high = row["quartiles"]
            times = f"{row['ms']:11.1f}{f'{low:.1f} to {high:.1f}':>18}{row['ratio']:11.2f}{row['least']:11.1f}"
            work = (
                f"{row['ratio of least']:11.2f}{row['steps'] or '':>11}   {row['loss'][0]:.4f} to {row['loss'][1]:.4f}"
            )
            print(f"{name:16}{times}{work}  {row['note']}")
        for name, reason in result["cannot run"].items():
            print(f"{name:16}cannot run: {reason}")
    if chosen.methods:
        found["methods"] = methods(chosen.methods.split(","), chosen.turns)
        for row in found["methods"]:
            times = f"{row['cpu ms']:9.0f} ms of processors = {row['cpu ratio']:5.1f} x FedAvg,"
            print(f"{row['method']:14}{times}{row['ms']:9.0f} ms = {row['ratio']:5.1f} x")
    found["load after"] = os.getloadavg()[0]
    if chosen.json:
        chosen.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
