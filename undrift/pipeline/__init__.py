"""Training of a network cut into blocks that work on different batches at the same time.

`DSP` trains any nn.Sequential, in one process or one process per block; `Schedule` is the timeline behind it.
"""

from typing import TYPE_CHECKING

from undrift.core.exports import exports
from undrift.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from undrift.pipeline.dsp import DSP
    from undrift.pipeline.sum import SUM
else:
    __getattr__, __dir__ = exports(__name__, {"DSP": "undrift.pipeline.dsp", "SUM": "undrift.pipeline.sum"})

__all__ = ["DSP", "SUM", "Schedule"]
