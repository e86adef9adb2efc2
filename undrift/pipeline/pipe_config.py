"""The settings of `undrift pipe`, under the same names in Python, in TOML and on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from undrift.core.errors import BadSetting
from undrift.core.outline import outline
from undrift.dataparallel.parallel_config import MethodConfig
from undrift.jobs.config import JOB_CHOICES, RECORD, STEPS, WHAT, check_choices, check_numbers, fields_of, setting
from undrift.jobs.plain_values import convert, with_own_fields
from undrift.pipeline.schedule import MOST_BLOCKS, Schedule

BLOCKS = "the blocks"
STORED = ("queues", "blocks", "cuts", "micro")  # the fields under [set] in run.toml
# Fields of the method, which --set takes too.
OWN = (*STORED, "replicas", "reduce", "ratio", "lam", "lr", "momentum", "nesterov", "weight_decay")


@dataclass(frozen=True)
class PipeConfig(MethodConfig):
    """All settings of a pipeline run. Each field is a flag of `undrift pipe`."""

    method: str = setting("dsp", "how the blocks are trained", WHAT)
    queues: str = setting("", "DSP's p0,..;m0,.. such as 1,1,0;4,2,0 [the shortest with which no block waits]", BLOCKS)
    blocks: int = setting(
        0, "how many blocks (K) [as --queues or --cuts say; else the number of processes, or 3]", BLOCKS
    )
    cuts: str = setting("", "layers that begin a block, such as stage2,stage3 [balanced by measurement]", BLOCKS)
    micro: int = setting(4, "micro-batches in a batch of gpipe and 1f1b (M)", BLOCKS)
    replicas: int = setting(1, "under torchrun: processes per block, each with batches of its own (D)", BLOCKS)
    reduce: str = setting("mean", "combine replicas' gradients by their mean, or by DEF with --ratio and --lam", BLOCKS)
    batch: int = setting(128, "samples in a batch of each replica", STEPS)
    nesterov: bool = setting(False, "Nesterov's momentum instead of heavy ball", STEPS)
    differences: bool = setting(
        False, "record each block's distance from backpropagation's gradient once a round", RECORD
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, least=dict(blocks=0, micro=1, replicas=1))
        check_choices(self, CHOICES)
        if self.blocks > MOST_BLOCKS:
            raise BadSetting(f"blocks must be at most {MOST_BLOCKS}, not {self.blocks}")
        if self.execution != "auto":
            raise BadSetting(f"blocks are neither stacked nor pooled; leave --execution at auto, not {self.execution}")
        if self.compile == "on":
            raise BadSetting("blocks are run as they are and cannot be compiled; leave --compile at auto, or off")
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
        if self.reduce == "def" and (self.nesterov or self.method in ("gpipe", "1f1b", "dni")):
            raise BadSetting("reduce def allows neither nesterov nor gpipe, 1f1b and dni; use mean with them")
        if self.differences and (self.method in ("gpipe", "1f1b") or self.replicas > 1):
            raise BadSetting("differences are of one replica's stale gradients; use one replica and another method")

    def rate(self, n: int, steps: int) -> float:
        """The learning rate of batch n, if a round has `steps` batches."""
        return self.schedule.rate(self.lr, n // steps, (n + 1) / steps)

    def as_toml(self) -> dict[str, Any]:
        """run.toml in the form that reports read."""
        given = super().as_toml()
        own = {name: given.pop(name) for name in STORED}
        return {"command": "pipe", "algorithm": given.pop("method"), **given, "set": own}


CHOICES = JOB_CHOICES | {"method": tuple(outline("undrift.pipeline.engines").METHODS), "reduce": ("mean", "def")}
FIELDS = fields_of(PipeConfig)
TYPES = get_type_hints(PipeConfig)


def from_mapping(settings: Mapping[str, Any]) -> PipeConfig:
    """A PipeConfig from plain values or from run.toml; unknown names and wrong types are errors."""
    return PipeConfig(**convert(plain(settings), TYPES))


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of the flags; lam may be a number."""
    given = {("method" if name == "algorithm" else name): v for name, v in settings.items() if name != "command"}
    given = with_own_fields(given, OWN, str(FIELDS["method"].default))
    return given | ({"lam": str(given["lam"])} if isinstance(given.get("lam"), int | float) else {})
