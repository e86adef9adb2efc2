"""The linear layer of stacked clients is the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from undrift.kernels.linear_stacked import product


@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5)])
@pytest.mark.parametrize("biased", [True, False])
def test_the_stacked_linear_layer_is_vmaps(shape: tuple[int, ...], biased: bool) -> None:
    """The batched kernel against its plain form, forward and backward, also with a shared input."""
    w = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 4, dtype=torch.float64, requires_grad=True) if biased else None
    for x, dim in (
        (torch.randn(3, *shape, dtype=torch.float64, requires_grad=True), 0),
        (torch.randn(shape, dtype=torch.float64), None),
    ):
        inputs = [t for t in (x, w, b) if t is not None and t.requires_grad]
        dims = (dim, 0, 0 if biased else None)
        plain, ours = (torch.vmap(f, in_dims=dims)(x, w, b) for f in (F.linear, product))
        torch.testing.assert_close(ours, plain)
        probe = torch.randn_like(plain)
        for mine, theirs in zip(
            torch.autograd.grad((ours * probe).sum(), inputs),
            torch.autograd.grad((plain * probe).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs)
