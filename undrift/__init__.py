"""Federated and distributed training that does not drift."""

from typing import TYPE_CHECKING, Any

from undrift.core.errors import UndriftError
from undrift.core.version import __version__
from undrift.data.dataset import Dataset
from undrift.jobs.config import RunConfig
from undrift.jobs.course import Result
from undrift.jobs.run import run
from undrift.personal.supermodel import SuperModel

if TYPE_CHECKING:
    from undrift.dataparallel.optimizer import DEF, EF, EF21, SAEF, PSync


__all__ = [
    "DEF", "EF", "EF21", "SAEF", "Dataset", "PSync", "Result", "RunConfig", "SuperModel", "UndriftError", "__version__", "run",
]  # fmt: skip
OPTIMIZERS = ("DEF", "EF", "EF21", "PSync", "SAEF")


def __getattr__(name: str) -> Any:
    """The optimizers are imported when they are asked for."""
    if name in OPTIMIZERS:
        import undrift.dataparallel.optimizer

        return getattr(undrift.dataparallel.optimizer, name)
    raise AttributeError(f"module 'undrift' has no attribute {name!r}")
