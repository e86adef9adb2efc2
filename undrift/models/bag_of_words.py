"""The mean of the vectors of a text's tokens, whatever their order, and a perceptron: bag-of-words(words=1024, width=64).

A selector for text: it tells who has written a sequence. Numbers of tokens from `words` on share vectors.
"""

from __future__ import annotations

from torch import Tensor, nn

from undrift.core.errors import BadSetting
from undrift.models._blocks import Blocks


class Bag(nn.Module):
    """Tokens [B, T] as the mean of their vectors."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)

    def forward(self, ids: Tensor) -> Tensor:
        h: Tensor = self.table(ids.long() % self.table.num_embeddings)
        return h.mean(-2)


def build(shape: tuple[int, ...], classes: int, words: int = 1024, width: int = 64) -> nn.Module:
    if len(shape) != 1:
        raise BadSetting(f"model 'bag-of-words' needs sequences of tokens [length], not {list(shape)}")
    if min(words, width) < 1:
        raise BadSetting(f"bag-of-words needs numbers of at least 1, not {words=}, {width=}")
    hidden = nn.Sequential(nn.Linear(width, width), nn.ReLU())
    return Blocks({"bag": Bag(words, width), "hidden": hidden, "head": nn.Linear(width, classes)})
