"""What benchmarks/cpu.py and gpu.py compare undrift with: a plain loop, pfl-research, Flower, fluke, APPFL and NVFlare.

All of them run FedAvg on the same data with the same model: `CLIENTS` clients, `COHORT` a round, `STEPS` local steps of
`BATCH` samples. Each is handed floats that are ready; undrift makes them of uint8 images in every round. fluke, APPFL and NVFlare
have virtual environments of their own, made by `make rivals`, because pip finds no versions in which they go together:

    python benchmarks/rivals.py NAME MODEL DEVICE ADDRESS       # `Rival` runs this there and listens at the address
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

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
Loss = Callable[[Tensor, Tensor], Tensor]
Rounds = Callable[[int], list[float]]  # run that many rounds; seconds of each
PATIENCE = 600  # seconds that a rival may take to begin, or for a turn
ROOMS = Path(__file__).parent.parent / ".rivals"  # the virtual environments


class Package(NamedTuple):
    """What a rival is installed from."""

    module: str  # that can be imported where it is installed
    installs: str  # for pip
    apart: bool = False  # in a virtual environment of its own


PACKAGES = {
    "undrift": Package("undrift", "undrift"),
    "plain loop": Package("torch", "torch"),
    "pfl": Package("pfl", "pfl==0.6.0"),
    "Flower": Package("ray", "flwr[simulation]==1.41.*"),  # ray comes with flwr[simulation], not with flwr alone
    "fluke": Package("fluke", "fluke-fl==0.8.1", apart=True),
    "APPFL": Package("appfl", "appfl==1.12.0", apart=True),
    "NVFlare": Package("nvflare", "nvflare==2.9.0", apart=True),
}


ALSO_AUDITED = {"pfl": "pfl==0.6.0", "fedlab": "fedlab==1.3.0"}  # by audit.py; not raced, or not from a room of its own


class Turn(NamedTuple):
    """What a rival answers to a number of rounds."""

    seconds: list[float]  # of each
    steps: float  # of local optimisers in a round, as far as they are made in the rival's own process
    loss: float  # of the server's model on samples that it was trained on
    note: str = ""


def segments(model: str) -> bool:
    """Whether a model draws masks of a disc and a cup."""
    return model.startswith("unet")


def criterion(model: str) -> Loss:
    """The loss of each sample, or their mean."""
    return dice_loss if segments(model) else F.cross_entropy


def federated_data(model: str) -> Dataset:
    random = np.random.default_rng(0)
    channels, height, width = described(model)[1]
    x = random.integers(0, 256, (CLIENTS * SAMPLES, height, width, channels), dtype=np.uint8)
    means = ((0.5,) * channels, (0.25,) * channels)
    if segments(model):
        y, sites = random.integers(0, 3, (CLIENTS * SAMPLES, height, width)), np.repeat(np.arange(CLIENTS), SAMPLES)
        return Dataset("random", x, y, x[:100], y[:100], 2, *means, sites=sites, structures=("disc", "cup"))
    y = random.integers(0, 10, CLIENTS * SAMPLES)
    return Dataset("random", x, y, x[:100], y[:100], 10, *means)


def described(model: str) -> tuple[Callable[..., nn.Module], tuple[int, int, int]]:
    """The builder and the shape of samples, by a name in MODELS or, for a GPU, in benchmarks/bare.py."""
    import bare

    return MODELS[model] if model in MODELS else (lambda *_: bare.MODELS[model](), bare.SHAPE)


@functools.cache
def ready(model: str) -> tuple[Tensor, Tensor]:
    """Every client's inputs [N, n, *shape] as floats, and labels [N, n]."""
    _, shape = described(model)
    data = federated_data(model)
    x = torch.from_numpy(np.asarray(data.x_train[np.arange(CLIENTS * SAMPLES)])).permute(0, 3, 1, 2).float()
    x = ((x / 255 - 0.5) / 0.25).contiguous().view(CLIENTS, SAMPLES, *shape)
    y = torch.from_numpy(np.asarray(data.y_train, dtype=np.int64))
    return x, y.view(CLIENTS, SAMPLES, *y.shape[1:])


@functools.cache
def built(model: str) -> nn.Module:
    build, shape = described(model)
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


def fluke_rounds(module: nn.Module, x: Tensor, y: Tensor) -> Rounds:
    """fluke's own loop: one client after another in one process, everything in memory, its fast loader, no evaluation."""
    from fluke import FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.client import Client as FlukeClient
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader
    from fluke.server import Server
    from fluke.utils import FederationObserver

    class Stopwatch(FederationObserver):  # type: ignore[misc]
        def start_round(self, *_: object, **__: object) -> None:
            began.append(time.perf_counter())

        def end_round(self, *_: object, **__: object) -> None:
            seconds.append(time.perf_counter() - began[-1])

    began: list[float] = []
    seconds: list[float] = []
    FlukeENV().set_device(str(x.device))
    FlukeENV().set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    sgd = OptimizerConfigurator({"name": "SGD", "lr": LR})
    loaders = [FastDataLoader(x[i], y[i], num_labels=10, batch_size=BATCH, shuffle=True) for i in range(CLIENTS)]
    clients = [FlukeClient(i, loader, None, sgd, nn.CrossEntropyLoss(), 1) for i, loader in enumerate(loaders)]
    fedavg = FedAVG(CLIENTS, None, {}, clients, Server(module, None, clients))
    fedavg.set_callbacks(Stopwatch())

    def run(count: int) -> list[float]:
        began.clear(), seconds.clear()
        fedavg.run(count, COHORT / CLIENTS)
        return list(seconds)

    return run


def appfl_rounds(module: nn.Module, x: Tensor, y: Tensor, model: str) -> Rounds:
    """APPFL's synchronous simulation: one client after another in one process; without its collections of garbage."""
    from appfl.agent import SimClientAgent, SimServerAgent
    from appfl.vsim import ClientProfile, SyncSimDriver, VsimLogger
    from torch.utils.data import TensorDataset

    device = str(x.device)
    training = {
        "trainer": "VanillaTrainer", "mode": "step", "num_local_steps": STEPS, "optim": "SGD", "optim_args": {"lr": LR},
        "loss_fn": "CrossEntropyLoss", "metric_path": __file__, "metric_name": "no_metric", "train_batch_size": BATCH,
        "train_data_shuffle": True, "do_validation": False, "device": device, "optimize_memory": False,
    }  # fmt: skip
    logs = {"logging_output_dirname": tempfile.mkdtemp(), "logging_output_filename": "result"}
    builder = {"model_path": __file__, "model_name": "built", "model_kwargs": {"model": model}}
    settings = {
        "client_configs": {"train_configs": training | logs, "model_configs": builder},
        "server_configs": logs | {
            "num_clients": CLIENTS, "num_global_epochs": 10**9, "device": device, "optimize_memory": False,
            "scheduler": "SyncScheduler", "scheduler_kwargs": {"num_clients": COHORT, "optimize_memory": False},
            "aggregator": "FedAvgAggregator", "aggregator_kwargs": {"client_weights_mode": "equal", "optimize_memory": False},
        },
    }  # fmt: skip
    server = SimServerAgent(settings)
    of_client = {"train_configs": training | logs, "model_configs": builder, "optimize_memory": False}
    clients = [SimClientAgent(of_client, str(i), TensorDataset(x[i], y[i])) for i in range(CLIENTS)]
    profiles = {client.get_id(): ClientProfile() for client in clients}

    class Timed(SyncSimDriver):  # type: ignore[misc]
        def _run_round(self) -> bool:
            began = time.perf_counter()
            done: bool = super()._run_round()
            seconds.append(time.perf_counter() - began)
            return done

    seconds: list[float] = []
    driver = Timed(server, clients, profiles, COHORT, VsimLogger(), target_rounds=0)

    def run(count: int) -> list[float]:
        seconds.clear()
        driver._target_rounds += count
        driver.run()
        module.load_state_dict(server.get_parameters(serial_run=True))
        return list(seconds)

    return run


def no_metric(*_: object) -> float:
    return 0.0


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
        pipe.send(version("Flower"))
        while (count := pipe.recv()) is not None:
            times.clear()
            arrays = strategy.start(grid, arrays, num_rounds=count + 1).arrays
            pipe.send(Turn(between(times), 0, loss_of(arrays.to_torch_state_dict(), model)))

    cores = len(os.sched_getaffinity(0))
    ray = {"num_cpus": cores, "log_to_driver": False, "logging_level": "error"}
    run_simulation(server, client, CLIENTS, "ray", {"init_args": ray, "client_resources": {"num_cpus": 1}})


def serve(name: str, model: str, device: str, pipe: Connection) -> None:
    """Say which version it is, then answer each number of rounds with a `Turn`, until there is none."""
    if name == "undrift":
        import cpu

        return cpu.serve(model, pipe)
    if name == "Flower":
        return serve_flower(model, pipe)
    if name == "NVFlare":
        import nvflare_rival

        return nvflare_rival.serve(model, device, pipe)
    made: list[None] = []
    register_optimizer_step_post_hook(lambda *_: made.append(None))
    x, y = (t.to(device) for t in ready(model))
    module = built(model).to(device)
    plain = functools.partial(plain_rounds, loss=criterion(model))
    rounds = {"plain loop": plain, "pfl": pfl_rounds, "fluke": fluke_rounds}
    run = appfl_rounds(module, x, y, model) if name == "APPFL" else rounds[name](module, x, y)
    pipe.send(version(name))
    while (count := pipe.recv()) is not None:
        made.clear()
        seconds = run(count)
        rounds_made = count + (name == "pfl")  # a round is timed from the end of the one before it
        pipe.send(Turn(seconds, len(made) / rounds_made, loss_of(module.state_dict(), model)))
    return None


def loss_of(state: dict[str, Any], model: str) -> float:
    """The mean loss of a model on the samples of the first clients, normalised by their own statistics."""
    x, y = (t[:COHORT].flatten(0, 1)[:: COHORT if segments(model) else 1] for t in ready(model))
    module = copy.deepcopy(built(model)).cpu()
    module.load_state_dict({name: torch.as_tensor(value) for name, value in state.items()}, strict=False)
    with torch.no_grad():
        return float(criterion(model)(module(x), y).mean())


class Rival:
    """A rival in a process of its own, with the Python of its own environment; it begins by saying its version."""

    def __init__(self, name: str, model: str, device: str = "cpu") -> None:
        package = PACKAGES[name]
        python = ROOMS / name.lower() / "bin" / "python" if package.apart else Path(sys.executable)
        if not python.exists() or (not package.apart and not importlib.util.find_spec(package.module)):
            raise CannotRun(f"not installed; make {'rivals' if package.apart else 'bench'} does it")
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.log, address = Path(self.folder.name) / "log", str(Path(self.folder.name) / "socket")
        paths = os.pathsep.join(str(path) for path in (Path(__file__).parent, Path(__file__).parent.parent))
        command = [str(python), __file__, name, model, device, address]
        socket.setdefaulttimeout(PATIENCE)
        try:
            with Listener(address) as listener, self.log.open("w") as log:
                self.process = subprocess.Popen(
                    command, env=os.environ | {"PYTHONPATH": paths}, stdout=log, stderr=log, cwd=self.folder.name,
                    start_new_session=True,
                )  # fmt: skip
                self.pipe = listener.accept()
        except TimeoutError:
            raise CannotRun(self.last_words()) from None
        finally:
            socket.setdefaulttimeout(None)
        self.version: str = self.receive()

    def play(self, rounds: int) -> Turn:
        self.pipe.send(rounds)
        turn: Turn = self.receive()
        return turn

    def receive(self) -> Any:
        try:
            if not self.pipe.poll(PATIENCE):
                raise CannotRun(f"no answer in {PATIENCE} s: {self.last_words()}")
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise CannotRun(self.last_words()) from None

    def last_words(self) -> str:
        words = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return words[-1][:200] if words else "it ended without a word"

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):  # what it started and left behind
            os.killpg(self.process.pid, signal.SIGTERM)


class CannotRun(Exception):
    """Why a rival is not in the table, in one line."""


def version(name: str) -> str:
    if name == "plain loop":
        return ""
    package = re.split(r"[=\[]", PACKAGES[name].installs)[0]
    return importlib.metadata.version(package)


def between(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


if __name__ == "__main__":
    import rivals  # a `Turn` of __main__ would be unknown at the other end

    if len(sys.argv) > 1:
        rivals.serve(*sys.argv[1:4], Client(sys.argv[4]))
    for name, package in PACKAGES.items() if len(sys.argv) == 1 else ():  # for `make rivals`
        if package.apart:
            print(name.lower(), package.installs)
    for name, installs in ALSO_AUDITED.items() if len(sys.argv) == 1 else ():
        print(name, installs)
