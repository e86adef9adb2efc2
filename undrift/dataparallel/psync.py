"""Partial synchronisation with error assimilation (CSEA): workers train local models and average one block a step.

Xie, Zheng, Koyejo, Gupta, Li, Lin: CSER: Communication-efficient SGD with Error Reset, NeurIPS 2020. As written there,
worker k has a model x_k and an error e'_k of the opposite sign:

    x_k <- x_k - eta m_k;   e'_k <- e'_k - eta m_k
    x_k <- x_k - C(e'_k) + mean_j C(e'_j);   e'_k <- e'_k - C(e'_k)

With x_k = x - e_k this is detached error feedback with lambda = 1, and its model, the mean of the x_k, is y.
"""

from __future__ import annotations

from undrift.dataparallel.def_ import Detached

METHOD = Detached(lam=1.0, returns="y")
