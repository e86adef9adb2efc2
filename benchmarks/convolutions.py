"""A local step of stacked clients at the papers' settings, beside one model on all their samples, in one run.

    python benchmarks/convolutions.py [--models resnet18-gn,vgg16,...] [--precisions tf32,bf16] [--compiled] [--profile]
        [--json FILE]

The rival is the least that anybody could need: *one* model on the S * b samples of all clients, in bfloat16, channels last,
compiled and captured, with its step of SGD; and, measured apart, the time to read and write the S vectors of parameters and
gradients that clients of their own have. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bare import SHAPE, capture, milliseconds
from gpu import profiled, undrift_round

from undrift.core.device import arithmetic
from undrift.data.batches import Plan
from undrift.data.dataset import Dataset
from undrift.data.federation import Federation, federate
from undrift.jobs.course import commit
from undrift.jobs.registry import algorithm_class, build_model
from undrift.oracle.net import Net
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation

GPU = torch.device("cuda")
SETTINGS = {  # clients, batch: FedMIM's Table I, DOMO's tables, GradMA's largest model
    "resnet18-gn": (10, 50),
    "vgg16": (16, 32),
    "resnet56-gn": (16, 32),
    "vgg11": (10, 64),
    "resnet20": (10, 64),
}
SHORT, LONG = 2, 6  # local steps of the two rounds whose difference is timed


def federation(clients: int, samples: int = 400) -> Federation:
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (clients * samples, *SHAPE[1:], SHAPE[0]), dtype=np.uint8)
    y = random.integers(0, 10, clients * samples)
    return federate(Dataset("random", x, y, x[:100], y[:100], 10, (0.5,) * 3, (0.25,) * 3), "iid", clients, 0, GPU)


def local_step(model: str, precision: str, compiled: bool, profile: bool) -> dict[str, Any]:
    """Milliseconds of a local step of all clients, from rounds of two lengths; and seconds to the first round."""
    clients, batch = SETTINGS[model]
    found, data = {}, federation(2 * clients)
    with arithmetic(precision, deterministic=False):
        for steps in (SHORT, LONG):
            settings = Settings(
                clients, Plan(batch, steps=steps), eval_every=10**9, execution="stacked", compile=compiled
            )
            net = Net(build_model(model, SHAPE, 10, 0))
            run = Simulation(algorithm_class("fedavg")(lr=0.01), net, data, settings, {}, GPU)
            found[steps] = undrift_round(run, 0.3)
            told = profiled(run) if profile and steps == LONG else {}
            del run
            torch.cuda.empty_cache()
    ms = (found[LONG][0] - found[SHORT][0]) / (LONG - SHORT)
    return {"step": ms, "first round": found[SHORT][1]} | ({"profile": told} if told else {})


def one_model(model: str) -> float:
    """Milliseconds of a step of one model on the samples of all clients."""
    clients, batch = SETTINGS[model]
    module = build_model(model, SHAPE, 10, 0).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(clients * batch, *SHAPE, device=GPU).to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (clients * batch,), device=GPU)
    weights = list(module.parameters())

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return F.cross_entropy(module(x), y)

    fast = torch.compile(loss)

    def step() -> None:
        for w, g in zip(weights, torch.autograd.grad(fast(), weights), strict=True):
            w.data.sub_(g, alpha=0.01)

    return milliseconds(capture(step))


def vectors(model: str) -> float:
    """Milliseconds to read parameters and gradients of all clients, and to write both."""
    count = sum(p.numel() for p in build_model(model, SHAPE, 10, 0).parameters())
    x, g = (torch.randn(SETTINGS[model][0], count, device=GPU) for _ in range(2))

    def touch() -> None:
        g.add_(x, alpha=1e-9)  # the backward pass writes what the step reads
        x.sub_(g, alpha=1e-9)

    return milliseconds(capture(touch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SETTINGS))
    parser.add_argument("--precisions", default="tf32,bf16")
    parser.add_argument("--compiled", action="store_true", help="also compiled")
    parser.add_argument("--profile", action="store_true", help="the kernels that take most")
    parser.add_argument("--json", help="file to write the numbers to")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU")
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "rows": [],
    }
    for model in chosen.models.split(","):
        clients, batch = SETTINGS[model]
        row: dict[str, Any] = {"model": model, "clients": clients, "batch": batch}
        row |= {"one model": one_model(model), "vectors": vectors(model)}
        least = row["one model"] + row["vectors"]
        print(
            f"{model}, {clients} x {batch}: one model {row['one model']:.2f} ms + vectors {row['vectors']:.2f} ms",
            flush=True,
        )
        for precision in chosen.precisions.split(","):
            for compiled in (False, True) if chosen.compiled else (False,):
                name = f"{precision}{' compiled' if compiled else ''}"
                row[name] = local_step(model, precision, compiled, chosen.profile)
                ms, first = row[name]["step"], row[name]["first round"]
                print(
                    f"  {name:14} {ms:7.2f} ms a step = {ms / least:.2f} x that; first round after {first:.1f} s",
                    flush=True,
                )
        found["rows"].append(row)
        if chosen.json:
            with open(chosen.json, "w") as file:
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
