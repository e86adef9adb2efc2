"""AdamW: Adam's step, and weight decay beside it that the moments do not see.

Loshchilov, Hutter: Decoupled Weight Decay Regularization. ICLR 2019.
"""

from __future__ import annotations

from undrift.algorithms.optimise.adam import READS, init, step

__all__ = ["DECOUPLED", "READS", "init", "step"]

DECOUPLED = True
