"""Step-ahead error feedback: gradients are taken at x - e_k, and now and then the errors are averaged.

Xu, Huo, Huang: Step-Ahead Error Feedback for Distributed ParallelTraining with Compressed Gradient, AAAI 2021.

It is detached error feedback with lambda = 1, and returns x. Averaging the errors every tau iterations
(`average_every`) costs d numbers each time; it is off by default, so that ratios compare.
"""

from __future__ import annotations

from undrift.dataparallel.def_ import Detached

METHOD = Detached(lam=1.0, returns="x")
