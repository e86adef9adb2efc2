"""Step-ahead error feedback takes gradients at x - e_k: DEF with lambda = 1, and the model is x.

Xu, Huo, Huang: Step-Ahead Error Feedback for Distributed Training with Compressed Gradient, AAAI 2021. Averaging the
errors every tau iterations (`average_every`) sends d numbers; it is off by default, so that ratios compare.
"""

from __future__ import annotations

from undrift.dataparallel.def_ import Detached

METHOD = Detached(lam=1.0, returns="x")
