"""Samples whose inputs have several parts, such as token ids and a mask: joined in one array, and parted before the model.

Until then they are a numpy array of records, whose fields are the parts. Fields that are called 0, 1, ... have no names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from undrift.core.errors import BadData

EXACT = 1 << 24  # whole numbers up to here are exact in float32


class Piece(NamedTuple):
    """One part of a sample's inputs."""

    name: str  # nothing: the model takes it by its place
    shape: tuple[int, ...]
    kind: str  # numpy's kind: b, i or f


def records(parts: tuple[Any, ...] | Mapping[str, Any]) -> NDArray[np.void]:
    """Arrays with one row for each sample as one array [n] of records."""
    named = parts if isinstance(parts, Mapping) else {str(n): part for n, part in enumerate(parts)}
    lengths = {len(part) for part in named.values()}
    if len(lengths) > 1:
        raise BadData(f"the parts of the inputs have {' and '.join(map(str, sorted(lengths)))} rows; give all the same")
    kinds = {"b": np.bool_, "u": np.int64, "i": np.int64}
    fields = [(str(name), kinds.get(part.dtype.kind, part.dtype), part.shape[1:]) for name, part in named.items()]
    made = np.empty(lengths.pop(), np.dtype(fields))
    for name, part in named.items():
        made[str(name)] = part
    return made


def pieces_of(samples: Any) -> tuple[Piece, ...]:
    """The parts of records; () for inputs of one part."""
    fields = samples.dtype.fields if isinstance(samples, np.ndarray) else None
    found = [(name, *(kind.subdtype or (kind, ()))) for name, (kind, *_) in (fields or {}).items()]
    places = [name for name, *_ in found] == [str(n) for n in range(len(found))]
    return tuple(Piece("" if places else name, shape, kind.kind) for name, kind, shape in found)


def join(samples: NDArray[np.void]) -> NDArray[np.generic]:
    """Records as one array [n, entries]: of whole numbers, or of floats if any part has them."""
    names, pieces = samples.dtype.names or (), pieces_of(samples)
    wide = np.result_type(*(samples[name].dtype for name in names))
    kind = np.dtype(np.int64) if wide.kind in "bui" else wide
    for name, piece in zip(names, pieces, strict=True):
        values = samples[name]
        if kind.kind == "f" and piece.kind == "i" and values.size and np.abs(values).max() > EXACT:
            raise BadData(f"the part {name} of the inputs has whole numbers above {EXACT} beside a part of floats")
    if kind.kind == "f":
        kind = np.dtype(np.float64 if any(samples[name].dtype == np.float64 for name in names) else np.float32)
    return np.concatenate([samples[name].reshape(len(samples), -1).astype(kind) for name in names], 1)


def part(pieces: tuple[Piece, ...], inputs: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What a model is called with for inputs [B, entries]: parts by place, and by name."""
    parts = inputs.split([math.prod(piece.shape) for piece in pieces], -1)
    args, named = list[Tensor](), dict[str, Tensor]()
    for piece, flat in zip(pieces, parts, strict=True):
        whole = flat.unflatten(-1, piece.shape) if piece.shape else flat.squeeze(-1)
        given = whole.long() if piece.kind == "i" else whole.bool() if piece.kind == "b" else whole
        if piece.name:
            named[piece.name] = given
        else:
            args.append(given)
    return args, named
