"""The U-Net: its shapes, its norms and the way across."""

from __future__ import annotations

import pytest
import torch

from undrift.models import unet


@pytest.mark.parametrize("norm", ["group", "batch", "instance", "none"])
def test_unet(norm: str) -> None:
    torch.manual_seed(0)
    net = unet.build((3, 16, 24), 2, width=4, depth=2, norm=norm)
    assert net(torch.rand(2, 3, 16, 24)).shape == (2, 2, 16, 24)
    deeper = unet.build((3, 16, 24), 2, width=4, depth=3, norm=norm)
    count = [sum(p.numel() for p in m.parameters()) for m in (net, deeper)]
    assert count[1] > 2 * count[0]
    x = torch.rand(1, 3, 16, 24, requires_grad=True)
    net(x)[0, :, 6:10, 10:14].sum().backward()
    assert (
        x.grad is not None and (x.grad[0, :, 6:10, 10:14].abs() > 1e-6).any()
    )  # the way across reaches the pixel itself
