"""Error feedback adds what compression dropped to the next update: DEF with lambda = 0, and the model is x.

Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019;
with a momentum per worker as in Zheng, Huang, Kwok: Communication-Efficient Distributed Blockwise Momentum SGD with
Error Feedback, NeurIPS 2019 (Differs: heavy-ball momentum, not Nesterov's, and errors in units of the parameters).
"""

from __future__ import annotations

from undrift.dataparallel.def_ import Detached

METHOD = Detached(lam=0.0, returns="x")
