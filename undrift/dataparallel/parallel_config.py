"""The settings of `undrift dataparallel`, under the same names in Python, in TOML and on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from undrift.core.errors import BadSetting
from undrift.core.outline import outline
from undrift.jobs.config import (
    JOB_CHOICES,
    RECORD,
    STEPS,
    WHAT,
    JobConfig,
    check_choices,
    check_numbers,
    fields_of,
    setting,
)
from undrift.jobs.plain_values import convert, with_own_fields

COMPRESSION = "compression"
RATE = 0.02  # the learning rate, where none is given
RATES = {"ef": 0.005, "ef21": 0.005, "dni": 0.01}  # for methods that do not learn with the usual rate
# Fields of the method, which --set takes too.
OWN = ("ratio", "lam", "compressor", "block", "average_every", "lr", "momentum", "weight_decay", "momentum2", "epsilon")


@dataclass(frozen=True)
class MethodConfig(JobConfig):
    """The settings that `undrift dataparallel` and `undrift pipe` share."""

    method: str = ""
    batch: int = setting(8, "samples in a batch of each worker or replica", STEPS)
    steps: int = setting(0, "batches in a round; 0: a pass over the training samples", STEPS)
    ratio: float = setting(
        64.0, "of compressed methods and --reduce def: one in so many numbers is sent (R)", COMPRESSION
    )
    lam: str = setting(
        "auto", "lambda of def, def-a, def-adamw and --reduce def: from 0 to 1 (the thesis': 0.3), or auto", COMPRESSION
    )
    lr: float = setting(0.0, "learning rate [0.02; of ef and ef21 0.005, of dni 0.01]", STEPS)
    momentum: float = setting(0.9, "momentum of each worker or block; first beta of adamw and def-adamw", STEPS)
    weight_decay: float = setting(0.0, "times the parameters, added to the gradient", STEPS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lr:
            object.__setattr__(self, "lr", RATES.get(self.method, RATE))
        check_numbers(self, least=dict(batch=1, steps=0), not_negative=("lr", "momentum", "weight_decay"))
        from undrift.dataparallel.methods import parse_lam

        parse_lam(self.lam)  # also where it is not used


@dataclass(frozen=True)
class ParallelConfig(MethodConfig):
    """All settings of a data-parallel run. Each field is a flag."""

    method: str = setting("def", "how workers exchange gradients; 'undrift list methods' says more", WHAT)
    workers: int = setting(0, "how many workers (W) [16; under torchrun the number of processes]", WHAT)
    compressor: str = setting(
        "",
        "what is sent: the largest for one worker in turn (leader), a random block (rbgs), random numbers (randk), or each "
        "one's largest (topk) [leader for def, def-a and def-adamw, else rbgs]",
        COMPRESSION,
    )
    block: str = setting(
        "flat",
        "flat: of the whole gradient; tensor: of each tensor; shuffle: all blocks in turn, in random order",
        COMPRESSION,
    )
    momentum2: float = setting(0.999, "second beta of adamw and def-adamw", STEPS)
    epsilon: float = setting(1e-8, "epsilon of adamw and def-adamw", STEPS)
    average_every: int = setting(0, "average saef's errors every so many iterations; 0: never", COMPRESSION)
    statistics: int = setting(
        0, "batches that recompute BatchNorm's statistics before a test; 0: the workers' mean", RECORD
    )
    checkpoint_every: int = setting(10, "rounds between checkpoints: each holds the vectors of all workers", RECORD)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.compressor:
            object.__setattr__(self, "compressor", "leader" if self.method.startswith("def") else "rbgs")
        check_numbers(self, least=dict(workers=0, average_every=0, statistics=0), not_negative=("epsilon",))
        if "adamw" in self.method and not (self.momentum < 1.0 and 0.0 <= self.momentum2 < 1.0):
            raise BadSetting(f"{self.method} needs momenta of less than 1, not {self.momentum} and {self.momentum2}")
        check_choices(self, CHOICES)
        from undrift.compress import make_compressor
        from undrift.dataparallel.methods import make_method

        compressor = make_compressor(self.compressor, self.block, self.ratio, self.seed, [1])
        make_method(self.method, self.lam, self.average_every).check(compressor)


CHOICES = JOB_CHOICES | {
    "method": tuple(outline("undrift.dataparallel.methods").METHODS),
    "compressor": outline("undrift.compress").COMPRESSORS,
    "block": outline("undrift.compress").BLOCKS,
}
FIELDS = fields_of(ParallelConfig)
TYPES = get_type_hints(ParallelConfig)


def from_mapping(settings: Mapping[str, Any]) -> ParallelConfig:
    """A ParallelConfig from plain values; unknown names and wrong types are errors."""
    return ParallelConfig(**convert(plain(settings), TYPES))


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of the flags; lam may be a number, and in old run folders compile is a bool."""
    given = with_own_fields(settings, OWN, str(FIELDS["method"].default))
    if isinstance(given.get("lam"), int | float):
        given["lam"] = format_number(given["lam"])
    if isinstance(given.get("compile"), bool):
        given["compile"] = "on" if given["compile"] else "off"
    return given


def format_number(number: float) -> str:
    """All digits of a number.

    >>> format_number(1.0), format_number(0.123456789)
    ('1', '0.123456789')
    """
    return repr(float(number)).removesuffix(".0")
