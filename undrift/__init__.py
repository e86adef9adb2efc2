"""Federated and distributed training that does not drift."""

from typing import TYPE_CHECKING, Any

from undrift.config import RunConfig
from undrift.data.dataset import Dataset
from undrift.errors import UndriftError
from undrift.runs import Result, run
from undrift.supermodel import SuperModel

if TYPE_CHECKING:
    from undrift.dp.optimizer import DEF, EF, EF21, SAEF, PSync

__version__ = "0.1.0"
__all__ = [
    "DEF", "EF", "EF21", "SAEF", "Dataset", "PSync", "Result", "RunConfig", "SuperModel", "UndriftError", "__version__", "run",
]  # fmt: skip
OPTIMIZERS = ("DEF", "EF", "EF21", "PSync", "SAEF")


def __getattr__(name: str) -> Any:
    """The optimizers are imported when they are asked for."""
    if name in OPTIMIZERS:
        import undrift.dp.optimizer

        return getattr(undrift.dp.optimizer, name)
    raise AttributeError(f"module 'undrift' has no attribute {name!r}")
