"""One FedAvg round on the CPU: undrift beside a plain per-client PyTorch loop and pfl-research, in one run.

    python benchmarks/cpu.py            # needs: pip install 'undrift[bench]'; without pfl it leaves that column out

100 clients, 10 a round, 5 local steps, batch 64; the MLP on MNIST-shaped and LeNet-5 on CIFAR-shaped data. Each rival has
a process of its own (undrift changes how memory is handed back, which would help the others too); they take turns, a few
rounds each, so that the machine's moods meet all of them. The figures are medians of rounds.
undrift's round is whole: sampling the cohort and its batches, uint8 to normalised floats, training, the server's step
and the record. The plain loop and pfl are handed floats that are ready.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.algorithms.fedavg import FedAvg
from undrift.data.batches import Plan
from undrift.data.dataset import Dataset
from undrift.data.federation import federate
from undrift.models import lenet5, mlp
from undrift.net import Net
from undrift.simulate.engine import Settings, Simulation

CLIENTS, COHORT, STEPS, BATCH, SAMPLES, LR = 100, 10, 5, 64, 320, 0.1  # 320 = 5 * 64: one pass is one round
MODELS = {"mlp, 1x28x28": (mlp.build, (1, 28, 28)), "lenet5, 3x32x32": (lenet5.build, (3, 32, 32))}
Rounds = Callable[[int], list[float]]  # run that many rounds; seconds of each


def federated_data(shape: tuple[int, int, int]) -> Dataset:
    random = np.random.default_rng(0)
    channels, height, width = shape
    x = random.integers(0, 256, (CLIENTS * SAMPLES, height, width, channels), dtype=np.uint8)
    y = random.integers(0, 10, CLIENTS * SAMPLES)
    return Dataset("random", x, y, x[:100], y[:100], 10, (0.5,) * channels, (0.25,) * channels)


def undrift_rounds(data: Dataset, module: nn.Module) -> tuple[Rounds, Simulation]:
    device = torch.device("cpu")
    federation = federate(data, "iid", CLIENTS, 0, device)
    settings = Settings(COHORT, Plan(BATCH, steps=STEPS), eval_every=10**9)
    simulation = Simulation(FedAvg(lr=LR), Net(module), federation, settings, {}, device)
    return lambda count: [simulation.round().seconds for _ in range(count)], simulation


def plain_rounds(x: Tensor, y: Tensor, module: nn.Module) -> Rounds:
    """The loop that people write by hand: load the global model, train each client in turn, average."""
    random = np.random.default_rng(0)

    def one() -> float:
        began = time.perf_counter()
        start = {n: p.detach().clone() for n, p in module.named_parameters()}
        total = {n: torch.zeros_like(p) for n, p in start.items()}
        for client in random.choice(CLIENTS, COHORT, replace=False):
            with torch.no_grad():
                for n, p in module.named_parameters():
                    p.copy_(start[n])
            optimizer = torch.optim.SGD(module.parameters(), lr=LR)
            order = torch.from_numpy(random.permutation(SAMPLES))
            for k in range(STEPS):
                batch = order[k * BATCH : (k + 1) * BATCH]
                optimizer.zero_grad()
                F.cross_entropy(module(x[client][batch]), y[client][batch]).backward()
                optimizer.step()
            for n, p in module.named_parameters():
                total[n] += p.detach() / COHORT
        with torch.no_grad():
            for n, p in module.named_parameters():
                p.copy_(total[n])
        return time.perf_counter() - began

    return lambda count: [one() for _ in range(count)]


def pfl_rounds(x: Tensor, y: Tensor, module: nn.Module) -> Rounds:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset as UserDataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Stopwatch(TrainingProcessCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
            self.times.append(time.perf_counter())
            return False, Metrics()

    module.loss = lambda a, b: F.cross_entropy(module(a), b)  # type: ignore[assignment]
    module.metrics = lambda a, b: {}  # type: ignore[assignment]
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    sampler = MinimizeReuseUserSampler(list(range(CLIENTS)))
    users = FederatedDataset(lambda i: UserDataset(raw_data=[x[i], y[i]]), sampler)
    backend = SimulatedBackend(training_data=users, val_data=None)
    training = NNTrainHyperParams(
        local_num_epochs=None, local_num_steps=STEPS, local_learning_rate=LR, local_batch_size=BATCH
    )

    def run(count: int) -> list[float]:
        watch = Stopwatch()
        parameters = NNAlgorithmParams(
            central_num_iterations=count + 1, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=0
        )
        FederatedAveraging().run(parameters, backend, model, training, None, [watch])
        return [b - a for a, b in zip(watch.times, watch.times[1:], strict=False)]

    return run


def rival(name: str, model: str, pipe: Connection) -> None:
    """One rival in a process of its own: answers a number of rounds with the seconds of each."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # pfl prints its metrics
    multiprocessing.current_process().name = "MainProcess"  # pfl sets itself up only under that name
    build, shape = MODELS[model]
    data = federated_data(shape)
    torch.manual_seed(0)
    module = build(shape, 10)
    note = ""
    if name == "undrift":
        run, simulation = undrift_rounds(data, module)
    else:
        x = torch.from_numpy(np.asarray(data.x_train[np.arange(CLIENTS * SAMPLES)])).permute(0, 3, 1, 2).float()
        x = ((x / 255 - 0.5) / 0.25).contiguous().view(CLIENTS, SAMPLES, *shape)
        y = torch.from_numpy(np.asarray(data.y_train, dtype=np.int64)).view(CLIENTS, SAMPLES)
        run = plain_rounds(x, y, module) if name == "plain loop" else pfl_rounds(x, y, module)
    while (count := pipe.recv()) is not None:
        seconds = run(count)
        if name == "undrift" and simulation.execution is not None:
            note = simulation.execution.name
        pipe.send((seconds, note))


def compare(model: str, turns: int, each: int) -> dict[str, object]:
    """Median ms a round of every rival; they take turns, so that only one works at a time."""
    context = multiprocessing.get_context("spawn")
    names = ["undrift", "plain loop", *(["pfl 0.6.0"] if importlib.util.find_spec("pfl") else [])]
    pipes, times, notes = {}, {name: [] for name in names}, {}
    for name in names:
        pipes[name], theirs = context.Pipe()
        context.Process(target=rival, args=(name, model, theirs), daemon=True).start()
        theirs.close()  # so that a rival that dies ends the wait
    for turn in range(turns + 1):
        for name, pipe in pipes.items():
            pipe.send(each)
            seconds, notes[name] = pipe.recv()
            times[name] += seconds if turn else []  # the first turn warms up
    for pipe in pipes.values():
        pipe.send(None)
    medians = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    ratio = {name: ms / medians["undrift"] for name, ms in medians.items()}
    return {"model": model, "execution": notes["undrift"], "ms": medians, "ratio": ratio}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--turns", type=int, default=6)
    arguments.add_argument("--rounds", type=int, default=3, help="of each rival in a turn")
    chosen = arguments.parse_args()
    results = [compare(model, chosen.turns, chosen.rounds) for model in MODELS]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")
    print(f"{'model':18}{'rival':14}{'ms a round':>12}{'x undrift':>12}")
    for result in results:
        for rival, ms in result["ms"].items():  # type: ignore[attr-defined]
            note = f"  ({result['execution']})" if rival == "undrift" else ""
            print(f"{result['model']:18}{rival:14}{ms:12.1f}{result['ratio'][rival]:12.2f}{note}")  # type: ignore[index]
    print(json.dumps({"benchmark": "cpu", "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
