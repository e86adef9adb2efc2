"""Muon: matrices move along their momentum with all singular values brought near one; the rest moves by AdamW.

Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein: Muon: An optimizer for hidden layers in neural networks. 2024. Steps are
0.2 sqrt(max(rows, columns)) as long, so that AdamW's rate and weight decay serve both: Liu et al., Muon is Scalable for LLM
Training, 2025. Momentum looks ahead, and `momentum` is also AdamW's beta_1. A convolution's weight [out, in, h, w] is the matrix
[out, in h w]. Embeddings are tables, which AdamW moves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.algorithms.optimise import LocalOptimizer
from undrift.algorithms.optimise.adam import Adam, adapt, init
from undrift.core.layout import Layout
from undrift.core.vec import descend

__all__ = ["DECOUPLED", "READS", "init", "step"]

DECOUPLED = True
READS = ("momentum", "momentum2", "epsilon")
A, B, C = 3.4445, 4.7750, 2.0315  # coefficients of the odd polynomial a s - b s^3 + c s^5 that moves singular values
ITERATIONS = 5
SMALLEST = 1e-7  # norm by which a matrix is divided


def step(rates: LocalOptimizer, x: Tensor, state: Adam, u: Tensor, layout: Layout) -> tuple[Tensor, Adam]:
    direction, after = adapt(rates, state, u)
    ahead = torch.lerp(u, after.m, rates.momentum)
    parts = list(direction.split([*layout.sizes, layout.padding], -1))
    for (rows, columns), places in by_shape(layout).items():
        pieces = [ahead[..., layout.segments[n]][..., : rows * columns] for n in places]
        matrices = torch.stack([piece.unflatten(-1, (rows, columns)) for piece in pieces])
        moved = 0.2 * max(rows, columns) ** 0.5 * orthogonal(matrices)
        for n, matrix in zip(places, moved, strict=True):
            parts[n] = matrix.flatten(-2)
    return descend(x, rates.lr, torch.cat(parts, -1)), after


def by_shape(layout: Layout) -> dict[tuple[int, int], list[int]]:
    """The numbers of the tensors that are matrices, by their shape."""
    found: dict[tuple[int, int], list[int]] = {}
    for n, (name, shape) in enumerate(zip(layout.names, layout.shapes, strict=True)):
        if len(shape) > 1 and name not in layout.tables:
            found.setdefault((shape[0], shape[1:].numel()), []).append(n)
    return found


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices [..., r, c] with singular values near one, by five Newton-Schulz iterations."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    y = matrices.mT if tall else matrices
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST)
    for _ in range(ITERATIONS):
        gram = y @ y.mT
        y = A * y - (B * gram - C * gram @ gram) @ y
    return y.mT if tall else y
