"""Which convolutions of stacked clients a GPU makes as products; what they compute is in test_cuda.py."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from undrift.kernels.conv_gpu import suits
from undrift.kernels.launch import only_stacked


@pytest.mark.parametrize(
    "x, w, padding, so",
    [
        ((64, 3, 32, 32), (6, 3, 5, 5), 0, True),
        ((64, 8, 9, 5), (64, 8, 5, 5), 2, True),
        ((64, 3, 12, 12), (6, 1, 5, 5), 0, False),  # not a convolution at all: PyTorch is to say so
        ((64, 1, 12, 12), (6, 3, 5, 5), 0, False),
        ((64, 3, 4, 32), (6, 3, 5, 5), 0, False),  # a filter larger than the picture
        ((64, 3, 4, 32), (6, 3, 5, 5), 1, True),
        ((64, 3, 32, 32), (6, 3, 5, 3), 0, False),
        ((64, 9, 32, 32), (6, 9, 3, 3), 0, False),
        ((64, 3, 32, 32), (65, 3, 3, 3), 0, False),
        ((64, 8, 32, 32), (6, 8, 7, 7), 0, False),
        ((131_072, 1, 4, 4), (6, 1, 3, 3), 1, True),
        ((131_072, 1, 4, 4), (6, 1, 3, 3), 3, False),  # 2^23 places of the outputs
    ],
)
def test_only_narrow_convolutions_are_products(x: tuple[int, ...], w: tuple[int, ...], padding: int, so: bool) -> None:
    assert suits(torch.Size(x), torch.Size(w), padding) == so


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of torch's own, when forward derivatives are first asked for
def test_it_is_seen_whether_there_is_more_around_than_stacked_clients() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(only_stacked())
        return x.square().sum()

    x = torch.ones(2, 3, 4)
    look(x)
    torch.vmap(look)(x)
    torch.vmap(torch.vmap(look))(x)
    assert seen == [True, True, True]
    torch.func.grad(look)(x)
    torch.vmap(torch.func.grad(look))(x)
    torch.vmap(torch.func.grad(lambda x: torch.vmap(look)(x).sum()))(x)
    torch.vmap(torch.func.jacrev(look))(x)
    torch.vmap(lambda x: torch.func.jvp(look, (x,), (x,))[1])(x)
    with forward_ad.dual_level():
        torch.vmap(look)(x)
    assert seen[3:] == [False] * 6
    look(x)
    assert seen[-1]
