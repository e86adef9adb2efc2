"""The settings of `undrift pipe`: one frozen dataclass, the same names in Python, in TOML and on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from undrift.core.errors import BadSetting, UnknownName
from undrift.dataparallel.methods import number_or_auto
from undrift.jobs.config import as_type, check_choices, check_numbers, parse_drops, parse_stop
from undrift.pipeline.methods import METHODS
from undrift.pipeline.schedule import Schedule

OWN = ("queues", "blocks", "cuts", "micro")  # what belongs to the method: run.toml has it under [set]


@dataclass(frozen=True)
class PipeConfig:
    """Everything that decides a pipeline run's result, and how it is run. Each field is a flag of `undrift pipe`."""

    method: str = field(default="dsp", metadata={"help": "how the blocks are trained"})
    queues: str = field(
        default="", metadata={"help": "DSP's p0,..;m0,.. such as 1,1,0;4,2,0; empty: the shortest where no block waits"}
    )
    blocks: int = field(
        default=0, metadata={"help": "K; 0: as the queues say, or as many as there are processes, or 3"}
    )
    cuts: str = field(
        default="",
        metadata={"help": "layers that begin a block, such as stage2,stage3; empty: balanced by measurement"},
    )
    micro: int = field(default=4, metadata={"help": "M, micro-batches of gpipe and 1f1b"})
    replicas: int = field(default=1, metadata={"help": "D, under torchrun: processes for each block, with own batches"})
    reduce: str = field(
        default="mean",
        metadata={"help": "how replicas join their gradients: mean, or def (see undrift dp) with --ratio, --lam"},
    )
    ratio: float = field(
        default=64.0, metadata={"help": "of --reduce def: of d numbers of a block, ceil(d / ratio) are sent"}
    )
    lam: str = field(default="0.3", metadata={"help": "lambda of --reduce def, in [0, 1], or auto"})
    dataset: str = field(
        default="digits", metadata={"help": "a listed name, imagefolder:PATH, or package.module:function"}
    )
    model: str = field(default="mlp", metadata={"help": "a listed name, or package.module:function; an nn.Sequential"})
    batch: int = field(default=128, metadata={"help": "samples in a batch of each replica"})
    steps: int = field(default=0, metadata={"help": "batches in a round; 0: a pass over the training samples"})
    rounds: int = field(default=10, metadata={"help": "T"})
    lr: float = field(default=0.1, metadata={"help": "alpha"})
    momentum: float = field(default=0.9, metadata={"help": "beta"})
    nesterov: bool = field(default=False, metadata={"help": "Nesterov's momentum instead of heavy ball"})
    weight_decay: float = field(default=0.0, metadata={"help": "added to the gradient"})
    warmup: float = field(default=0.0, metadata={"help": "rounds in which the rate rises from 0"})
    lr_decay: float = field(default=1.0, metadata={"help": "multiplies the rate after every round"})
    lr_drops: str = field(default="", metadata={"help": "rounds after which the rate drops, such as 150,225"})
    lr_drop: float = field(default=0.1, metadata={"help": "what it is multiplied by at each of --lr-drops"})
    seed: int = field(default=0, metadata={"help": "of everything random"})
    val_fraction: float = field(default=0.0, metadata={"help": "share of the training samples held out for validation"})
    differences: bool = field(
        default=False, metadata={"help": "record each block's distance from backpropagation's gradient once a round"}
    )
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    dtype: str = field(default="float32", metadata={"help": "float32 or float64"})
    precision: str = field(default="fp32", metadata={"help": "of products on a GPU: fp32, or tf32 (10 bits, faster)"})
    deterministic: bool = field(default=False, metadata={"help": "make CUDA runs repeatable"})
    eval_every: int = field(default=1, metadata={"help": "rounds between evaluations"})
    checkpoint_every: int = field(default=1, metadata={"help": "rounds between checkpoints"})
    stop_at: str = field(default="", metadata={"help": "accuracy=0.9 or time=10m (s, m, h), or both with a comma"})

    def __post_init__(self) -> None:
        check_numbers(
            self,
            least=dict(
                blocks=0, micro=1, replicas=1, batch=1, steps=0, rounds=0, seed=0, eval_every=1, checkpoint_every=1
            ),
            not_negative=("lr", "momentum", "weight_decay", "warmup", "val_fraction"),
            positive=("lr_decay", "lr_drop"),
        )
        check_choices(self, CHOICES)
        parse_drops(self.lr_drops)
        parse_stop(self.stop_at)
        if self.queues:
            if self.method != "dsp":
                raise BadSetting(f"queues are DSP's; {self.method} has its own, so leave --queues out")
            count = Schedule.parse(self.queues).blocks
            if self.blocks not in (0, count):
                raise BadSetting(f"the queues are for {count} blocks, not {self.blocks}; leave out one of the two")
        if self.method == "bp" and (self.blocks > 1 or self.cuts):
            raise BadSetting("bp trains the model whole; use bp-k for backpropagation through blocks")
        if self.method in ("gpipe", "1f1b") and self.batch % self.micro:
            raise BadSetting(f"a batch of {self.batch} does not divide into {self.micro} equal micro-batches")
        number_or_auto(self.lam)
        if self.reduce == "def" and (self.nesterov or self.method in ("gpipe", "1f1b", "dni")):
            raise BadSetting(
                "reduce def has heavy-ball momentum and one update a batch; use mean with nesterov, micro-batches or dni"
            )
        if self.differences and (self.method in ("gpipe", "1f1b") or self.replicas > 1):
            raise BadSetting(
                "differences are of one replica's stale gradients; leave out replicas, and use another method"
            )

    def rate(self, n: int, steps: int) -> float:
        """The learning rate of batch n, where a round has so many."""
        t = n // steps
        warm = min(1.0, (n + 1) / (steps * self.warmup)) if self.warmup else 1.0
        return float(
            warm * self.lr * self.lr_decay**t * self.lr_drop ** sum(t >= d for d in parse_drops(self.lr_drops))
        )


CHOICES = {
    "method": tuple(METHODS),
    "reduce": ("mean", "def"),
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("float32", "float64"),
    "precision": ("fp32", "tf32"),
}
FIELDS = {f.name: f for f in dataclasses.fields(PipeConfig)}
TYPES = get_type_hints(PipeConfig)


def from_mapping(settings: Mapping[str, Any]) -> PipeConfig:
    """A PipeConfig from plain values, or from what run.toml holds; unknown names and values of a wrong kind are errors."""
    given = dict(settings)
    given |= given.pop("set", {})
    given.pop("command", None)
    if "algorithm" in given:
        given["method"] = given.pop("algorithm")
    for name in given:
        if name not in FIELDS:
            raise UnknownName("setting", name, FIELDS)
    return PipeConfig(**{name: as_type(name, value, TYPES[name]) for name, value in given.items()})


def as_toml(config: PipeConfig) -> dict[str, Any]:
    """What run.toml says of the settings, in the form that reports read."""
    given = asdict(config)
    own = {name: given.pop(name) for name in OWN}
    return {"command": "pipe", "algorithm": given.pop("method"), **given, "set": own}
