"""An LSTM that predicts each next token: lstm(depth=2, width=256, table=8), as for Shakespeare in McMahan et al. (AISTATS 2017).

Hochreiter, Schmidhuber: Long Short-Term Memory. Neural Computation 1997. Its steps are plain layers, which can be stacked.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from undrift.core.errors import BadSetting
from undrift.models._blocks import Blocks


class Layer(nn.Module):
    """Sequences [B, T, inputs] -> [B, T, width]; weights and gates are those of nn.LSTM."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.into, self.across = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        gates_in, told = self.into(x), []
        h = cell = torch.zeros_like(gates_in[..., 0, : self.width])
        for step in gates_in.unbind(-2):
            enter, forget, new, tell = (step + self.across(h)).chunk(4, -1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            h = tell.sigmoid() * cell.tanh()
            told.append(h)
        return torch.stack(told, -2)


def build(shape: tuple[int, ...], classes: int, depth: int = 2, width: int = 256, table: int = 8) -> nn.Module:
    if len(shape) != 1:
        raise BadSetting(f"model 'lstm' needs sequences of tokens [length], not {list(shape)}")
    if min(depth, width, table) < 1:
        raise BadSetting(f"lstm needs numbers of at least 1, not {depth=}, {width=}, {table=}")
    layers = {f"lstm{n}": Layer(table if n == 1 else width, width) for n in range(1, depth + 1)}
    return Blocks({"embedding": nn.Embedding(classes, table), **layers, "head": nn.Linear(width, classes)})
