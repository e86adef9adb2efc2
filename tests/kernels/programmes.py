"""Quadratic programmes of a bias before BatchNorm, as runs of gradma-nn on a GPU had them.

The updates of such a bias are nothing but rounding: 100 columns of last digits in some 20 directions. Without a ridge numbers
5 and 6 have no solution.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def dead_biases(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """p, the rows, and a guess of the active ones."""
    with np.load(Path(__file__).with_name("dead_biases.npz")) as file:
        p, rows, start = (torch.from_numpy(file[f"{name}{number}"]) for name in ("p", "rows", "start"))
    return p, rows, start


def check(p: Tensor, rows: Tensor, z: Tensor) -> None:
    """That u = p + z rows breaks no constraint, and is near the nearest such point: p moves at a right angle to it."""
    unit = rows.double() / rows.double().norm(dim=1, keepdim=True)
    u = p.double() + z @ rows.double()
    slack, moved = unit @ u / p.double().norm(), u - p.double()
    assert slack.min() > -1e-6
    assert abs(moved @ u) < 0.02 * p.double().norm() ** 2  # number 3 is flat
