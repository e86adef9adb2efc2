"""Whatever bytes a client sends in place of an array, they are that client's failure and not the server's end."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.deploy.test_federation import Federation, maker, same, without
from undrift.deploy.messages import Encoded, Letter, Refused, decode, encode

GOOD = encode(torch.arange(4.0)).data
HEADERS = [
    "{'descr': (",
    "{'descr': '<f4', 1: 2, 'shape': (4,)}",
    "{[1]: 2}",
    "(" * 90,
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-4,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999999999,), }\n",
    "{'descr': '|O', 'fortran_order': False, 'shape': (4,), }\n",
    "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4,), }\n",
    "{'descr': '<f4', 'fortran_order': True, 'shape': (4,), }\n",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), 'more': 1, }\n",
    "__import__('os').abort()\n",
    "",
]


def with_header(header: bytes, body: bytes = GOOD[-16:]) -> bytes:
    return GOOD[:8] + (len(header) % 65536).to_bytes(2, "little") + header + body


def read(data: bytes) -> Any:
    return decode("up.d", Encoded("float32", (4,), data), torch.zeros(4))


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_that_numpy_would_not_write_is_that_clients_failure(header: str, tmp_path: Path) -> None:
    """The attack itself: the round goes on without this client."""

    def spoil(answer: Letter) -> Letter:
        sent = answer.arrays["up.d"]
        array = sent._replace(data=with_header(header.encode(), sent.data[-8 * sent.shape[0] :]))
        return Letter(answer.facts, answer.arrays | {"up.d": array})

    make = maker("fedavg", cohort=6)
    federation = Federation(tmp_path, make)
    federation.post.spoil = {"3": spoil}
    same(federation.path(1), without(make, {(1, "3")}, 1))
    assert federation.record.more["refused"] == 1 and "3 does not count: refused: up.d" in federation.said[0]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good file with some bytes replaced, removed or inserted, or another header of Python's signs."""
    if draw(st.booleans()):
        text = draw(st.text("{}()[]',:<|f4O 0123456789\n-*+\0\x93descrfortran_orderFalseshape", max_size=200))
        return with_header(text.encode("utf-8", "replace"))
    data = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(data)


@given(mutated())
@example(GOOD[:-1])
@example(b"")
@settings(max_examples=400, deadline=None)
def test_mutated_files_are_read_as_numpy_reads_them_or_refused(data: bytes) -> None:
    try:
        found = read(data)
    except Refused:
        return
    np.testing.assert_array_equal(found.numpy(), np.load(io.BytesIO(data), allow_pickle=False))


@given(st.lists(st.integers(0, 3), max_size=4), st.sampled_from(["float32", "float64", "float16", "int64", "bool"]))
@settings(max_examples=60, deadline=None)
def test_what_numpy_writes_is_read(shape: list[int], dtype: str) -> None:
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype))
    assert torch.equal(decode("d", encode(tensor), tensor), tensor)
