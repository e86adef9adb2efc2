"""Rounds on one GPU: undrift beside a bare captured loop, the plain per-client loop and pfl-research, in one run.

    python benchmarks/gpu.py [--rivals bare,plain,pfl] [--methods] [--real] [--json FILE]

100 clients, 5 local steps, batch 64, CIFAR-shaped data (the MLP has 3072 inputs), TF32 on for all. undrift's round is
whole: sampling the cohort and its batches, uint8 to normalised floats, training, the server's step and the record,
without evaluation. The bare loop (benchmarks/bare.py) and the others are handed floats that are ready.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from bare import BATCH, LR, MODELS, SHAPE, STEPS, bare_round, milliseconds, tensor_cores
from torch import nn

import undrift
from undrift.algorithms.base import Algorithm
from undrift.data.batches import Plan
from undrift.data.dataset import Dataset
from undrift.data.federation import Federation, federate
from undrift.net import Net
from undrift.registry import algorithm_class, names
from undrift.simulate.engine import Settings, Simulation

CLIENTS, SAMPLES = 100, 320
GPU = torch.device("cuda")


def federation(shape: tuple[int, int, int] = SHAPE, seed: int = 0) -> Federation:
    random = np.random.default_rng(seed)
    channels, height, width = shape
    x = random.integers(0, 256, (CLIENTS * SAMPLES, height, width, channels), dtype=np.uint8)
    y = random.integers(0, 10, CLIENTS * SAMPLES)
    data = Dataset("random", x, y, x[:100], y[:100], 10, (0.5,) * channels, (0.25,) * channels)
    return federate(data, "iid", CLIENTS, 0, GPU)


def simulation(alg: Algorithm, module: nn.Module, data: Federation, clients: int, compiled: bool) -> Simulation:
    settings = Settings(
        clients, Plan(BATCH, steps=STEPS), eval_every=10**9, execution="stacked", replay=True, compile=compiled
    )
    return Simulation(alg, Net(module), data, settings, {}, GPU)


def undrift_round(run: Simulation, least: float = 1.0) -> tuple[float, float]:
    """Milliseconds a round, and seconds until the first was done."""
    began = time.perf_counter()
    run.rounds(1)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    run.rounds(32)
    times: list[float] = []
    while sum(times) < 1e3 * least / 32 or len(times) < 3:
        at = time.perf_counter()
        made = len(run.rounds(32))
        torch.cuda.synchronize()
        times.append((time.perf_counter() - at) / made * 1e3)
    return statistics.median(times), first


def captured(run: Simulation) -> bool:
    return run.replay is not None and bool(run.replay.program.graphs)


def rivals(wanted: list[str], clients: int, models: list[str]) -> list[dict[str, Any]]:
    import cpu

    cpu.COHORT = clients
    data, rows = federation(), []
    for name, build in ((name, MODELS[name]) for name in models):
        row: dict[str, Any] = {"model": name, "clients": clients}
        for compiled in (False, True):
            run = simulation(algorithm_class("fedavg")(lr=LR), build(), data, clients, compiled)
            ms, first = undrift_round(run)
            row |= {f"undrift{' compiled' if compiled else ''}": ms, f"first{' compiled' if compiled else ''}": first}
            del run
            if "bare" in wanted:
                row[f"bare{' compiled' if compiled else ''}"] = milliseconds(bare_round(build(), clients, compiled))
            torch.cuda.empty_cache()
        x = torch.randn(CLIENTS, SAMPLES, *SHAPE, device=GPU)
        y = torch.randint(0, 10, (CLIENTS, SAMPLES), device=GPU)
        for rival, rounds in (("plain", cpu.plain_rounds), ("pfl", cpu.pfl_rounds)):
            if rival in wanted:
                play = rounds(x, y, build().to(GPU))
                play(2)
                torch.cuda.synchronize()
                at = time.perf_counter()
                each = play(6)
                torch.cuda.synchronize()
                row[rival] = (time.perf_counter() - at) / 6 * 1e3 if rival == "plain" else statistics.median(each) * 1e3
        rows.append(row)
        told = "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(told, flush=True)
    return rows


def methods(chosen: list[str], clients: int = 10) -> list[dict[str, Any]]:
    """Every method on two models: captured or not, and its time beside FedAvg's."""
    from undrift.models import gradma_lenet5, lenet5, mlp

    data, rows = federation(), []
    for model, build in (("mlp", mlp.build), ("lenet5", lenet5.build), ("gradma-lenet5", gradma_lenet5.build)):
        reference = 0.0
        for name in ("fedavg", *(n for n in chosen if n != "fedavg")):
            try:
                run = simulation(algorithm_class(name)(), build(SHAPE, 10), data, clients, False)
                ms, first = undrift_round(run, 0.2)
                reference = reference or ms
                graphs = "captured" if captured(run) else "not captured"
                graphs += ", server step on the host" if run.alg.needs_host else ""
                row = {"model": model, "method": name, "ms": ms, "ratio": ms / reference, "first": first, "how": graphs}
                print(
                    f"{model:14} {name:12} {ms:8.2f} ms  {ms / reference:5.2f}x  first {first:5.1f} s  {graphs}",
                    flush=True,
                )
            except Exception as error:
                row = {"model": model, "method": name, "how": f"{type(error).__name__}: {error}"}
                print(f"{model:14} {name:12} {row['how'][:300]}", flush=True)
            rows.append(row)
            torch.cuda.empty_cache()
    return rows


def real() -> list[dict[str, Any]]:
    """1000 rounds on CIFAR-10, evaluated every 10, start-up apart."""
    rows = []
    for model in ("lenet5", "gradma-lenet5"):
        for name in ("fedavg", "gradma"):
            times: list[float] = []
            began = time.perf_counter()
            result = undrift.run(
                algorithm=name, model=model, dataset="cifar10", rounds=1000, eval_every=10, batch=64, steps=5,
                precision="tf32", replay=True, set={"lr": 0.01}, execution="stacked",
                progress=lambda record, rounds, times=times: times.append(time.perf_counter()),
            )  # fmt: skip
            start = times[20] - began
            rest = times[-1] - times[20]
            rows.append(
                {
                    "model": model,
                    "method": name,
                    "seconds": rest / 980 * 1000,
                    "start": start,
                    "accuracy": result.accuracy,
                }
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals", default="bare,plain,pfl", help="comma separated, or nothing")
    parser.add_argument("--clients", default="10,100", help="cohorts of the comparison")
    parser.add_argument("--models", default=",".join(MODELS), help="of the comparison")
    parser.add_argument("--methods", default="", help="time and capture of these methods, or of all")
    parser.add_argument("--real", action="store_true", help="CIFAR-10 from UNDRIFT_DATA")
    parser.add_argument("--json", help="file to write the numbers to")
    chosen = parser.parse_args()
    tensor_cores()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    if chosen.clients:
        for clients in map(int, chosen.clients.split(",")):
            wanted = [r for r in chosen.rivals.split(",") if r and (clients == 10 or r == "bare")]
            found[f"S={clients}"] = rivals(wanted, clients, chosen.models.split(","))
    if chosen.methods:
        found["methods"] = methods(names("algorithms") if chosen.methods == "all" else chosen.methods.split(","))
    if chosen.real and os.environ.get("UNDRIFT_DATA"):
        found["cifar10"] = real()
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
