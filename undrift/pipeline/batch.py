"""A batch as a caller gives it: inputs of one part or several, and targets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.core.pieces import Piece, join, pieces_of, records

Inputs = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]
Batch = tuple[Inputs, Tensor] | Mapping[str, Tensor]
LABELS = "labels"
STORED = "pieces"  # the parts of the inputs in a state


def read(batch: Any) -> tuple[Tensor, Tensor, tuple[Piece, ...]]:
    """The inputs as one tensor, the targets, and the parts of the inputs, () if they have only one.

    >>> ids, mask = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)
    >>> inputs, targets, pieces = read({"ids": ids, "mask": mask, "labels": ids})
    >>> inputs.shape, describe(pieces)
    (torch.Size([2, 6]), 'ids [3] and mask [3]')
    """
    if isinstance(batch, Mapping) and LABELS in batch:
        inputs: Any = {name: part for name, part in batch.items() if name != LABELS}
        targets: Any = batch[LABELS]
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
    else:
        got = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
        raise BadSetting(
            f"a batch is (inputs, targets), where inputs may be a tuple or a mapping of tensors, or a mapping with {LABELS!r}; "
            f"not a {got}"
        )
    if isinstance(inputs, tuple | list) and len(inputs) == 1:
        (inputs,) = inputs
    parts = {"inputs": inputs} if isinstance(inputs, Tensor) else inputs
    named = dict(parts) if isinstance(parts, Mapping) else {str(n): part for n, part in enumerate(parts)}
    for name, part in (named | {"targets": targets}).items():
        if not isinstance(part, Tensor):
            raise BadSetting(f"{name} of a batch must be a tensor, not a {type(part).__name__}")
        if len(part) != len(targets):
            raise BadSetting(f"{name} of a batch has {len(part)} rows, and targets {len(targets)}; give all the same")
    if isinstance(inputs, Tensor):
        return inputs, targets, ()
    joined = records({name: part.detach().cpu().numpy() for name, part in named.items()})
    return torch.from_numpy(join(joined)), targets, pieces_of(joined)


def describe(pieces: tuple[Piece, ...]) -> str:
    return " and ".join(f"{piece.name or 'a part'} {list(piece.shape)}" for piece in pieces) or "one tensor"


def encode(pieces: tuple[Piece, ...]) -> Tensor:
    return torch.tensor([*json.dumps(pieces).encode()], dtype=torch.uint8)


def decode(stored: Tensor) -> tuple[Piece, ...]:
    return tuple(Piece(name, tuple(shape), kind) for name, shape, kind in json.loads(bytes(stored.tolist())))
