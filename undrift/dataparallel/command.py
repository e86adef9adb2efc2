"""`undrift dp`: the settings of a data-parallel run, and from settings to records and a trained model."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F

import undrift.data.federation as federation
from undrift.compress import BLOCKS, COMPRESSORS, make_compressor
from undrift.core import ranks
from undrift.core.arithmetic import arithmetic, pick_device
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.data.load import load_dataset
from undrift.dataparallel.agree import agree
from undrift.dataparallel.def_ import Detached
from undrift.dataparallel.methods import METHODS, method, number_or_auto
from undrift.dataparallel.training import Schedule, Training
from undrift.dataparallel.workers import Ranks, Stacked
from undrift.jobs.config import check_choices, check_numbers, from_toml, parse_drops, parse_stop, typed
from undrift.jobs.folder import ReadOnlyFolder, RunFolder
from undrift.jobs.registry import build_model
from undrift.jobs.run import Course, Progress, Result, check_same_run, drive
from undrift.oracle.net import Net
from undrift.simulate.evaluate import accuracy


@dataclass(frozen=True)
class ParallelConfig:
    """Everything that decides a data-parallel run's result, and how it is run. Each field is a flag of `undrift dp`."""

    method: str = field(default="def", metadata={"help": "sgd, ef, saef, psync, ef21, def or def-a"})
    dataset: str = field(
        default="digits", metadata={"help": "a listed name, imagefolder:PATH, or package.module:function"}
    )
    model: str = field(default="mlp", metadata={"help": "a listed name, or package.module:function"})
    workers: int = field(default=0, metadata={"help": "W (default 16; under torchrun the number of processes)"})
    batch: int = field(default=8, metadata={"help": "of each worker"})
    steps: int = field(default=0, metadata={"help": "iterations of a round; 0: a pass over the training samples"})
    rounds: int = field(default=20, metadata={"help": "T"})
    ratio: float = field(default=64.0, metadata={"help": "R: of d numbers, ceil(d / R) are sent"})
    lam: str = field(default="0.3", metadata={"help": "lambda of def and def-a, in [0, 1], or auto"})
    compressor: str = field(default="rbgs", metadata={"help": "rbgs, randk or topk"})
    block: str = field(default="flat", metadata={"help": "flat, tensor or shuffle"})
    average_every: int = field(default=0, metadata={"help": "iterations between averagings of saef's errors; 0: never"})
    lr: float = field(default=0.1, metadata={"help": "eta"})
    momentum: float = field(default=0.9, metadata={"help": "mu, of each worker"})
    weight_decay: float = field(default=0.0, metadata={"help": "taken where the gradient is"})
    warmup: float = field(default=0.0, metadata={"help": "rounds in which the rate rises from 0"})
    lr_decay: float = field(default=1.0, metadata={"help": "multiplies the rate after every round"})
    lr_drops: str = field(default="", metadata={"help": "rounds after which the rate drops, such as 100,150"})
    lr_drop: float = field(default=0.1, metadata={"help": "what it is multiplied by at each of --lr-drops"})
    seed: int = field(default=0, metadata={"help": "of everything random"})
    val_fraction: float = field(default=0.0, metadata={"help": "share of the training samples held out for validation"})
    statistics: int = field(
        default=0, metadata={"help": "batches for BatchNorm's statistics at the tested weights; 0: the workers' mean"}
    )
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    dtype: str = field(default="float32", metadata={"help": "float32 or float64"})
    execution: str = field(
        default="auto", metadata={"help": "of simulated workers: stacked, pool (in turn), or auto (stacked on a GPU)"}
    )
    replay: bool = field(default=False, metadata={"help": "on a GPU, replay stacked gradients as a CUDA graph"})
    compile: bool = field(default=False, metadata={"help": "compile what is replayed: slow to begin, then faster"})
    precision: str = field(default="fp32", metadata={"help": "of products on a GPU: fp32, or tf32 (10 bits, faster)"})
    deterministic: bool = field(default=False, metadata={"help": "make CUDA runs repeatable"})
    eval_every: int = field(default=1, metadata={"help": "rounds between evaluations"})
    checkpoint_every: int = field(default=10, metadata={"help": "rounds between checkpoints"})
    stop_at: str = field(default="", metadata={"help": "accuracy=0.9 or time=10m (s, m, h), or both with a comma"})

    def __post_init__(self) -> None:
        check_numbers(
            self,
            least=dict(workers=0, batch=1, steps=0, rounds=0, average_every=0, seed=0, statistics=0, eval_every=1)
            | dict(checkpoint_every=1),
            not_negative=("lr", "momentum", "weight_decay", "warmup"),
            positive=("lr_decay", "lr_drop"),
        )
        check_choices(self, CHOICES)
        number_or_auto(self.lam)
        method(self.method, self.lam, self.average_every).check(
            make_compressor(self.compressor, self.block, self.ratio, self.seed, [1])
        )
        parse_drops(self.lr_drops)
        parse_stop(self.stop_at)


CHOICES: dict[str, tuple[str, ...]] = {
    "method": tuple(METHODS),
    "compressor": COMPRESSORS,
    "block": BLOCKS,
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("float32", "float64"),
    "execution": ("auto", "stacked", "pool"),
    "precision": ("fp32", "tf32"),
}
FIELDS = {f.name: f for f in dataclasses.fields(ParallelConfig)}
TYPES = get_type_hints(ParallelConfig)


def from_mapping(settings: Mapping[str, Any]) -> ParallelConfig:
    """A ParallelConfig from plain values; a run folder's empty [set] table is left out, and lam may be a number."""
    given = {name: value for name, value in settings.items() if name != "set" or value}
    if isinstance(given.get("lam"), int | float):
        given["lam"] = as_text(given["lam"])
    return ParallelConfig(**typed(given, TYPES))


def as_text(number: float) -> str:
    """With all digits.

    >>> as_text(1.0), as_text(0.123456789)
    ('1', '0.123456789')
    """
    return repr(float(number)).removesuffix(".0")


@ranks.joined()
def run_parallel(
    config: ParallelConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Result:
    """Train one model with W workers: simulated ones in this process, or real ones where torchrun started W processes.

    >>> result = run_parallel(method="def", workers=2, rounds=2, steps=3)
    >>> len(result.records), result.records[-1]["gradients"]
    (2, 6)
    """
    given: dict[str, Any] = {}
    if isinstance(config, str | Path):
        given = from_toml(Path(config))
    elif config is not None:
        given = asdict(config) if isinstance(config, ParallelConfig) else dict(config)
    folder = None
    if out is not None:
        folder = RunFolder(Path(out)) if ranks.rank() == 0 else ReadOnlyFolder(Path(out))
    asked = given | settings
    if resume:
        if folder is None:
            raise BadSetting("resume needs the run's folder; give --out DIR")
        stored = folder.settings()
        made = stored.pop("made", {})
        if ranks.count() > 1 and stored.get("workers") != ranks.count():
            raise BadRunFolder(
                f"{folder.path} holds a run of {stored.get('workers')} workers, but torchrun started {ranks.count()} processes; "
                "start as many"
            )
        asked = stored | asked
        check_same_run(folder, stored, asdict(resolved(from_mapping(asked))))
        for what, now in (("threads", torch.get_num_threads()), ("ranks", ranks.count())):
            if made.get(what) not in (None, now) and ranks.rank() == 0:
                warnings.warn(
                    f"{folder.path} was run on {made[what]} {what}, now there are {now}: the last digits may differ",
                    stacklevel=3,  # past what joins the ranks
                )
    chosen = resolved(from_mapping(asked))
    training = made_of(chosen)
    ranks.all_well()  # before anything is written
    with arithmetic(chosen.precision, chosen.deterministic):
        if folder is not None:
            folder.make(resume)
            with folder.locked():
                return drive(Course(training, chosen, folder, resume, progress))
        return drive(Course(training, chosen, folder, resume, progress))


def resolved(config: ParallelConfig) -> ParallelConfig:
    """With the number of workers, what the method settles, and how simulated workers are run, as they will be."""
    processes = ranks.count()
    if processes > 1 and config.workers not in (0, processes):
        raise BadSetting(
            f"{config.workers} workers were asked for, but torchrun started {processes} processes; start as many, or leave "
            "--workers out"
        )
    if not 0.0 <= config.val_fraction < 1.0:
        raise BadSetting(f"val_fraction must lie in [0, 1), not {config.val_fraction}")
    execution = config.execution
    if execution == "auto":  # stacked convolutions are slow on a CPU, and in turn the bits are those of real ranks
        execution = "stacked" if pick_device(config.device).type == "cuda" else "pool"
    how = method(config.method, config.lam, config.average_every)
    lam = as_text(how.lam) if isinstance(how, Detached) and not isinstance(how.lam, str) else config.lam
    workers = config.workers or (processes if processes > 1 else 16)
    ratio = 1.0 if config.method == "sgd" else config.ratio
    return replace(config, workers=workers, execution=execution, lam=lam, ratio=ratio)


def made_of(config: ParallelConfig) -> Training:
    """The run that the settings describe, before its first round."""
    device = ranks.device_of_rank(pick_device(config.device))
    data = federation.federate(load_dataset(config.dataset), "iid", 1, config.seed, device, config.val_fraction)
    module = build_model(config.model, data.shape, data.classes, config.seed)
    net = Net(module, F.cross_entropy, torch.float64 if config.dtype == "float64" else torch.float32)
    workers = Ranks() if ranks.count() > 1 else Stacked(config.workers)
    if isinstance(workers, Ranks):
        agree(workers, asdict(config))
    compressor = make_compressor(config.compressor, config.block, config.ratio, config.seed, net.layout.sizes)
    schedule = Schedule(
        config.batch, config.steps, config.seed, config.lr, config.momentum, config.weight_decay, config.warmup,
        config.lr_decay, parse_drops(config.lr_drops), config.lr_drop, config.eval_every, config.statistics,
    )  # fmt: skip
    how = method(config.method, config.lam, config.average_every)
    return Training(
        how,
        compressor,
        net,
        data,
        schedule,
        workers,
        config.execution == "stacked",
        config.replay,
        config.compile,
        {"accuracy": accuracy},
        device,
    )
