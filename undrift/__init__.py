"""Federated and distributed training that does not drift."""

from undrift.config import RunConfig
from undrift.data.dataset import Dataset
from undrift.errors import UndriftError
from undrift.runs import Result, run
from undrift.supermodel import SuperModel

__version__ = "0.1.0"
__all__ = ["Dataset", "Result", "RunConfig", "SuperModel", "UndriftError", "__version__", "run"]
