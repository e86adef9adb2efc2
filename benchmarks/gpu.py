"""Rounds on one GPU: undrift beside a bare captured loop, the plain per-client loop and other frameworks, in one run.

    python benchmarks/gpu.py [--rivals bare,plain,pfl,fluke,APPFL,NVFlare] [--profile] [--methods all] [--packs mlp,lenet5]
        [--ragged] [--real] [--json FILE]

100 clients, 5 local steps, batch 64, CIFAR-shaped data (the MLP has 3072 inputs), TF32 on for all. undrift's round is
whole: sampling the cohort and its batches, uint8 to normalised floats, training, the server's step and the record,
without evaluation. The bare loop (benchmarks/bare.py) and the others are handed floats that are ready. fluke, APPFL and NVFlare
run in processes of their own (benchmarks/rivals.py); a rival that cannot be run says why.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from bare import BATCH, LR, MODELS, SHAPE, STEPS, bare_round, milliseconds, tensor_cores
from rivals import CLIENTS, PACKAGES, SAMPLES, CannotRun, Rival, pfl_rounds, plain_rounds
from torch import nn

import undrift
from undrift.algorithms.base import Algorithm
from undrift.core.names import names
from undrift.data.batches import Plan
from undrift.data.dataset import Dataset
from undrift.data.federation import Federation, federate
from undrift.jobs.course import commit
from undrift.jobs.registry import algorithm_class, build_model
from undrift.models import resnet20_gn
from undrift.oracle.net import Net
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation

GPU = torch.device("cuda")


def federation(shape: tuple[int, int, int] = SHAPE, seed: int = 0) -> Federation:
    random = np.random.default_rng(seed)
    channels, height, width = shape
    x = random.integers(0, 256, (CLIENTS * SAMPLES, height, width, channels), dtype=np.uint8)
    y = random.integers(0, 10, CLIENTS * SAMPLES)
    data = Dataset("random", x, y, x[:100], y[:100], 10, (0.5,) * channels, (0.25,) * channels)
    return federate(data, "iid", CLIENTS, 0, GPU)


def simulation(alg: Algorithm, module: nn.Module, data: Federation, clients: int, compiled: bool) -> Simulation:
    settings = Settings(clients, Plan(BATCH, steps=STEPS), eval_every=10**9, execution="stacked", compile=compiled)
    net = Net(module)
    for name, (other, outputs) in alg.networks(data.clients).items():
        net.add_network(name, Net(build_model(other, data.shape, outputs, 0)))
    return Simulation(alg, net, data, settings, {}, GPU)


def undrift_round(run: Simulation, least: float = 1.0) -> tuple[float, float]:
    """Milliseconds a round, and seconds until the first was done."""
    began = time.perf_counter()
    run.rounds(1)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    while run.t < 64 + 32:  # compiled from round 64 on
        run.rounds(32)
    times: list[float] = []
    while sum(times) < 1e3 * least / 32 or len(times) < 3:
        at = time.perf_counter()
        made = len(run.rounds(32))
        torch.cuda.synchronize()
        times.append((time.perf_counter() - at) / made * 1e3)
    return statistics.median(times), first


def profiled(run: Simulation, rounds: int = 8) -> dict[str, Any]:
    """Where the GPU's time goes: milliseconds a round that it is busy, and of the kernels that take most, with their number."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        made = len(run.rounds(rounds))
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in watched.events():
        if event.device_type.name == "CUDA":
            spent.setdefault(event.name, []).append(event.device_time / 1e3 / made)
    busy = sum(map(sum, spent.values()))
    print(f"busy for {busy:.2f} ms a round")
    kernels = []
    for name, each in sorted(spent.items(), key=lambda item: -sum(item[1]))[:12]:
        kernels.append({"ms": sum(each), "times": len(each) / made, "name": name[:120]})
        print(f"{sum(each):9.3f} ms {len(each) / made:6.1f} times  {name[:90]}", flush=True)
    return {"busy": busy, "kernels": kernels}


def captured(run: Simulation) -> bool:
    return run.replay is not None and bool(run.replay.program.graphs)


def rivals(wanted: list[str], clients: int, models: list[str], profile: bool) -> list[dict[str, Any]]:
    data, rows = federation(), []
    for name, build in ((name, MODELS[name]) for name in models):
        row: dict[str, Any] = {"model": name, "clients": clients}
        for compiled in (False, True):
            run = simulation(algorithm_class("fedavg")(lr=LR), build(), data, clients, compiled)
            ms, first = undrift_round(run)
            row |= {f"undrift{' compiled' if compiled else ''}": ms, f"first{' compiled' if compiled else ''}": first}
            if profile and compiled:
                row["profile"] = profiled(run)
            del run
            if "bare" in wanted:
                row[f"bare{' compiled' if compiled else ''}"] = milliseconds(bare_round(build(), clients, compiled))
            torch.cuda.empty_cache()
        x = torch.randn(CLIENTS, SAMPLES, *SHAPE, device=GPU)
        y = torch.randint(0, 10, (CLIENTS, SAMPLES), device=GPU)
        for rival, rounds in (("plain", plain_rounds), ("pfl", pfl_rounds)):
            if rival not in wanted or (rival == "pfl" and not importlib.util.find_spec("pfl")):
                continue
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # pfl prints its metrics
                    play = rounds(build().to(GPU), x, y)
                    play(2)
                    torch.cuda.synchronize()
                    at = time.perf_counter()
                    each = play(6)
                    torch.cuda.synchronize()
                row[rival] = (time.perf_counter() - at) / 6 * 1e3 if rival == "plain" else statistics.median(each) * 1e3
            except ImportError as error:  # a rival that lacks something must not spoil the others' figures
                print(f"{rival} is left out: {error}", flush=True)
                wanted = [other for other in wanted if other != rival]  # tried again it might run half imported
        for rival in (other for other in wanted if other in PACKAGES and PACKAGES[other].apart):
            try:
                apart = Rival(rival, name, "cuda")
                apart.play(2)
                row[rival] = statistics.median(apart.play(6).seconds) * 1e3
                apart.end()
            except CannotRun as reason:
                row[rival] = f"cannot run: {reason}"
        rows.append(row)
        shown = {k: v for k, v in row.items() if k != "profile"}
        told = "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())
        print(told, flush=True)
    return rows


def methods(chosen: list[str], on: list[str], clients: int = 10) -> list[dict[str, Any]]:
    """Every method on two models: captured or not, and its time beside FedAvg's."""
    from undrift.models import gradma_lenet5, lenet5, mlp

    data, rows = federation(), []
    for model, build in (("mlp", mlp.build), ("lenet5", lenet5.build), ("gradma-lenet5", gradma_lenet5.build)):
        if model not in on:
            continue
        reference = 0.0
        for name in ("fedavg", *(n for n in chosen if n != "fedavg")):
            try:
                run = simulation(algorithm_class(name)(), build(SHAPE, 10), data, clients, False)
                ms, first = undrift_round(run, 0.2)
                reference = reference or ms
                graphs = "captured" if captured(run) else "not captured"
                graphs += ", server step on the host" if run.replay and run.replay.program.apart else ""
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


def packs(chosen: list[str], runs: int = 16) -> list[dict[str, Any]]:
    """Runs of a sweep packed into one program, beside one of them alone."""
    from undrift.models import lenet5, mlp
    from undrift.simulate.packed import Pack

    rows = []
    digits = (1, 28, 28)
    for model, build, shape, name, compiled in (
        ("mlp, 784 inputs", mlp.build, digits, "fedavg", False),
        ("mlp, 784 inputs", mlp.build, digits, "fedavg", True),
        ("mlp, 3072 inputs", mlp.build, SHAPE, "fedavg", False),
        ("lenet5", lenet5.build, SHAPE, "fedavg", False),
        ("resnet20-gn", resnet20_gn.build, SHAPE, "fedavg", False),
        ("mlp, 784 inputs", mlp.build, digits, "gradma-s", False),
        ("lenet5", lenet5.build, SHAPE, "gradma-s", False),
    ):
        if model.split(",")[0] not in chosen:
            continue
        data = federation(shape)

        def one(
            seed: int, data: Any = data, build: Any = build, name: str = name, shape: Any = shape, how: bool = compiled
        ) -> Simulation:
            plan = Plan(BATCH, steps=STEPS)
            settings = Settings(10, plan, seed=seed, eval_every=10**9, execution="stacked", compile=how)
            alg = algorithm_class(name)(lr=0.01 * (1 + seed))
            return Simulation(alg, Net(build(shape, 10)), data, settings, {}, GPU)

        alone, _ = undrift_round(one(0), 0.3)
        pack = Pack([one(seed) for seed in range(runs)])
        while pack.runs[0].t < (96 if compiled else 8):
            pack.scored_rounds(32 if compiled else 8, False)
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            at = time.perf_counter()
            made = len(pack.scored_rounds(32, False)[0])
            torch.cuda.synchronize()
            times.append((time.perf_counter() - at) / made * 1e3)
        row: dict[str, Any] = {"model": model, "method": name, "compiled": compiled, "runs": runs, "alone": alone}
        row |= {"together": statistics.median(times), "ratio": statistics.median(times) / alone}
        rows.append(row)
        took = f"{row['together']:8.2f} ms a round = {row['ratio']:5.2f} x one ({alone:.2f} ms)"
        print(f"{model:18} {name:10} {'compiled' if compiled else '':8} {runs} runs {took}", flush=True)
        del pack
        torch.cuda.empty_cache()
    return rows


def ragged() -> list[dict[str, Any]]:
    """One pass over each client's samples, Dirichlet 0.01: beside the time of the steps really taken.

    That time is the sum over the steps of what a step costs for so many clients as still have a batch, measured with cohorts of
    that size in which everybody makes the same number of steps.
    """
    from undrift.models import lenet5, mlp

    rows = []
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (CLIENTS * SAMPLES, 32, 32, 3), dtype=np.uint8)
    y = random.integers(0, 10, CLIENTS * SAMPLES)
    data = Dataset("random", x, y, x[:100], y[:100], 10, (0.5,) * 3, (0.25,) * 3)
    for model, build in (("mlp", mlp.build), ("lenet5", lenet5.build)):
        fed = federate(data, "dirichlet:0.01", CLIENTS, 0, GPU)
        settings = Settings(10, Plan(BATCH, epochs=1.0, persistent=False), eval_every=10**9, execution="stacked")
        run = Simulation(algorithm_class("fedavg")(), Net(build(SHAPE, 10)), fed, settings, {}, GPU)
        run.rounds(1)
        run.rounds(32)
        first = run.t
        torch.cuda.synchronize()
        at = time.perf_counter()
        while run.t < first + 32:
            run.rounds(32)
        torch.cuda.synchronize()
        took = (time.perf_counter() - at) / (run.t - first) * 1e3
        live = [(run.takes_part(t).steps[:, None] > np.arange(1000)).sum(0) for t in range(first, run.t)]
        cost = {}
        for clients in (1, 2, 4, 7, 10):
            short, long = (undrift_round(step_run(build, clients, steps), 0.2)[0] for steps in (20, 60))
            cost[clients] = (long - short) / 40
        fixed = short - 20 * cost[10]
        counts = np.concatenate(live)
        counts = counts[counts > 0]
        ideal = np.interp(counts, list(cost), list(cost.values())).sum() / len(live) + fixed
        steps = len(counts) / len(live)
        rows.append({"model": model, "ms": took, "steps really taken": ideal, "ratio": took / ideal, "steps": steps})
        print(
            f"dirichlet:0.01, 1 epoch  {model:8} {took:8.2f} ms a round of {steps:.0f} steps = {took / ideal:.2f} x those",
            flush=True,
        )
    return rows


def step_run(build: Any, clients: int, steps: int) -> Simulation:
    settings = Settings(clients, Plan(BATCH, steps=steps), eval_every=10**9, execution="stacked")
    return Simulation(algorithm_class("fedavg")(), Net(build(SHAPE, 10)), federation(), settings, {}, GPU)


def real(on: list[str]) -> list[dict[str, Any]]:
    """1000 rounds on CIFAR-10, evaluated every 10, start-up apart."""
    rows = []
    for model in ("lenet5", "gradma-lenet5"):
        for name in ("fedavg", "gradma") if model in on else ():
            times: list[float] = []
            began = time.perf_counter()
            result = undrift.run(
                algorithm=name, model=model, dataset="cifar10", rounds=1000, eval_every=10, batch=64, steps=5,
                precision="tf32", compile="on", set={"lr": 0.01}, execution="stacked",
                progress=lambda record, rounds, times=times: times.append(time.perf_counter()),
            )  # fmt: skip
            started = 199  # by then everything is compiled
            rows.append(
                {
                    "model": model,
                    "method": name,
                    "seconds": (times[-1] - times[started]) / (999 - started) * 1000,
                    "started after": times[started] - began,
                    "accuracy": result.accuracy,
                }
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals", default="bare,plain,pfl,fluke,APPFL,NVFlare", help="comma separated, or nothing")
    parser.add_argument("--clients", default="10,100", help="cohorts of the comparison")
    parser.add_argument("--models", default=",".join(MODELS), help="of the comparison")
    parser.add_argument("--methods", default="", help="time and capture of these methods, or of all")
    parser.add_argument("--on", default="mlp,lenet5,gradma-lenet5", help="models for --methods and --real")
    parser.add_argument("--packs", default="", help="16 runs as one program, of mlp,lenet5,resnet20-gn")
    parser.add_argument("--ragged", action="store_true", help="clients of very different sizes")
    parser.add_argument("--real", action="store_true", help="CIFAR-10 from UNDRIFT_DATA")
    parser.add_argument("--profile", action="store_true", help="the kernels of a compiled round of the comparison")
    parser.add_argument("--json", help="file to write the numbers to")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU")
    tensor_cores()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()}
    if chosen.clients:
        for clients in map(int, chosen.clients.split(",")):
            wanted = [r for r in chosen.rivals.split(",") if r and (clients == 10 or r == "bare")]
            found[f"S={clients}"] = rivals(wanted, clients, chosen.models.split(","), chosen.profile)
    if chosen.methods:
        wanted = names("algorithms") if chosen.methods == "all" else chosen.methods.split(",")
        found["methods"] = methods(wanted, chosen.on.split(","))
    if chosen.packs:
        found["packs"] = packs(chosen.packs.split(","))
    if chosen.ragged:
        found["ragged"] = ragged()
    if chosen.real and os.environ.get("UNDRIFT_DATA"):
        found["cifar10"] = real(chosen.on.split(","))
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
