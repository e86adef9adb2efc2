"""What rounds with noise cost: epsilon, for one client more or less, from what each round really used.

Renyi differential privacy adds up over rounds. Two rules say what a round adds:

- `Sampled`: each client takes part with a probability, and nobody but the server knows who did. Mironov, Talwar, Zhang: Renyi
  Differential Privacy of the Sampled Gaussian Mechanism. 2019, for whole orders.
- `Counted`: nothing is assumed about who takes part when. Noise is in the nodes of a tree over the rounds (Kairouz et al., ICML
  2021), and for each client it is counted how often it took part under each node.
"""

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.data.federation import Ids

Floats = NDArray[np.float64]
WHOLE = np.arange(2.0, 257.0)  # orders alpha
FINE = np.concatenate([1 + np.arange(1, 100) / 100, WHOLE])


class Accountant(Protocol):
    """Adds up what a run's rounds cost."""

    spent: Tensor  # never goes back, whatever checkpoint a run goes on from
    open: Tensor  # what nodes that are not full cost; belongs to the round

    def add(self, t: int, invited: Ids) -> None:
        """Round t, counted from 0, in which these clients were asked."""

    @property
    def epsilon(self) -> float: ...


class Sampled:
    """Rounds whose clients are drawn independently, with `rate`, by dice that only the server sees."""

    def __init__(self, rate: float, noise: float, delta: float) -> None:
        self.rate, self.noise, self.delta = rate, noise, delta
        self.spent, self.open = torch.zeros(len(WHOLE), dtype=torch.float64), torch.zeros(0, dtype=torch.int64)

    def add(self, t: int, invited: Ids) -> None:
        self.spent = self.spent + torch.from_numpy(sampled_gaussian(self.rate, self.noise))

    @property
    def epsilon(self) -> float:
        return epsilon(WHOLE, self.spent.numpy(), self.delta)


class Counted:
    """Rounds whose noise forms trees of `tree` rounds, whoever takes part.

    Round n of a tree releases the node that ends with it and covers 2^j rounds, where 2^j is the largest power that divides n.
    A client that took part in c of them moves the node by at most c C, under noise of sigma C.
    """

    def __init__(self, clients: int, tree: int, noise: float, delta: float) -> None:
        self.tree, self.noise, self.delta = tree, noise, delta
        self.spent = torch.zeros(clients, dtype=torch.float64)  # sum of (c / sigma)^2 over the nodes released
        self.open = torch.zeros(clients, tree.bit_length(), dtype=torch.int64)  # c, for the node of each level

    def add(self, t: int, invited: Ids) -> None:
        n = t % self.tree + 1
        if n == 1:
            self.open.zero_()
        self.open[torch.from_numpy(invited)] += 1
        level = (n & -n).bit_length() - 1
        self.spent = self.spent + (self.open[:, level].double() / self.noise).square()
        self.open[:, : level + 1] = 0

    @property
    def epsilon(self) -> float:
        return epsilon(FINE, FINE * float(self.spent.max()) / 2, self.delta)


@functools.cache
def sampled_gaussian(rate: float, noise: float) -> Floats:
    """The Renyi divergence, at the WHOLE orders, of a sum with this noise that a client is in with probability `rate`."""
    if rate == 1.0:
        return WHOLE / 2 / noise / noise
    factorial = np.cumsum(np.log(np.maximum(np.arange(WHOLE[-1] + 1), 1)))  # log k!
    found = []
    for order in WHOLE.astype(int):
        k = np.arange(order + 1)
        choose = factorial[order] - factorial[k] - factorial[order - k]
        terms = choose + k * np.log(rate) + (order - k) * np.log1p(-rate) + (k * k - k) / 2 / noise / noise
        found.append(np.logaddexp.reduce(terms) / (order - 1))
    return np.array(found)


def epsilon(orders: Floats, divergence: Floats, delta: float) -> float:
    """The smallest epsilon at this delta (Canonne, Kamath, Steinke: The Discrete Gaussian. NeurIPS 2020, Proposition 12)."""
    if not divergence.any():
        return 0.0
    each = divergence + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return float(np.maximum(each.min(), 0.0))  # NaN stays what it is
