"""How a selector chooses among models for each sample, and the threshold below which the server's model is used.

Model 0 is the server's, model k that of client k (counted from 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GAMMAS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)  # thresholds that are tried


class Choice(NamedTuple):
    """What a selector says of samples [n]."""

    weights: Tensor  # [n, models] its softmax; for `threshold` there is no column for the server's model
    model: Tensor  # [n] which one is used
    confidence: Tensor  # [n] the largest weight


def choose(kind: str, outputs: Tensor, gamma: float) -> Choice:
    """The models that a selector's outputs [n, m] name.

    `threshold`: client k's where its weight is the largest and above gamma, else the server's; `argmax` and `mix`: the
    largest of all, where `mix` goes on to use all of them by their weights.

    >>> outputs = torch.tensor([[2.0, 0.0], [0.0, 0.1]])
    >>> choose("threshold", outputs, 0.8).model, choose("argmax", outputs, 0.0).model
    (tensor([1, 0]), tensor([0, 1]))
    """
    weights = outputs.softmax(-1)
    confidence, model = weights.max(-1)
    if kind == "threshold":
        model = torch.where(confidence > gamma, model + 1, 0)
    return Choice(weights, model, confidence)


def best_gamma(confidence: Tensor, personal: Tensor, shared: Tensor, weight: Tensor) -> float:
    """The threshold with the best mean score by weight [n], the lowest of equals.

    `personal` [n] scores the model that the selector prefers on each sample, `shared` [n] the server's.

    >>> best_gamma(torch.tensor([0.9, 0.55]), torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]), torch.ones(2))
    0.6
    """
    means = [float((torch.where(confidence > gamma, personal, shared) * weight).sum()) for gamma in GAMMAS]
    return GAMMAS[max(range(len(GAMMAS)), key=lambda n: means[n])]
