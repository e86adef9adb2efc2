"""The samples of a mini-batch as a model takes them."""

from __future__ import annotations

from torch import Tensor

from undrift.core.forms import plain
from undrift.data.federation import Federation
from undrift.oracle.net import Net


@plain
def samples(
    net: Net, data: Federation, rows: Tensor, draw: Tensor | None = None, owner: Tensor | None = None
) -> Tensor:
    """The inputs [..., B, *shape] in these rows, augmented by these draws and in the colours of these clients, if any."""
    inputs = data.transform(data.train.take(rows.flatten()), net.dtype, draw, owner)
    return inputs.view(*rows.shape, *inputs.shape[1:])
