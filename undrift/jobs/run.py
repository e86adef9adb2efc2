"""`undrift.run`: simulates a federated run, from settings or from a model and data in Python."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import nn

from undrift.algorithms.base import Worker
from undrift.core import ranks
from undrift.core.device import pick_device
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.core.lora import parse_lora
from undrift.core.pinned import pin
from undrift.core.run_files import DEPLOYED
from undrift.core.streams import Purpose, stream
from undrift.data.batches import Plan
from undrift.data.dataset import Dataset
from undrift.data.federation import Federation, Ids, federate
from undrift.data.from_user import dataset_from
from undrift.data.load import load_dataset
from undrift.jobs.clocks import clock_of, concurrent_of
from undrift.jobs.config import FIELDS, RunConfig, from_mapping, parse_drops, parse_slow
from undrift.jobs.course import Course, Progress, Result, drive, stretches
from undrift.jobs.curves import Curves
from undrift.jobs.plain_values import lr_among_fields
from undrift.jobs.registry import algorithm_class, build_model, make_algorithm
from undrift.jobs.run_settings import RunSettings
from undrift.jobs.start import begin, compiles, read
from undrift.models._adapters import with_lora
from undrift.models._hugging_face import predicts_next
from undrift.oracle import segmentation
from undrift.oracle.losses import IGNORED, Loss
from undrift.oracle.net import Net
from undrift.oracle.tasks import LOSSES, binary_accuracy, binary_loss, cox_loss
from undrift.round.private import Privacy
from undrift.simulate.evaluate import Metric, accuracy
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation
from undrift.simulate.whole_metrics import CIndex, WholeMetric, metrics_of

OnRound = Callable[[dict[str, Any]], object]
Metrics = Mapping[str, Metric | WholeMetric | str] | Sequence[str]
Config = RunConfig | Mapping[str, Any] | str | Path | None


class Options(RunSettings, total=False):
    """What `run` and `rounds` take by name."""

    algorithm: str | type[Any] | Worker | None
    model: str | nn.Module | Callable[[tuple[int, ...], int], nn.Module] | None
    data: Any
    loss: Loss
    metrics: Metrics | None
    out: str | Path | None
    resume: bool
    progress: Progress | None
    on_round: OnRound | None


@ranks.join()
def run(config: Config = None, **options: Unpack[Options]) -> Result[RunConfig]:
    """Simulate a federated training run.

    `config` is a RunConfig, a mapping, or the path of a TOML file; settings have the names of the flags and override it.
    `model` may be any nn.Module; `data` arrays, a torch Dataset, or a Dataset for each client (see
    `undrift.data.from_user`). `loss(outputs, targets)` is evaluated for each sample and averaged over the real samples.
    `metrics` are measured beside accuracy: functions of (outputs, targets) that give a number for each sample or one for the
    batch, objects with reset, update and compute (also of torchmetrics), or the names f1, auc, calibration, perplexity, bits.
    `on_round` is called with each record; `undrift.Curves()` draws them in a notebook. With `out` the run is written to that
    folder and can be resumed. Under torchrun, all processes do the run together.

    >>> result = run(algorithm="fedavg", rounds=2, clients=10, cohort=2)
    >>> len(result.records), sorted(result.model)[:2]
    (2, ['head.bias', 'head.weight'])
    """
    with open_run(config, **options) as course:
        return drive(course)


class Rounds:
    """The records of a run, one round after another; `result` is there when the loop has ended, also by `break`."""

    def __init__(self, config: Config, options: Options) -> None:
        self.config, self.options = config, options
        self.result: Result[RunConfig] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with ranks.join(), open_run(self.config, **self.options) as course:
            try:
                for records in stretches(course):
                    yield from records
            except GeneratorExit:  # the loop was left
                self.result = course.leave()
                raise
            self.result = course.end()


def rounds(config: Config = None, **options: Unpack[Options]) -> Rounds:
    """The same run as a loop over its records. `break` ends it with a checkpoint, from which it can be resumed.

    >>> loop = rounds(rounds=50, clients=10, cohort=2)
    >>> for record in loop:
    ...     if record["round"] == 3:
    ...         break
    >>> loop.result.stopped, len(loop.result.records)
    ('break', 3)
    """
    return Rounds(config, options)


@contextlib.contextmanager
def open_run(
    config: Config,
    *,
    algorithm: str | type[Any] | Worker | None = None,
    model: str | nn.Module | Callable[[tuple[int, ...], int], nn.Module] | None = None,
    data: Any = None,
    loss: Loss = F.cross_entropy,
    metrics: Metrics | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    on_round: OnRound | None = None,
    **options: Unpack[RunSettings],
) -> Iterator[Course[Any, RunConfig]]:
    """The run that `run` describes, before its next round."""

    def tell(record: dict[str, Any], rounds: int) -> None:
        if progress is not None:
            progress(record, rounds)
        if on_round is not None:
            on_round(record)

    if resume and out is not None and (Path(out) / DEPLOYED).exists():
        raise BadRunFolder(f"{out} holds a deployed run, which goes on with undrift deploy; choose another --out")
    for name, function in (("progress", progress), ("on_round", on_round)):
        if function is not None and not callable(function):
            raise BadSetting(f"{name} must be a function of a record, not {function!r}")
    if out is not None and not isinstance(out, str | Path):
        raise BadSetting(f"out must be the path of a folder, not {out!r}")
    if not isinstance(algorithm, str | type | Worker | None) or (
        isinstance(algorithm, type) and not issubclass(algorithm, Worker)
    ):
        raise BadSetting(f"algorithm must be the name, the class or an object of an algorithm, not {algorithm!r}")
    if isinstance(loss, type) or not callable(loss):
        raise BadSetting(f"loss must be a function of (outputs, targets), or an object that is called so, not {loss!r}")
    settings: dict[str, Any] = dict(options)
    given = lr_among_fields(read(config))
    settings = lr_among_fields(settings, given.get("set"))
    if algorithm is not None:
        settings["algorithm"] = algorithm if isinstance(algorithm, str) else reference(algorithm)
    if model is not None:
        shown = f"object {getattr(model, '__name__', type(model).__name__)}"
        settings["model"] = model if isinstance(model, str) else shown
    if data is not None:
        if "dataset" in settings:
            raise BadSetting("give dataset, a name, or data, your own, not both")
        settings["dataset"] = "object"
    for each in (given, settings):
        if isinstance(each.get("model"), str):
            each["model"] = pin(each["model"])
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if settings.get(name):  # overrides the file's choice between the two
            given.pop(other, None)
            given.pop("batches", None)

    def build(given: dict[str, Any]) -> tuple[RunConfig, contextlib.AbstractContextManager[Simulation]]:
        if isinstance(algorithm, Worker):
            if given.get("set"):
                raise BadSetting("set goes with an algorithm's name; an algorithm object carries its own fields")
            given["set"] = {}
        dataset = None if data is None else dataset_from(data)
        if dataset is None and given.get("partition") == "sites" and "clients" not in given:
            dataset = load_dataset(str(given.get("dataset", FIELDS["dataset"].default)))
        if dataset is not None and dataset.sites is not None:
            given.setdefault("partition", "sites")
            given.setdefault("clients", int(dataset.sites.max()) + 1)
            given.setdefault("cohort", min(FIELDS["cohort"].default, given["clients"]))
        chosen = from_mapping(given)
        alg: Any = algorithm
        if not isinstance(alg, Worker):
            kind = alg if isinstance(alg, type) else algorithm_class(chosen.algorithm)
            alg = make_algorithm(kind, chosen.algorithm, chosen.set, FIELDS)
            if asdict(alg).keys() - chosen.set.keys():  # all fields are there if a run or a sweep has written them down
                for name in alg.unread(chosen.set):
                    warnings.warn(
                        f"{name} has no effect with optimizer={alg.optimizer}; set optimizer too", stacklevel=2
                    )
        chosen = replace(chosen, set=asdict(alg))
        device = ranks.device_of_rank(pick_device(chosen.device))
        if dataset is None:
            dataset = load_dataset(chosen.dataset)
        net = chosen.model if model is None else model
        return chosen, contextlib.closing(build_simulation(chosen, alg, dataset, net, device, loss, metrics))

    with begin(given, settings, build, out, resume, tell) as course:
        try:
            yield course
        finally:
            if isinstance(on_round, Curves):
                on_round.show()  # the last rounds, too


def build_simulation(
    config: RunConfig,
    alg: Any,
    dataset: Dataset,
    model: Any,
    device: torch.device,
    loss: Loss = F.cross_entropy,
    metrics: Metrics | None = None,
) -> Simulation:
    """Build the run that the settings describe; `model` is an nn.Module, its name, or a function that builds it."""
    clients = deal_out(config, dataset, device)
    return simulate_clients(clients, config, alg, dataset.structures, model, device, loss, metrics)


def simulate_clients(
    clients: Federation,
    config: RunConfig,
    alg: Any,
    structures: tuple[str, ...],
    model: Any,
    device: torch.device,
    loss: Loss = F.cross_entropy,
    metrics: Metrics | None = None,
) -> Simulation:
    """Build a simulation of clients that have their samples; `structures` are what masks show, if targets are masks."""
    net = build_net(clients, config, alg, structures, model, loss)
    measured: dict[str, Metric | WholeMetric] = {**usual_metrics(net, structures), **metrics_of(metrics)}
    return Simulation(alg, net, clients, settings_of(config, clients.sizes, device), measured, device)


def usual_metrics(net: Net, structures: tuple[str, ...]) -> Mapping[str, Metric | WholeMetric]:
    """The metrics of a model where the user names none; `structures` are what masks show, if targets are masks."""
    if structures:
        return segmentation.metrics(structures)
    if net.loss in (binary_loss, cox_loss):
        return {"accuracy": binary_accuracy} if net.loss is binary_loss else {"c_index": CIndex()}
    return {"accuracy": accuracy} if net.loss is F.cross_entropy else {}


def deal_out(config: RunConfig, dataset: Dataset, device: torch.device) -> Federation:
    """Deal the samples of a data set out to clients."""
    return federate(
        dataset, config.partition, config.clients, config.seed, device, config.val_fraction, config.colour,
        config.own_test,
    )  # fmt: skip


def settings_of(config: RunConfig, sizes: Ids, device: torch.device) -> Settings:
    """The simulator's settings, for clients of these sizes."""
    plan = Plan(config.batch, config.steps, config.epochs, config.batches == "persistent")
    plan.check_size(sizes, config.clients if config.sampling == "bernoulli" else config.cohort)
    replayed = device.type == "cuda" and config.replay
    return Settings(
        cohort=config.cohort, plan=plan, seed=config.seed, weights=config.weights, eval_every=config.eval_every,
        execution=config.execution, chunk=config.chunk, lr_decay=config.lr_decay, lr_drops=parse_drops(config.lr_drops),
        lr_drop=config.lr_drop, sampling=config.sampling, dropout_rate=config.dropout_rate, slow=parse_slow(config.slow),
        bandwidth=config.bandwidth, latency=config.latency, replay=config.replay,
        compile=replayed and compiles(config, config.rounds * int(plan.steps_of(sizes).max())),
        client_eval_every=config.client_eval_every, compress=config.compress, warmup=config.warmup,
        client_state=config.client_state, privacy=privacy_of(config), aggregate=config.aggregate, attack=config.attack,
        clock=clock_of(config), over_select=config.over_select, concurrent=concurrent_of(config),
    )  # fmt: skip


def privacy_of(config: RunConfig) -> Privacy | None:
    """How the run hides single clients; None if it does not."""
    if not config.privacy_clip:
        return None
    return Privacy(
        config.privacy_clip, config.privacy_noise, config.privacy_delta, config.privacy_quantile, config.cohort,
        config.steps,
    )  # fmt: skip


def build_net(
    clients: Federation,
    config: RunConfig,
    alg: Any,
    structures: tuple[str, ...],
    model: Any,
    loss: Loss = F.cross_entropy,
) -> Net:
    """Build the model, and the further networks that the algorithm needs."""
    given = isinstance(model, nn.Module)
    if not given:
        if clients.pieces and ":" not in str(model):
            raise BadSetting(
                f"the inputs have {len(clients.pieces)} parts, but {model} takes one; give a model of yours"
            )
        if not clients.classes and ":" not in str(model):
            raise BadSetting(
                f"the data have no classes, from which {model} would take its outputs; give a model of yours"
            )
        model = build_model(model, shape_seen(clients), clients.classes, config.seed, clients.train.targets.dim() - 1)
    if lora := parse_lora(config.lora):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(config.seed, Purpose.INITIAL, 1) >> 1)
            model = with_lora(copy.deepcopy(model) if given else model, lora)
    check_next_tokens(model, clients)
    if structures and loss is F.cross_entropy:
        loss = segmentation.dice_loss
    if clients.task and loss is F.cross_entropy:
        loss = LOSSES[clients.task]
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    net = Net(model, loss, dtype, clients.pieces, alg.trains)
    for name, (other, outputs) in alg.networks(clients.clients).items():
        net.add_network(name, Net(build_model(other, clients.shape, outputs, config.seed), dtype=dtype))
    return net


def check_next_tokens(model: nn.Module, clients: Federation) -> None:
    """Refuse labels that repeat the inputs, which transformers' own loss moves by one token, and a loss here does not."""
    shape, targets = shape_seen(clients), clients.train.targets
    if not len(targets) or targets.shape[1:] != shape or targets.is_floating_point() or not predicts_next(model):
        return
    rows = torch.arange(min(len(targets), 100), device=targets.device)
    ids = clients.train.take(rows).flatten(1)[:, : targets.shape[1]]
    if bool(((targets[rows] == ids) | (targets[rows] == IGNORED)).all()):
        raise BadSetting(
            "the labels repeat the inputs; here a label is what the model is to say at its place: give inputs[:, :-1] and "
            "labels inputs[:, 1:]"
        )


def shape_seen(clients: Federation) -> tuple[int, ...]:
    """The shape of one input; of several parts, that of the first, to which the others (masks, types) belong."""
    return clients.pieces[0].shape if clients.pieces else clients.shape


def reference(algorithm: type[Any] | Worker) -> str:
    """The name by which the class of an algorithm can be loaded again."""
    kind = algorithm if isinstance(algorithm, type) else type(algorithm)
    package, _, file = kind.__module__.rpartition(".")
    return file.replace("_", "-") if package == "undrift.algorithms" else f"{kind.__module__}:{kind.__qualname__}"
