"""Training of a network cut into blocks that work on different batches at the same time.

`DSP` trains any nn.Sequential, in one process or one process per block; `Schedule` is the timeline behind it.
"""

import undrift.kernels.register  # noqa: F401  gives the plain functions their faster forms
from undrift.pipeline.dsp import DSP
from undrift.pipeline.schedule import Schedule
from undrift.pipeline.sum import SUM

__all__ = ["DSP", "SUM", "Schedule"]
