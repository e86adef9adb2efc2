"""What a run's settings are if nothing is said: a report shows those that differ."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from undrift.core.errors import UndriftError
from undrift.dataparallel.parallel_config import ParallelConfig
from undrift.jobs.config import JobConfig, RunConfig
from undrift.jobs.registry import algorithm_class
from undrift.pipeline.pipe_config import PipeConfig

CONFIGS: dict[str, type[JobConfig]] = {"dp": ParallelConfig, "pipe": PipeConfig}


def default_settings(command: str, algorithm: str) -> dict[str, Any]:
    """The defaults of a command's settings and of an algorithm's fields. A class of the user's is not imported."""
    usual = dataclasses.asdict(CONFIGS.get(command, RunConfig)())
    if command == "run" and ":" not in algorithm:
        with contextlib.suppress(UndriftError):  # a method of another version
            usual |= {field.name: field.default for field in dataclasses.fields(algorithm_class(algorithm))}
    return usual
