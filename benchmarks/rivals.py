"""What benchmarks/cpu.py and gpu.py compare undrift with: a plain per-client PyTorch loop, pfl-research and Flower's simulation.

All of them run FedAvg on the same data with the same model: `CLIENTS` clients, `COHORT` a round, `STEPS` local steps of
`BATCH` samples. Each is handed floats that are ready; undrift makes them of uint8 images in every round.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.data.dataset import Dataset
from undrift.models import gradma_lenet5, gradma_nn, lenet5, mlp, resnet20_gn, unet
from undrift.oracle.segmentation import dice_loss

CLIENTS, COHORT, STEPS, BATCH, SAMPLES, LR = 100, 10, 5, 64, 320, 0.1  # 320 = 5 * 64: one pass is one round
MODELS = {
    "mlp, 1x28x28": (mlp.build, (1, 28, 28)),
    "lenet5, 3x32x32": (lenet5.build, (3, 32, 32)),
    "gradma-nn, 1x28x28": (gradma_nn.build, (1, 28, 28)),
    "gradma-lenet5, 3x32x32": (gradma_lenet5.build, (3, 32, 32)),
    "resnet20-gn, 3x32x32": (resnet20_gn.build, (3, 32, 32)),
    "unet, 3x32x32": (unet.build, (3, 32, 32)),
}
Rounds = Callable[[int], list[float]]  # run that many rounds; seconds of each
Loss = Callable[[Tensor, Tensor], Tensor]


def segments(model: str) -> bool:
    """Whether a model draws masks of a disc and a cup."""
    return model.startswith("unet")


def loss_of(model: str) -> Loss:
    """The loss of each sample."""
    return dice_loss if segments(model) else F.cross_entropy


def federated_data(model: str) -> Dataset:
    random = np.random.default_rng(0)
    channels, height, width = MODELS[model][1]
    x = random.integers(0, 256, (CLIENTS * SAMPLES, height, width, channels), dtype=np.uint8)
    means = ((0.5,) * channels, (0.25,) * channels)
    if segments(model):
        y, sites = random.integers(0, 3, (CLIENTS * SAMPLES, height, width)), np.repeat(np.arange(CLIENTS), SAMPLES)
        return Dataset("random", x, y, x[:100], y[:100], 2, *means, sites=sites, structures=("disc", "cup"))
    y = random.integers(0, 10, CLIENTS * SAMPLES)
    return Dataset("random", x, y, x[:100], y[:100], 10, *means)


@functools.cache
def ready(model: str) -> tuple[Tensor, Tensor]:
    """Every client's inputs [N, n, *shape] as floats, and labels [N, n]."""
    _, shape = MODELS[model]
    data = federated_data(model)
    x = torch.from_numpy(np.asarray(data.x_train[np.arange(CLIENTS * SAMPLES)])).permute(0, 3, 1, 2).float()
    x = ((x / 255 - 0.5) / 0.25).contiguous().view(CLIENTS, SAMPLES, *shape)
    y = torch.from_numpy(np.asarray(data.y_train, dtype=np.int64))
    return x, y.view(CLIENTS, SAMPLES, *y.shape[1:])


@functools.cache
def built(model: str) -> nn.Module:
    build, shape = MODELS[model]
    torch.manual_seed(0)
    return build(shape, 2 if segments(model) else 10)


def train(module: nn.Module, x: Tensor, y: Tensor, order: Tensor, loss: Loss = F.cross_entropy) -> None:
    """A client's local steps as people write them."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    for k in range(STEPS):
        batch = order[k * BATCH : (k + 1) * BATCH]
        optimizer.zero_grad()
        loss(module(x[batch]), y[batch]).mean().backward()
        optimizer.step()


def plain_rounds(module: nn.Module, x: Tensor, y: Tensor, loss: Loss = F.cross_entropy) -> Rounds:
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
            order = torch.from_numpy(random.permutation(SAMPLES)).to(x.device)
            train(module, x[client], y[client], order, loss)
            for n, p in module.named_parameters():
                total[n] += p.detach() / COHORT
        with torch.no_grad():
            for n, p in module.named_parameters():
                p.copy_(total[n])
        return time.perf_counter() - began

    return lambda count: [one() for _ in range(count)]


def pfl_rounds(module: nn.Module, x: Tensor, y: Tensor) -> Rounds:
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
    central = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
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
        FederatedAveraging().run(parameters, backend, central, training, None, [watch])
        return between(watch.times)

    return run


def serve_flower(model: str, pipe: Connection) -> None:
    """Flower's own simulation engine: FedAvg, one Ray actor for each core, which keeps its data between rounds.

    A turn is a run of `Strategy.start`; its rounds are timed from one `configure_train` to the next, so that starting
    Ray, its actors and the run is left out.
    """
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    client, server, times = ClientApp(), ServerApp(), []

    @client.train()  # type: ignore[untyped-decorator]
    def local(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        x, y = ready(model)
        module, me = built(model), int(context.node_config["partition-id"])
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(module, x[me], y[me], torch.randperm(SAMPLES))
        content = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": SAMPLES})}
        return Message(content=RecordDict(content), reply_to=message)

    class Timed(FedAvg):  # type: ignore[misc]
        def configure_train(self, *arguments: Any) -> Any:
            times.append(time.perf_counter())
            return super().configure_train(*arguments)

    @server.main()  # type: ignore[untyped-decorator]
    def rounds(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(built(model).state_dict())
        strategy = Timed(COHORT / CLIENTS, 0.0, min_train_nodes=COHORT, min_available_nodes=CLIENTS)
        pipe.send("ready")
        while (count := pipe.recv()) is not None:
            times.clear()
            arrays = strategy.start(grid, arrays, num_rounds=count + 1).arrays
            pipe.send((between(times), ""))

    cores = len(os.sched_getaffinity(0))
    ray = {"num_cpus": cores, "log_to_driver": False, "logging_level": "error"}
    run_simulation(server, client, CLIENTS, "ray", {"init_args": ray, "client_resources": {"num_cpus": 1}})


def between(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]
