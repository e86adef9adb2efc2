"""A linear layer over stacked clients: `vmap(F.linear)`, with a weight gradient in the memory order of the weight.

`F.linear` transposes the weight, so under vmap the weight's gradient is transposed and must be copied, which on a CPU takes a
third of the products' time. Transposing the (smaller) input instead needs no copy: the gradient of w in `w @ x'` is `g @ x`.
"""

from __future__ import annotations

from torch import Tensor

from undrift.core.forms import faster
from undrift.oracle.layers import StackedLinear, linear


@faster(linear, when=lambda layer, x: layer.current.stacked)
def linear_stacked(layer: StackedLinear, x: Tensor) -> Tensor:
    return product(x, layer.weight, layer.bias)


def product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """F.linear(x, w, b) for x [..., n, in], for use under vmap."""
    y = w @ x.flatten(0, -2).mT  # [out, n]
    y = y if b is None else y + b.unsqueeze(-1)
    return y.mT.contiguous().view(*x.shape[:-1], -1)  # contiguous as in F.linear, because a model may call view
