"""`undrift dataparallel`: from settings to records and a trained model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from undrift.core import ranks
from undrift.core.device import pick_device
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.dataparallel.def_ import Detached
from undrift.dataparallel.methods import make_method
from undrift.dataparallel.parallel_config import (
    CHOICES,
    FIELDS,
    TYPES,
    ParallelConfig,
    format_number,
    from_mapping,
    plain,
)  # fmt: skip
from undrift.dataparallel.training import ParallelTraining
from undrift.jobs.course import Progress, Result
from undrift.jobs.start import start

__all__ = ["CHOICES", "FIELDS", "TYPES", "ParallelConfig", "from_mapping", "plain", "resolve", "run_parallel"]


@ranks.join()
def run_parallel(
    config: ParallelConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Result[ParallelConfig]:
    """Train one model with W workers, simulated in this process or one for each process of torchrun.

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

    if settings.get("workers") == 0:
        raise BadSetting(
            "workers must be at least 1, not 0; leave it out for 16, or under torchrun one for each process"
        )

    def build(given: dict[str, Any]) -> tuple[ParallelConfig, AbstractContextManager[ParallelTraining]]:
        chosen = resolve(from_mapping(given))
        return chosen, contextlib.nullcontext(ParallelTraining(chosen))

    return start(config, settings, build, out, resume, progress, plain=plain, settle=settle)


def resolve(config: ParallelConfig) -> ParallelConfig:
    """Fill in what is left open: the number of workers, lambda, ratio and execution."""
    processes = ranks.count()
    if processes > 1 and config.workers not in (0, processes):
        raise BadSetting(
            f"torchrun started {processes} processes for {config.workers} workers; start as many, or drop --workers"
        )
    execution = config.execution
    if execution == "auto":  # on a CPU stacked convolutions are slow, and pool gives the bits of real ranks
        execution = "stacked" if pick_device(config.device).type == "cuda" else "pool"
    method = make_method(config.method, config.lam, config.average_every)
    lam = config.lam
    if isinstance(method, Detached) and not isinstance(method.lam, str):
        lam = format_number(method.lam)
    workers = config.workers or (processes if processes > 1 else 16)
    ratio = 1.0 if config.method in ("sgd", "adamw") else config.ratio
    return replace(config, workers=workers, execution=execution, lam=lam, ratio=ratio)
