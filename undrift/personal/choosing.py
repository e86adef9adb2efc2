"""Choose a model for each sample by a selector, with a threshold below which the server's model is used.

Model 0 is the server's, model k that of client k (counted from 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GAMMAS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)  # thresholds to try


Gamma = float | list[float]  # one threshold, or one for each client's model


class Choice(NamedTuple):
    """A selector's choice for samples [n]."""

    weights: Tensor  # [n, models] its softmax; `threshold` has no column for the server's model
    model: Tensor  # [n] the model in use
    confidence: Tensor  # [n] the largest weight


def choose(kind: str, outputs: Tensor, gamma: Gamma) -> Choice:
    """Choose models from a selector's outputs [n, m].

    `threshold`: the client's model with the largest weight if that is above gamma, or above this model's gamma, else the
    server's. `argmax` and `mix`: the model with the largest weight; the caller of `mix` uses all models by their weights.

    >>> outputs = torch.tensor([[2.0, 0.0], [0.0, 0.1]])
    >>> choose("threshold", outputs, 0.8).model, choose("threshold", outputs, [0.9, 0.5]).model
    (tensor([1, 0]), tensor([0, 2]))
    >>> choose("argmax", outputs, 0.0).model
    tensor([0, 1])
    """
    weights = outputs.softmax(-1)
    confidence, model = weights.max(-1)
    if kind == "threshold":
        least = gamma if isinstance(gamma, float) else confidence.new_tensor(gamma)[model]
        model = torch.where(confidence > least, model + 1, 0)
    return Choice(weights, model, confidence)


def best_gamma(confidence: Tensor, personal: Tensor, shared: Tensor, weight: Tensor) -> float:
    """The lowest threshold with the best mean score, weighted by weight [n].

    `personal` [n] scores the model that the selector prefers on each sample, `shared` [n] the server's.

    >>> best_gamma(torch.tensor([0.9, 0.55]), torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]), torch.ones(2))
    0.6
    """
    means = [float((torch.where(confidence > gamma, personal, shared) * weight).sum()) for gamma in GAMMAS]
    return GAMMAS[max(range(len(GAMMAS)), key=lambda n: means[n])]


def best_gammas(
    preferred: Tensor, models: int, confidence: Tensor, personal: Tensor, shared: Tensor, weight: Tensor
) -> list[float]:
    """`best_gamma` of each client's model, on the samples for which the selector prefers it; 1 where there are none.

    `preferred` [n] is 0 for client 1's model.

    >>> confidence, personal, shared = torch.tensor([0.9, 0.55]), torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])
    >>> best_gammas(torch.tensor([0, 1]), 3, confidence, personal, shared, torch.ones(2))
    [0.0, 0.6, 1.0]
    """
    parts = [preferred == model for model in range(models)]
    return [
        best_gamma(confidence[some], personal[some], shared[some], weight[some]) if some.any() else 1.0
        for some in parts
    ]
