"""Error feedback: what compression dropped is added to the next update; gradients are taken at x.

Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019; with
each worker's own momentum as in Zheng, Huang, Kwok: Communication-Efficient Distributed Blockwise Momentum SGD with Error
Feedback, NeurIPS 2019 (Differs: heavy-ball momentum, not Nesterov's, and errors in units of the parameters).

It is detached error feedback with lambda = 0, and returns x.
"""

from __future__ import annotations

from undrift.dataparallel.def_ import Detached

METHOD = Detached(lam=0.0, returns="x")
