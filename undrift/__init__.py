"""Federated and distributed training that does not drift."""

from typing import TYPE_CHECKING

from undrift.core.errors import UndriftError
from undrift.core.exports import exports
from undrift.core.version import __version__

if TYPE_CHECKING:
    from undrift.data.dataset import Dataset
    from undrift.dataparallel.local_steps import LocalSteps
    from undrift.dataparallel.optimizer import DEF, EF, EF21, EF21SGDM, SAEF, DEFAdamW, PSync
    from undrift.jobs.config import RunConfig
    from undrift.jobs.course import Result
    from undrift.jobs.curves import Curves
    from undrift.jobs.run import rounds, run
    from undrift.oracle.losses import batch_loss
    from undrift.personal.supermodel import SuperModel
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "Curves": "undrift.jobs.curves",
            "Dataset": "undrift.data.dataset",
            "LocalSteps": "undrift.dataparallel.local_steps",
            "Result": "undrift.jobs.course",
            "RunConfig": "undrift.jobs.config",
            "SuperModel": "undrift.personal.supermodel",
            "batch_loss": "undrift.oracle.losses",
            "rounds": "undrift.jobs.run",
            "run": "undrift.jobs.run",
            **dict.fromkeys(
                ("DEF", "DEFAdamW", "EF", "EF21", "EF21SGDM", "PSync", "SAEF"), "undrift.dataparallel.optimizer"
            ),
        },
    )

__all__ = [
    "DEF", "EF", "EF21", "EF21SGDM", "SAEF", "Curves", "DEFAdamW", "Dataset", "LocalSteps", "PSync", "Result", "RunConfig",
    "SuperModel", "UndriftError", "__version__", "batch_loss", "rounds", "run",
]  # fmt: skip
