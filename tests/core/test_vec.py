"""Maths on vectors keeps the last dimension and serves any leading ones."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from undrift.algorithms.base import Down, Work
from undrift.algorithms.optimise.momentum import Momentum
from undrift.core.errors import BadSetting
from undrift.core.trees import leaves, map_leaves, map_tagged, where
from undrift.core.vec import clip, dot, mean, norm
from undrift.kernels.mean import LONG


def test_reductions_agree_over_leading_dimensions() -> None:
    u, v = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    assert dot(u, v).shape == (2, 3, 1)
    for r in range(2):
        for s in range(3):
            torch.testing.assert_close(dot(u, v)[r, s], dot(u[r, s], v[r, s]))
            torch.testing.assert_close(norm(u)[r, s, 0], torch.linalg.vector_norm(u[r, s]))
    weight = torch.rand(2, 3, 1, dtype=torch.float64)
    torch.testing.assert_close(mean(u, weight)[1], sum(weight[1, s] * u[1, s] for s in range(3)))


@pytest.mark.parametrize("length", [LONG + 8, LONG + 3])
def test_long_means(length: int) -> None:
    """Taken in pieces, where the length allows it, also of vectors that lie apart."""
    v, weight = torch.randn(3, length + 5)[:, 2:-3], torch.tensor([[0.5], [0.25], [0.25]])
    found = mean(v, weight)
    assert found.shape == (length,)
    torch.testing.assert_close(found, 0.5 * v[0] + 0.25 * v[1] + 0.25 * v[2])


def test_clip_shortens_only_what_is_too_long() -> None:
    v = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    out = clip(v, 1.0)
    torch.testing.assert_close(norm(out)[0], torch.tensor([1.0]), atol=1e-6, rtol=0)
    assert torch.equal(out[1], v[1])
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    torch.testing.assert_close(out[0], parameter.grad)


def test_states_are_mapped_leaf_by_leaf() -> None:
    work = Work(torch.zeros(2, 3), torch.ones(2, 1), Momentum(torch.full((2, 3), 5.0)))
    assert len(leaves(work)) == 3
    other = map_leaves(lambda t: t + 1, work)
    assert isinstance(other, Work) and isinstance(other.opt, Momentum)
    mixed = where(torch.tensor([[True], [False]]), other, work)
    assert mixed.opt.b.tolist() == [[6.0] * 3, [5.0] * 3] and mixed.k.tolist() == [[2.0], [1.0]]
    assert map_leaves(lambda a, b: a - b, Down(torch.ones(1)), Down(torch.ones(1))).x.item() == 0


def test_annotations_that_cannot_be_read_are_one_line() -> None:
    class Lost(NamedTuple):
        x: Missing  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(BadSetting, match="annotations of .*Lost cannot be read"):
        map_tagged(lambda t, tag: t, Lost(torch.zeros(2)))
