"""A transformer that predicts each next token: gpt(depth=4, width=128, heads=4, tied=True, dropout=0.0).

Blocks of causal attention and a perceptron, each behind a LayerNorm and added to its input (Radford et al., Language Models
are Unsupervised Multitask Learners, 2019). `tied`: the output layer is the table of tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.core.errors import BadSetting
from undrift.models._blocks import Blocks

STD = 0.02  # standard deviation of the initial weights


class Embedding(nn.Module):
    """Tokens [B, T] as vectors of the token plus vectors of its place."""

    def __init__(self, tokens: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[-1] > self.places.num_embeddings:
            raise BadSetting(f"the model has a context of {self.places.num_embeddings} tokens, not {ids.shape[-1]}")
        places = torch.arange(ids.shape[-1], device=ids.device)
        h: Tensor = self.dropout(self.tokens(ids) + self.places(places))
        return h


class Layer(nn.Module):
    """Attention and a perceptron [B, T, width] -> [B, T, width]."""

    def __init__(self, width: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.qkv, self.mix, self.up, self.down):
            onto_stream = layer in (self.mix, self.down)  # 2 depth of them are added up
            nn.init.normal_(layer.weight, std=STD / (2 * depth) ** 0.5 if onto_stream else STD)
            nn.init.zeros_(layer.bias)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in self.qkv(self.norm1(h)).chunk(3, -1)
        )
        p = self.p if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True).transpose(-2, -3).flatten(-2)
        h = h + self.dropout(self.mix(seen))
        h = h + self.dropout(self.down(F.gelu(self.up(self.norm2(h)))))
        return h


class Head(nn.Module):
    """Vectors as logits [B, T, tokens]."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        nn.init.normal_(self.out.weight, std=STD)

    def forward(self, h: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(h))
        return logits


def build(
    shape: tuple[int, ...],
    classes: int,
    depth: int = 4,
    width: int = 128,
    heads: int = 4,
    context: int = 0,
    tied: bool = True,
    dropout: float = 0.0,
) -> nn.Module:
    """`context` tokens at most; 0: as many as an input has."""
    if len(shape) != 1:
        raise BadSetting(f"model 'gpt' needs sequences of tokens [length], not {list(shape)}")
    if depth < 1 or heads < 1 or width < heads or width % heads or context < 0 or not 0.0 <= dropout < 1.0:
        raise BadSetting(
            "gpt needs depth >= 1, heads >= 1, a width that heads divides, context >= 0 and dropout in [0, 1), not "
            f"{depth=}, {heads=}, {width=}, {context=}, {dropout=}"
        )
    embedding, head = Embedding(classes, context or shape[0], width, dropout), Head(classes, width)
    for table in (embedding.tokens, embedding.places):
        nn.init.normal_(table.weight, std=STD)
    if tied:
        head.out.weight = embedding.tokens.weight
    layers = {f"layer{n}": Layer(width, heads, depth, dropout) for n in range(1, depth + 1)}
    return Blocks({"embedding": embedding, **layers, "head": head})
