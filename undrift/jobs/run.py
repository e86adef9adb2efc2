"""`undrift.run`: from settings, or from the user's own model and data, to records and a trained model."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import undrift.data.federation as federation
from undrift.algorithms.base import Worker
from undrift.core import ranks
from undrift.core.arithmetic import arithmetic, pick_device
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.core.trees import nbytes
from undrift.data.batches import Plan
from undrift.data.dataset import Dataset
from undrift.data.from_user import dataset_from
from undrift.data.load import load_dataset
from undrift.dataparallel.training import Training
from undrift.jobs.config import (
    FIELDS,
    RESUMABLE,
    RunConfig,
    from_mapping,
    from_toml,
    make_algorithm,
    parse_drops,
    parse_slow,
    parse_stop,
)
from undrift.jobs.folder import ReadOnlyFolder, RunFolder
from undrift.jobs.registry import algorithm_class, build_model
from undrift.kernels.native import library
from undrift.oracle import segmentation
from undrift.oracle.net import Loss, Net
from undrift.round.record import RoundRecord
from undrift.simulate.choose import available_memory
from undrift.simulate.client_store import DiskTable
from undrift.simulate.clients import ClientTable
from undrift.simulate.evaluate import Metric, accuracy
from undrift.simulate.here import Stacked
from undrift.simulate.personal_scores import personal_models
from undrift.simulate.simulation import Settings, Simulation

REPAID = 50_000  # local steps: compiling takes ten to twenty seconds, and a step of a small model saves 0.1 to 0.5 ms
Progress = Callable[[dict[str, Any], int], None]  # called with each record and the number of rounds asked for
Trained = TypeVar(
    "Trained", Simulation, Training
)  # what goes round after round: a federation, or data-parallel workers


@dataclass(frozen=True)
class Result:
    """What a run leaves behind."""

    records: list[dict[str, Any]]  # one a round, as in rounds.jsonl
    model: dict[str, Tensor]  # a plain state_dict
    config: Any  # a RunConfig, or a ParallelConfig
    folder: Path | None
    stopped: str  # why it ended: "rounds", "accuracy", "time" or "diverged"

    @property
    def accuracy(self) -> float | None:
        """The last accuracy measured."""
        return next((r["accuracy"] for r in reversed(self.records) if r.get("accuracy") is not None), None)


@ranks.joined()
def run(
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    algorithm: str | type[Any] | Worker | None = None,
    model: str | nn.Module | Callable[[tuple[int, ...], int], nn.Module] | None = None,
    data: Any = None,
    loss: Loss = F.cross_entropy,
    metrics: Mapping[str, Metric] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Result:
    """Simulate a federated training run.

    `config` is a RunConfig, a mapping, or the path of a TOML file; `settings` are the same names as the command line's and
    override it. `model` may be any nn.Module and `data` arrays, a torch Dataset or one Dataset a client (see
    `undrift.data.from_user`); `loss(outputs, targets)` is evaluated sample by sample and averaged over the real samples;
    `metrics` are functions (outputs, targets) -> one number a sample or one a batch. With `out` the run is written to
    that folder and can be resumed. In a script that torchrun starts, all its processes do the run together.

    >>> result = run(algorithm="fedavg", rounds=2, clients=10, cohort=2)
    >>> len(result.records), sorted(result.model)[:2]
    (2, ['head.bias', 'head.weight'])
    """
    folder = None
    if out is not None:
        folder = RunFolder(Path(out)) if ranks.rank() == 0 else ReadOnlyFolder(Path(out))
    given: dict[str, Any] = {}
    if isinstance(config, (str, Path)):
        given = from_toml(Path(config))
    elif config is not None:
        given = asdict(config) if isinstance(config, RunConfig) else dict(config)
    if isinstance(algorithm, str):
        settings["algorithm"] = algorithm
    elif algorithm is not None:
        settings["algorithm"] = reference(algorithm if isinstance(algorithm, type) else type(algorithm))
    if model is not None:
        settings["model"] = (
            model if isinstance(model, str) else f"object {getattr(model, '__name__', type(model).__name__)}"
        )
    if data is not None:
        if "dataset" in settings:
            raise BadSetting("give dataset, a name, or data, your own, not both")
        settings["dataset"] = "object"
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if settings.get(name):  # what is said last counts
            given.pop(other, None)
            given.pop("batches", None)
    if resume:
        if folder is None:
            raise BadSetting("resume needs the run's folder; give --out DIR")
        stored = folder.settings()
        made = stored.pop("made", {})
        asked = given | settings
        check_same_run(folder, stored, asked)
        given = stored | given | {"set": stored.get("set", {}) | asked.pop("set", {})}
        settings.pop("set", None)
        for choice in ("execution", "compile"):
            if asked.get(choice, "auto") == "auto":  # what it was begun with, so that it goes on bit for bit
                settings.pop(choice, None)
                given[choice] = stored.get(choice, "auto")
        for what, now in (("threads", torch.get_num_threads()), ("ranks", ranks.count())):
            if made.get(what) not in (None, now) and ranks.rank() == 0:
                warnings.warn(
                    f"{folder.path} was run on {made[what]} {what}, now there are {now}: the last digits may differ",
                    stacklevel=3,  # past what joins the ranks
                )
    given |= settings
    alg, given = resolve_algorithm(algorithm, given)
    dataset = None
    if data is not None:
        dataset = dataset_from(data)
        if dataset.sites is not None:
            given.setdefault("partition", "sites")
            given.setdefault("clients", int(dataset.sites.max()) + 1)
            given.setdefault("cohort", min(FIELDS["cohort"].default, given["clients"]))
    chosen = from_mapping(given)
    if not isinstance(alg, Worker):
        alg = make_algorithm(alg, chosen.algorithm, chosen.set)
    chosen = replace(chosen, set=asdict(alg))

    device = ranks.device_of_rank(pick_device(chosen.device))
    if dataset is None:
        dataset = load_dataset(chosen.dataset)
    simulation = simulated(chosen, alg, dataset, chosen.model if model is None else model, device, loss, metrics)
    ranks.all_well()  # before anything is written
    try:
        with arithmetic(chosen.precision, chosen.deterministic):
            if folder is not None:
                folder.make(resume)
                with folder.locked():
                    return drive(Course(simulation, chosen, folder, resume, progress))
            return drive(Course(simulation, chosen, folder, resume, progress))
    finally:
        simulation.clients.close()


def simulated(
    config: RunConfig,
    alg: Any,
    dataset: Dataset,
    model: Any,
    device: torch.device,
    loss: Loss = F.cross_entropy,
    metrics: Mapping[str, Metric] | None = None,
) -> Simulation:
    """The run that the settings describe, before its first round; `model` is an nn.Module, its name, or what builds it."""
    clients = deal_out(config, dataset, device)
    return simulated_on(clients, config, alg, dataset.structures, model, device, loss, metrics)


def simulated_on(
    clients: federation.Federation,
    config: RunConfig,
    alg: Any,
    structures: tuple[str, ...],
    model: Any,
    device: torch.device,
    loss: Loss = F.cross_entropy,
    metrics: Mapping[str, Metric] | None = None,
) -> Simulation:
    """The same on clients that have their samples already; `structures` are what their masks show, if they have masks."""
    net = build_net(clients, config, alg, structures, model, loss)
    if metrics is None and structures:
        metrics = segmentation.metrics(structures)
    elif metrics is None:
        metrics = {"accuracy": accuracy} if net.loss is F.cross_entropy else {}
    return Simulation(alg, net, clients, settings_of(config, clients.sizes, device), metrics, device)


def deal_out(config: RunConfig, dataset: Dataset, device: torch.device) -> federation.Federation:
    """The data set in the hands of the clients."""
    return federation.federate(
        dataset, config.partition, config.clients, config.seed, device, config.val_fraction, config.colour,
        config.own_test,
    )  # fmt: skip


def settings_of(config: RunConfig, sizes: NDArray[np.int64], device: torch.device) -> Settings:
    """How rounds are run, for clients of these sizes."""
    plan = Plan(config.batch, config.steps, config.epochs, config.batches == "persistent")
    return Settings(
        config.cohort, plan, config.seed, config.weights, config.eval_every, config.execution, config.chunk,
        config.lr_decay, parse_drops(config.lr_drops), config.lr_drop, config.sampling, config.dropout_rate,
        parse_slow(config.slow), config.bandwidth, config.latency, config.replay,
        device.type == "cuda" and config.replay and compiles(config, plan, sizes), config.client_eval_every,
        config.compress,
    )  # fmt: skip


def build_net(
    clients: federation.Federation,
    config: RunConfig,
    alg: Any,
    structures: tuple[str, ...],
    model: Any,
    loss: Loss = F.cross_entropy,
) -> Net:
    """The model that everybody trains, with the networks beside it that the algorithm asks for."""
    if not isinstance(model, nn.Module):
        model = build_model(model, clients.shape, clients.classes, config.seed)
    if structures and loss is F.cross_entropy:
        loss = segmentation.dice_loss
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    net = Net(model, loss, dtype)
    for name, (other, outputs) in alg.networks(clients.clients).items():
        net.put_beside(name, Net(build_model(other, clients.shape, outputs, config.seed), dtype=dtype))
    return net


def compiles(config: RunConfig, plan: Plan, sizes: NDArray[np.int64]) -> bool:
    """Whether local steps are compiled: asked for, or so many that they repay the time it takes."""
    if config.compile != "auto":
        return config.compile == "on"
    steps = config.rounds * int(plan.steps_of(sizes).max())
    return steps >= REPAID and not config.deterministic and importlib.util.find_spec("triton") is not None


class Course(Generic[Trained]):
    """A run on its way: its records and checkpoints, from where it stands to its end."""

    def __init__(
        self,
        simulation: Trained,
        config: Any,
        folder: RunFolder | None,
        resume: bool,
        progress: Progress | None,
    ) -> None:
        self.simulation: Trained = simulation
        self.config, self.folder, self.progress = config, folder, progress
        self.stop, self.elapsed = parse_stop(config.stop_at), 0.0
        self.records: list[dict[str, Any]] = []
        self.place_clients()
        if folder is not None and not resume:
            folder.create(written(config, simulation))
        if folder is not None and resume:
            checkpoint = folder.load(config.rounds)
            if checkpoint is not None:
                tensors, facts = checkpoint
                self.place_clients(tensors, facts["round"])
                try:
                    simulation.restore(tensors, facts["round"])
                except (KeyError, ValueError) as error:
                    raise BadRunFolder(f"the checkpoint in {folder.path} is of another run: {error}") from error
                self.elapsed = facts["seconds"]
            ranks.all_well()  # every rank has read the checkpoint, and rank 0 has cut the records back to it
            self.records = folder.records()
            folder.write_settings(written(config, simulation))
        self.began = time.perf_counter() - self.elapsed
        self.saved = simulation.t
        last = self.records[-1] if self.records else {}
        self.reached = ranks.first_rank_says(_reached(self.stop, last, self.elapsed))  # why it ends early, or nothing

    def place_clients(self, tensors: Mapping[str, Tensor] = {}, round: int = 0) -> None:
        if isinstance(self.simulation, Simulation):
            self.simulation.clients = client_table(self.config, self.simulation, self.folder, tensors, round)

    def ahead(self) -> tuple[int, bool]:
        """Rounds up to the next checkpoint, and whether the run ends there; no rounds where it has ended."""
        left, every = self.config.rounds - self.simulation.t, self.config.checkpoint_every
        if left <= 0 or self.reached:
            return 0, True
        count = min(left, every - self.simulation.t % every)
        return count, count == left

    def take(self, made: list[RoundRecord]) -> None:
        """Write down the rounds that were made."""
        simulation: Any = self.simulation
        folder = self.folder
        for each in made:
            record = each.as_dict()
            self.records.append(record)
            self.elapsed = time.perf_counter() - self.began
            if self.stop:
                self.reached = ranks.first_rank_says(_reached(self.stop, record, self.elapsed))
            if isinstance(simulation, Training) and simulation.diverged:  # on all ranks alike
                self.reached = "diverged"
            if folder is not None:
                if record["round"] == 1:
                    folder.write_settings(written(self.config, simulation))  # now the execution is chosen
                folder.append(record)
            if self.progress is not None and ranks.rank() == 0:
                self.progress(record, self.config.rounds)
        due = simulation.t % self.config.checkpoint_every == 0
        if folder is not None and due and simulation.t < self.config.rounds and not self.reached:
            save(simulation, folder, {"seconds": self.elapsed, "finished": False})
            self.saved = simulation.t

    def end(self) -> Result:
        """The last checkpoint and the model."""
        simulation, folder, stopped = self.simulation, self.folder, self.reached or "rounds"
        if folder is not None and (self.saved < simulation.t or not folder.finished()):
            folder.write_model(simulation.model())
            if isinstance(simulation, Simulation) and simulation.alg.personalises:
                folder.write_super(all_models(simulation), about_models(self.config, simulation, self.records))
            save(simulation, folder, {"seconds": self.elapsed, "finished": True, "stopped": stopped})
        return Result(self.records, simulation.model(), self.config, folder.path if folder else None, stopped)


def all_models(simulation: Simulation) -> dict[str, Tensor]:
    """The server's model, everybody's own and the selector, as state dicts under `global.`, `client1.`, ..., `selector.`."""
    net, state = simulation.net, simulation.state
    found = {f"global.{name}": tensor for name, tensor in net.state_dict(state.x, state.buffers).items()}
    for number, served in enumerate(personal_models(simulation), 1):
        found |= {f"client{number}.{name}": tensor for name, tensor in net.state_dict(*served).items()}
    if simulation.alg.chooses:
        chosen = net.beside["selector"].state_dict(*simulation.alg.selector(state.companion))
        found |= {f"selector.{name}": tensor for name, tensor in chosen.items()}
    return found


def about_models(config: RunConfig, simulation: Simulation, records: list[dict[str, Any]]) -> dict[str, Any]:
    """What it takes to use them."""
    data, alg = simulation.data, simulation.alg
    gammas = [r["gamma"] for r in records if r.get("gamma") is not None]
    networks = alg.networks(data.clients)
    return {
        "algorithm": config.algorithm, "dataset": config.dataset, "model": config.model, "shape": list(data.shape),
        "outputs": data.classes, "clients": data.clients, "chooses": alg.chooses,
        "gamma": gammas[-1] if gammas else max(float(getattr(alg, "gamma", 0.0)), 0.0),
        "selector_model": networks["selector"][0] if networks else "",
        "selector_outputs": networks["selector"][1] if networks else 0,
        "masks": data.masks, "mean": list(data.transform.mean), "std": list(data.transform.std),
        "sites": list(data.site_names) or [f"client {n + 1}" for n in range(data.clients)],
    }  # fmt: skip


def drive(course: Course[Any]) -> Result:
    """All rounds from where the run stands to its end."""
    while (ahead := course.ahead())[0]:
        course.take(course.simulation.rounds(*ahead))
    return course.end()


def save(simulation: Simulation | Training, folder: RunFolder, facts: dict[str, Any]) -> None:
    """A checkpoint, and then word of it to the clients' table, which may forget how to go back to the one before."""
    folder.save(simulation.tensors(), {"round": simulation.t} | facts)
    if isinstance(simulation, Simulation):
        simulation.clients.saved(simulation.t)


def client_table(
    config: RunConfig,
    simulation: Simulation,
    folder: RunFolder | None,
    tensors: Mapping[str, Tensor] = {},
    round: int = 0,
) -> ClientTable | DiskTable:
    """Where the clients' state is kept: where the checkpoint has it, or as the settings say.

    `auto` takes the disk in a run on the CPU where a vector for every client would fill half of the free memory.
    """
    if config.client_state == "disk" and (folder is None or ranks.count() > 1):
        why = "the run's folder; give out" if folder is None else "a single process"
        raise BadSetting(f"client_state disk needs {why}, or use memory")
    if folder is None or ranks.count() > 1 or config.client_state == "memory" or "clients.ids" in tensors:
        return ClientTable()
    everybody = simulation.data.clients * nbytes(simulation.state.x)
    crowded = simulation.device.type == "cpu" and everybody > 0.5 * available_memory(simulation.device)
    if crowded or config.client_state == "disk" or "clients.table" in tensors:
        return DiskTable(folder.client_table, folder.client_undo, simulation.data.clients, round)
    return ClientTable()


def _reached(stop: Mapping[str, float], record: Mapping[str, Any], elapsed: float) -> str:
    if "accuracy" in stop and (record.get("accuracy") or 0.0) >= stop["accuracy"]:
        return "accuracy"
    return "time" if "time" in stop and elapsed >= stop["time"] else ""


def resolve_algorithm(algorithm: str | type[Any] | Worker | None, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The algorithm's class, or the object itself where one was given, and the settings with its name in them."""
    if isinstance(algorithm, Worker):
        if given.get("set"):
            raise BadSetting("set goes with an algorithm's name; an algorithm object carries its own fields")
        return algorithm, given | {"algorithm": reference(type(algorithm)), "set": {}}
    if isinstance(algorithm, type):
        return algorithm, given | {"algorithm": reference(algorithm)}
    return algorithm_class(str(given.get("algorithm", FIELDS["algorithm"].default))), given


def reference(kind: type[Any]) -> str:
    """The name under which an algorithm's class is found again."""
    package, _, file = kind.__module__.rpartition(".")
    return file.replace("_", "-") if package == "undrift.algorithms" else f"{kind.__module__}:{kind.__qualname__}"


def check_same_run(folder: RunFolder, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse to go on with a run under settings that it was not started with."""
    for name, value in asked.items():
        was: Any = stored.get(name)
        if name == "set":
            for field, new in value.items():
                if was and was.get(field, new) != new:
                    raise BadRunFolder(
                        f"{folder.path} holds another run: its {field} is {was[field]}, not {new}; choose another --out"
                    )
        elif name not in RESUMABLE and name in stored and was != value:
            raise BadRunFolder(
                f"{folder.path} holds another run: its {name} is {was}, not {value}; choose another --out"
            )


def written(config: Any, simulation: Simulation | Training) -> dict[str, Any]:
    """What run.toml says: every resolved setting, and under [made] what it was made with."""
    from undrift import __version__

    settings = asdict(config)
    made = {
        "undrift": __version__, "commit": commit(), "python": platform.python_version(), "torch": torch.__version__,
        "numpy": np.__version__, "device": str(simulation.device), "threads": torch.get_num_threads(),
        "ranks": ranks.count(), "parameters": simulation.net.layout.entries,
    }  # fmt: skip
    if simulation.device.type == "cpu":
        made["native"] = library() is not None  # whether C was at hand
    if isinstance(simulation, Simulation) and simulation.data.site_names:
        made["sites"] = list(simulation.data.site_names)
    if isinstance(simulation, Simulation) and simulation.device.type == "cuda":
        settings["compile"] = "on" if simulation.settings.compile else "off"
    if isinstance(simulation, Simulation) and simulation.execution is not None:
        settings["execution"] = simulation.execution.name  # once chosen it stays, so that results can be repeated
        if isinstance(simulation.execution, Stacked):
            settings["chunk"] = min(simulation.execution.chunk, config.cohort)
    return settings | {"set": settings.pop("set", {}), "made": made}


def commit() -> str:
    """The commit of the checkout that this package runs from; empty for an installed one."""
    here = Path(__file__).parents[2]
    if not (here / ".git").exists():
        return ""
    asked = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip()
