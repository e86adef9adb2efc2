"""The samples of a mini-batch as inputs of a model."""

from __future__ import annotations

from torch import Tensor

from undrift.core.forms import plain
from undrift.data.federation import Federation
from undrift.oracle.net import Net


@plain
def samples(
    net: Net, data: Federation, rows: Tensor, draw: Tensor | None = None, owner: Tensor | None = None
) -> Tensor:
    """The inputs [..., B, *shape] of the given rows; `draw` augments them and `owner` gives them a client's colours, if any."""
    inputs = data.transform(data.train.take(rows.flatten()), net.dtype, draw, owner)
    return inputs.view(*rows.shape, *inputs.shape[1:])
