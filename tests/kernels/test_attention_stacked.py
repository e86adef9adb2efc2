"""Attention of stacked clients on a CPU is that of each alone, without PyTorch's warning that it computes them in turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift.kernels.register  # noqa: F401

S, B, H, L, D = 3, 2, 4, 5, 8
MASKS: dict[str, tuple[tuple[int, ...], int | None]] = {  # the shape, and the dimension of the clients
    "none": ((), None),
    "for all": ((L, L), None),
    "for each sample": ((B, 1, L, L), None),
    "for each client": ((S, L, L), 0),
    "for each client and sample": ((B, H, S, L, L), 2),
    "for each client, not for each sample": ((1, H, S, L, L), 2),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shared", [False, True])
def test_stacked_attention_is_that_of_each_client_and_warns_of_nothing(kind: str, shared: bool) -> None:
    shape, dim = MASKS[kind]
    q = torch.randn(B, S, H, L, D, dtype=torch.float64, requires_grad=True)
    k = torch.randn(*(() if shared else (S,)), B, H, L, D, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(shape, dtype=torch.float64) if shape else None
    dims = (1, None if shared else 0, dim)

    def one(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k.sin(), mask, is_causal=mask is None)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = torch.vmap(one, dims)(q, k, mask)
        mine = torch.autograd.grad(ours.sin().sum(), (q, k))
    each = torch.stack([
        one(*(t if d is None or t is None else t.select(d, s) for t, d in zip((q, k, mask), dims, strict=True)))
        for s in range(S)
    ])  # fmt: skip
    torch.testing.assert_close(ours, each)
    torch.testing.assert_close(mine, torch.autograd.grad(each.sin().sum(), (q, k)))


def test_two_levels_and_a_module_of_pytorch() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 3, 4, 5, 8, dtype=torch.float64)  # two levels of clients, samples, places

    def one(x: Tensor) -> Tensor:
        out: Tensor = layer(x, x, x, need_weights=False)[0]
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twice: Callable[[Tensor], Tensor] = torch.vmap(torch.vmap(one))
        torch.testing.assert_close(twice(x), one(x.flatten(0, 2)).view_as(x))
