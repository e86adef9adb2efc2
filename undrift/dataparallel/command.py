"""`undrift dataparallel`: the settings of a data-parallel run, and from settings to records and a trained model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F

import undrift.data.federation as federation
from undrift.compress import BLOCKS, COMPRESSORS, make_compressor
from undrift.core import ranks
from undrift.core.device import pick_device
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.data.load import load_dataset
from undrift.dataparallel.agree import agree
from undrift.dataparallel.def_ import Detached
from undrift.dataparallel.methods import METHODS, method, number_or_auto
from undrift.dataparallel.training import Plan, Training
from undrift.dataparallel.workers import Ranks, Stacked
from undrift.jobs.config import (
    JOB_CHOICES,
    JobConfig,
    check_choices,
    check_numbers,
    fields_of,
    setting,
    typed,
    with_own_fields,
)
from undrift.jobs.course import Progress, Result
from undrift.jobs.registry import build_model
from undrift.jobs.start import compiles, start
from undrift.oracle.net import Net
from undrift.simulate.evaluate import accuracy

# What belongs to the method, and may be given by --set too.
OWN = ("ratio", "lam", "compressor", "block", "average_every", "lr", "momentum", "weight_decay")


@dataclass(frozen=True)
class ParallelConfig(JobConfig):
    """Everything that decides a data-parallel run's result, and how it is run. Each field is a flag."""

    method: str = setting("def", "sgd, ef, saef, psync, ef21, def or def-a")
    workers: int = setting(0, "W (default 16; under torchrun the number of processes)")
    batch: int = setting(8, "of each worker")
    steps: int = setting(0, "iterations of a round; 0: a pass over the training samples")
    ratio: float = setting(64.0, "R: of d numbers, ceil(d / R) are sent")
    lam: str = setting("0.3", "lambda of def and def-a, in [0, 1], or auto")
    compressor: str = setting("rbgs", "rbgs, randk or topk")
    block: str = setting("flat", "flat, tensor or shuffle")
    average_every: int = setting(0, "iterations between averagings of saef's errors; 0: never")
    lr: float = setting(0.1, "eta")
    momentum: float = setting(0.9, "mu, of each worker")
    weight_decay: float = setting(0.0, "taken where the gradient is")
    statistics: int = setting(0, "batches for BatchNorm's statistics at the tested weights; 0: the workers' mean")
    checkpoint_every: int = setting(10, "rounds between checkpoints: each holds the vectors of all workers")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(
            self,
            least=dict(workers=0, batch=1, steps=0, average_every=0, statistics=0),
            not_negative=("lr", "momentum", "weight_decay"),
        )
        check_choices(self, CHOICES)
        number_or_auto(self.lam)
        method(self.method, self.lam, self.average_every).check(
            make_compressor(self.compressor, self.block, self.ratio, self.seed, [1])
        )


CHOICES = JOB_CHOICES | {"method": tuple(METHODS), "compressor": COMPRESSORS, "block": BLOCKS}
FIELDS = fields_of(ParallelConfig)
TYPES = get_type_hints(ParallelConfig)


def from_mapping(settings: Mapping[str, Any]) -> ParallelConfig:
    """A ParallelConfig from plain values; unknown names and values of a wrong kind are errors."""
    return ParallelConfig(**typed(plain(settings), TYPES))


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of the flags; lam may be a number, and compile a truth value, as it once was."""
    given = with_own_fields(settings, OWN, str(FIELDS["method"].default))
    if isinstance(given.get("lam"), int | float):
        given["lam"] = as_text(given["lam"])
    if isinstance(given.get("compile"), bool):
        given["compile"] = "on" if given["compile"] else "off"
    return given


def as_text(number: float) -> str:
    """With all digits.

    >>> as_text(1.0), as_text(0.123456789)
    ('1', '0.123456789')
    """
    return repr(float(number)).removesuffix(".0")


@ranks.join()
def run_parallel(
    config: ParallelConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Result[ParallelConfig]:
    """Train one model with W workers: simulated ones in this process, or real ones where torchrun started W processes.

    >>> result = run_parallel(method="def", workers=2, rounds=2, steps=3)
    >>> len(result.records), result.records[-1]["gradients"]
    (2, 6)
    """

    def settle(given: dict[str, Any]) -> dict[str, Any]:
        if ranks.count() > 1 and given.get("workers") not in (0, ranks.count()):
            raise BadRunFolder(
                f"{out} holds a run of {given.get('workers')} workers, but torchrun started {ranks.count()} processes; "
                "start as many"
            )
        return asdict(resolve(from_mapping(given)))

    def build(given: dict[str, Any]) -> tuple[ParallelConfig, AbstractContextManager[Training]]:
        chosen = resolve(from_mapping(given))
        return chosen, contextlib.nullcontext(build_training(chosen))

    return start(config, settings, build, out, resume, progress, plain=plain, settle=settle)


def resolve(config: ParallelConfig) -> ParallelConfig:
    """With the number of workers, what the method settles, and how simulated workers are run, as they will be."""
    processes = ranks.count()
    if processes > 1 and config.workers not in (0, processes):
        raise BadSetting(
            f"{config.workers} workers were asked for, but torchrun started {processes} processes; start as many, or leave "
            "--workers out"
        )
    execution = config.execution
    if execution == "auto":  # stacked convolutions are slow on a CPU, and in turn the bits are those of real ranks
        execution = "stacked" if pick_device(config.device).type == "cuda" else "pool"
    how = method(config.method, config.lam, config.average_every)
    lam = as_text(how.lam) if isinstance(how, Detached) and not isinstance(how.lam, str) else config.lam
    workers = config.workers or (processes if processes > 1 else 16)
    ratio = 1.0 if config.method == "sgd" else config.ratio
    return replace(config, workers=workers, execution=execution, lam=lam, ratio=ratio)


def build_training(config: ParallelConfig) -> Training:
    """The run that the settings describe, before its first round."""
    device = ranks.device_of_rank(pick_device(config.device))
    data = federation.federate(load_dataset(config.dataset), "iid", 1, config.seed, device, config.val_fraction)
    module = build_model(config.model, data.shape, data.classes, config.seed)
    net = Net(module, F.cross_entropy, torch.float64 if config.dtype == "float64" else torch.float32)
    workers = Ranks() if ranks.count() > 1 else Stacked(config.workers)
    if isinstance(workers, Ranks):
        agree(workers, asdict(config))
    compressor = make_compressor(config.compressor, config.block, config.ratio, config.seed, net.layout.sizes)
    steps = config.steps or len(data.members) // (config.workers * config.batch)
    plan = Plan(
        batch=config.batch, steps=config.steps, seed=config.seed, lr=config.lr, momentum=config.momentum,
        weight_decay=config.weight_decay, schedule=config.schedule, eval_every=config.eval_every,
        statistics=config.statistics, stacked=config.execution == "stacked", replay=config.replay,
        compile=compiles(config, config.rounds * steps),
    )  # fmt: skip
    how = method(config.method, config.lam, config.average_every)
    return Training(how, compressor, net, data, plan, workers, {"accuracy": accuracy}, device)
