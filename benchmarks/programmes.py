"""What GradMA's quadratic programmes cost: one for the whole vector or one for each tensor, beside FedAvg's round, in one run.

    python benchmarks/programmes.py [--device cuda|cpu] [--models gradma-lenet5,gradma-nn] [--data random,cifar10] [--compiled]
        [--packs 8] [--json FILE]

100 clients, 10 a round, 5 local steps, batch 64. `random` is noise of CIFAR-10's shape in equal parts, `cifar10` the real one of
UNDRIFT_DATA, Dirichlet 0.01. Packs: so many runs as one program beside the same runs one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from bare import BATCH, SHAPE, STEPS, tensor_cores
from rivals import CLIENTS, SAMPLES

from undrift.data.batches import Plan
from undrift.data.dataset import Dataset
from undrift.data.federation import Federation, federate
from undrift.data.load import load_dataset
from undrift.jobs.course import commit
from undrift.jobs.registry import algorithm_class, build_model
from undrift.oracle.net import Net
from undrift.simulate.packed import Pack
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation

METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedavg", {}),
    ("gradma-s", {"qp_scope": "global"}),
    ("gradma-s", {"qp_scope": "tensor"}),
    ("gradma", {"qp_scope": "global"}),
    ("gradma", {"qp_scope": "tensor"}),
)


def federation(name: str, device: torch.device) -> Federation:
    if name != "random":
        return federate(load_dataset(name), "dirichlet:0.01", CLIENTS, 0, device)
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (CLIENTS * SAMPLES, *SHAPE[1:], SHAPE[0]), dtype=np.uint8)
    y = random.integers(0, 10, CLIENTS * SAMPLES)
    return federate(Dataset("random", x, y, x[:100], y[:100], 10, (0.5,) * 3, (0.25,) * 3), "iid", CLIENTS, 0, device)


def simulation(
    method: str,
    fields: dict[str, Any],
    model: str,
    data: Federation,
    compiled: bool,
    device: torch.device,
    seed: int = 0,
) -> Simulation:
    settings = Settings(
        10, Plan(BATCH, steps=STEPS), seed=seed, eval_every=10**9, execution="stacked", compile=compiled
    )
    net = Net(build_model(model, data.shape, 10, seed))
    return Simulation(algorithm_class(method)(lr=0.05, **fields), net, data, settings, {}, device)


def timed(play: Any, rounds: int, times: int = 4) -> float:
    """The median of milliseconds a round."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        made = play(rounds)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / made * 1e3)
    return statistics.median(found)


def alone(run: Simulation, rounds: int, warm: int) -> float:
    def play(count: int) -> int:
        return len(run.rounds(count))

    while run.t < warm:  # the memory is full, and what is compiled is compiled
        play(rounds)
    return timed(play, rounds)


def together(runs: list[Simulation], rounds: int, warm: int) -> float:
    pack = Pack(runs)

    def play(count: int) -> int:
        return len(pack.scored_rounds(count, False)[0])

    while pack.runs[0].t < warm:
        play(rounds)
    return timed(play, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", default="gradma-lenet5,gradma-nn")
    parser.add_argument("--data", default="random", help="random, cifar10 or both, comma separated")
    parser.add_argument("--methods", default="fedavg,gradma-s,gradma")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--packs", type=int, default=0, help="so many runs as one program, on a GPU")
    parser.add_argument("--rounds", type=int, default=32, help="timed together")
    parser.add_argument("--warm", type=int, default=128, help="rounds before")
    parser.add_argument("--json", help="file to write the numbers to")
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    if args.device == "cuda":
        tensor_cores()
    for name in args.data.split(","):
        data = federation(name, device)
        for model in args.models.split(","):
            reference = 0.0
            for method, fields in METHODS:
                if method not in args.methods.split(","):
                    continue
                given = method, fields, model, data, args.compiled, device
                run = simulation(*given)
                ms = alone(run, args.rounds, args.warm)
                reference = reference or ms
                facts = run.alg.facts(run.state.server)
                row = {"data": name, "model": model, "method": method, **fields, "ms": ms, "ratio": ms / reference}
                row |= {"compiled": args.compiled, **{fact: int(value) for fact, value in facts.items()}}
                del run
                if args.packs and method != "fedavg" and fields["qp_scope"] == "tensor":
                    row["pack"] = together(
                        [simulation(*given, seed) for seed in range(args.packs)], args.rounds, args.warm
                    )
                    row["pack, one after the other"] = args.packs * ms
                rows.append(row)
                print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)
                if args.json:
                    found: dict[str, Any] = {"device": args.device, "torch": torch.__version__, "commit": commit()}
                    if args.device == "cuda":
                        found["gpu"] = torch.cuda.get_device_name()
                    with open(args.json, "w") as file:
                        json.dump(found | {"rounds": rows}, file, indent=1)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
