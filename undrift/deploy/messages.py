"""Messages between the server and a client: named arrays and a few plain facts.

An array travels as a .npy file without pickle, as in Flower. The receiver knows which names, shapes and dtypes to expect, and
checks them and the number of bytes before it decodes an array. It reads a header by a grammar of its own, because NumPy's reader
evaluates it as Python and fails in many ways. Whatever the bytes are, the only failure is `Refused`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.core.errors import UndriftError
from undrift.core.trees import leaves, map_leaves, named_leaves
from undrift.oracle.net import Net

T = TypeVar("T")
Fact = bool | int | float | str
HEADER = 256  # most bytes of a .npy header for arrays of few dimensions
NOT_FINITE = "it is not finite"  # why an answer is refused
TIMES, ALWAYS = 8, 16 << 20  # most bytes of an answer: so many times those of its letter, and so many more
MAGIC = b"\x93NUMPY\x01\x00"  # version 1.0; two bytes with the header's length follow
FORM = re.compile(
    rb"\{'descr': '([<>|=][a-zA-Z]\d{0,4})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,19}(?:, \d{1,19}){0,31},?)?)\),? ?\} *\n"
)


class Refused(UndriftError):
    """A message is not as expected; the text says why."""


class Encoded(NamedTuple):
    """One array as it travels."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes  # a .npy file


@dataclass(frozen=True)
class Letter:
    """One message: arrays by dotted names, and facts."""

    facts: dict[str, Fact]
    arrays: dict[str, Encoded]

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded arrays; the facts are a few hundred more."""
        return sum(len(array.data) for array in self.arrays.values())

    def fact(self, name: str, kind: type[T]) -> T:
        """Read a fact of that type."""
        value = self.facts.get(name)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise Refused(f"{name} must be {kind.__name__}, not {value!r}")
        return value

    def number(self, name: str) -> float:
        """Read a fact that is a finite number."""
        value = self.facts.get(name)
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
        except OverflowError:  # a whole number beyond all floats
            number = math.inf
        if not math.isfinite(number):
            raise Refused(f"{name} must be a finite number, not {value!r}")
        return number


def most_bytes(asked: int) -> int:
    """The most bytes that an answer may have to a letter of so many bytes; most methods send up what they are sent."""
    return TIMES * asked + ALWAYS


def encode(tensor: Tensor) -> Encoded:
    array = np.asarray(tensor.detach().cpu().numpy(), order="C")
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)
    return Encoded(str(array.dtype), tuple(tensor.shape), file.getvalue())


def decode(name: str, sent: Encoded, like: Tensor) -> Tensor:
    """Decode a tensor that must have the shape and dtype of `like`."""
    dtype = np.dtype(str(like.dtype).removeprefix("torch."))
    expected, bytes_expected = tuple(like.shape), like.numel() * dtype.itemsize
    if len(sent.data) > bytes_expected + HEADER:
        raise Refused(f"{name} has {len(sent.data)} bytes, but {bytes_expected} were expected")
    if (sent.dtype, tuple(sent.shape)) != (str(dtype), expected):
        raise Refused(f"{name} is {sent.dtype} {list(sent.shape)}, but {dtype} {list(expected)} was expected")
    header, body = split_npy(name, sent.data)
    if header != Header(dtype.str, False, expected):
        raise Refused(f"{name} is {header} inside, but {Header(dtype.str, False, expected)} was expected")
    if len(body) != bytes_expected:
        raise Refused(f"{name} has {len(body)} bytes of numbers, but {bytes_expected} were expected")
    return torch.from_numpy(np.frombuffer(body, dtype).reshape(expected).copy())


class Header(NamedTuple):
    """What a .npy file says of its numbers."""

    dtype: str  # such as <f4
    fortran: bool
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}{' by columns' if self.fortran else ''}"


def split_npy(name: str, data: bytes) -> tuple[Header, memoryview]:
    """The header and the numbers of a .npy file of version 1.0, which NumPy writes in one form only.

    >>> split_npy("d", encode(torch.zeros(2, 3)).data)[0]
    Header(dtype='<f4', fortran=False, shape=(2, 3))
    """
    first = len(MAGIC) + 2
    end = first + int.from_bytes(data[len(MAGIC) : first], "little")
    if not data.startswith(MAGIC) or not first < end <= min(len(data), HEADER):
        raise Refused(f"{name} is not a .npy file of version 1.0 with a header of at most {HEADER} bytes")
    form = FORM.fullmatch(data, first, end)
    if form is None:
        raise Refused(f"{name} is not a .npy file: its header is not as NumPy writes it")
    shape = tuple(int(n) for n in form[3].split(b",") if n)
    return Header(form[1].decode(), form[2] == b"True", shape), memoryview(data)[end:]


def pack(state: Any, net: Net) -> dict[str, Encoded]:
    """Encode the arrays of a NamedTuple under dotted names, without the padding of vectors."""
    return {name.removeprefix("."): encode(leaf) for name, leaf in named_leaves("", net.without_padding(state))}


def unpack(arrays: Mapping[str, Encoded], like: T, net: Net, device: torch.device) -> T:
    """Decode a NamedTuple of the form of `like` (meta tensors will do); vectors get their padding again."""
    expected = {name.removeprefix("."): leaf for name, leaf in named_leaves("", net.without_padding(like))}
    if arrays.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - arrays.keys()), sorted(arrays.keys() - expected.keys())
        raise Refused(f"the arrays have other names: {missing[:3]} are missing, {extra[:3]} were not expected")
    largest = sum(leaf.numel() * leaf.element_size() + HEADER for leaf in expected.values())
    total = sum(len(array.data) for array in arrays.values())
    if total > largest:
        raise Refused(f"the arrays have {total} bytes, but at most {largest} were expected")
    sent: Iterator[Tensor] = (decode(name, arrays[name], leaf) for name, leaf in expected.items())

    def pad(whole: Tensor) -> Tensor:
        tensor = next(sent)
        missing = whole.shape[-1] - tensor.shape[-1]
        return (F.pad(tensor, (0, missing)) if missing else tensor).to(device)

    return map_leaves(pad, like)


def check_finite(state: T) -> T:
    """Refuse NaN and infinity. A finite sum has finite terms, and takes no memory; only a doubtful one is looked into."""
    for leaf in leaves(state):
        if not (leaf.sum().isfinite() or leaf.isfinite().all()):
            raise Refused(NOT_FINITE)
    return state
