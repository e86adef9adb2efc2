"""The memory's two passes over long rows against their plain forms."""

from __future__ import annotations

import pytest
import torch

from undrift.algorithms.gradient_memory.cone import combine, gram, project_parts
from undrift.algorithms.gradient_memory.memory import Memory, renew_products
from undrift.core.forms import plain_forms, watch
from undrift.kernels.memory_cpu import fade_and_add, in_one_pass, long, row_products
from undrift.kernels.native import library


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_written_where_they_lie(dtype: torch.dtype) -> None:
    rows, updates = torch.randn(6, 40, dtype=dtype), torch.randn(3, 40, dtype=dtype)
    at, scale, address = torch.tensor([4, 0, 5]), torch.tensor([[0.5], [0.0], [0.25]], dtype=dtype), rows.data_ptr()
    expected = rows.index_copy(0, at, scale * rows[at] + updates)
    before = updates.clone()
    fade_and_add(rows, at, scale, updates)
    torch.testing.assert_close(rows, expected)
    assert rows.data_ptr() == address and torch.equal(updates, before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("few, rows, length", [(10, 100, 70_001), (0, 1, 1 << 16), (3, 7, 99_999), (13, 130, 65_600)])
def test_long_products_are_those_of_float64(threads: int, few: int, rows: int, length: int) -> None:
    """To the accuracy of float32 numbers, better than one long sum in float32; also for a part of longer rows."""
    torch.manual_seed(0)
    m, r = 1 + torch.randn(length + 3), 1 + torch.randn(rows, length + 3)
    m, r, at = m[1:-2], r[:, 1:-2], torch.randperm(rows)[:few]
    v = torch.cat([r[at], m[None]])
    assert long(r) and not long(r.double()) and not long(r[:, : 1 << 15])
    exact = v.double() @ r.double().T
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = row_products(r, at, m)
    finally:
        torch.set_num_threads(before)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, exact, rtol=2e-6, atol=2e-6 * length)
    torch.testing.assert_close(gram(v, r).double(), exact, rtol=1e-4, atol=1e-4 * length)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_renewed_and_multiplied_in_one_pass(threads: int) -> None:
    """More rows than are multiplied at a time, and those renewed at both ends of them."""
    if library() is None:
        pytest.skip("no C here")
    torch.manual_seed(0)
    rows, updates, m = torch.randn(270, 66_003), torch.randn(4, 66_003), torch.randn(66_003)
    at, scale = torch.tensor([269, 0, 130, 127]), torch.tensor([[0.5], [0.0], [0.25], [1.0]])
    expected = rows.clone()
    fade_and_add(expected, at, scale, updates)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = in_one_pass(rows, at, scale, updates, m)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(rows, expected)
    exact = torch.cat([expected[at], m[None]]).double() @ expected.double().T
    assert found is not None
    torch.testing.assert_close(found, exact, rtol=2e-6, atol=2e-6 * 66_003)


@pytest.mark.parametrize("length", [500, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_renewed_products_are_the_plain_ones(dtype: torch.dtype, length: int) -> None:
    torch.manual_seed(0)
    rows, updates, m = (torch.randn(*shape, length, dtype=dtype) for shape in ((7,), (2,), ()))
    at, scale, same = torch.tensor([4, 1]), torch.tensor([[0.5], [0.0]], dtype=dtype), rows.clone()
    parts = [slice(0, 9), slice(9, length)]
    found = renew_products(rows, at, scale, updates, m, parts)
    with plain_forms():
        expected = renew_products(same, at, scale, updates, m, parts)
    torch.testing.assert_close(rows, same)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)


def test_a_memory_of_long_rows_knows_its_products() -> None:
    """Three rounds with new, known and absent clients: the Gram matrix is that of the rows, also part by part."""
    torch.manual_seed(0)
    length = 1 << 17
    parts = [slice(0, 100), slice(100, length)]
    memory, m = Memory.empty(4, torch.zeros(length), 2), torch.randn(length)
    plain: dict[int, torch.Tensor] = {}
    for clients in ([0, 1, 2], [1, 3], [4, 1]):
        updates = torch.randn(len(clients), length)
        memory, place = memory.let_in(torch.tensor(clients))
        memory, along = memory.remember(place, updates, 0.5, parts, m)
        plain = {i: 0.5 * d for i, d in plain.items() if i in memory.ids.tolist()}
        for i, update in zip(clients, updates, strict=True):
            plain[i] = plain.get(i, torch.zeros(length)) + update
    rows = memory.rows * 0.5 ** memory.age.clamp(min=0).unsqueeze(1)
    for row, i in zip(rows, memory.ids.tolist(), strict=True):
        torch.testing.assert_close(row, plain[i])
    for n, part in enumerate(parts):
        torch.testing.assert_close(
            memory.products[n], gram(memory.rows[:, part], memory.rows[:, part]).double(), rtol=1e-4, atol=1
        )
        torch.testing.assert_close(along[n], (memory.rows[:, part] @ m[part]).double(), rtol=1e-4, atol=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_combination_is_summed_in_float64(dtype: torch.dtype) -> None:
    """More than one block of a CPU, one of them short; p stays as it is."""
    torch.manual_seed(0)
    p, rows = torch.randn(150_005, dtype=dtype), torch.randn(5, 150_005, dtype=dtype)
    index, share, before = torch.tensor([3, 0]), torch.tensor([1e4, 2.0], dtype=torch.float64), p.clone()
    expected = (p.double() + share @ rows[index].double()).to(dtype)
    assert torch.equal(combine(p, rows, index, share), expected) or dtype == torch.float64
    torch.testing.assert_close(combine(p, rows, index, share), expected, rtol=1e-12, atol=1e-9)
    assert torch.equal(p, before)


def test_an_engine_is_told_that_a_memory_decides_by_values_and_is_written_in_place() -> None:
    memory, updates = Memory.empty(3, torch.zeros(8), 1), torch.randn(2, 8)
    with watch() as deciding:
        memory, place = memory.let_in(torch.tensor([4, 7]))
    with watch() as writing:
        memory, along = memory.remember(place, updates, 0.5, [slice(0, 8)], updates[0])
    with watch() as projecting:
        D = memory.constrains(0.5)
        project_parts(updates[0], memory.rows, [slice(0, 8)], memory.products, along, D, D[None])
    assert [(seen.by_value, seen.in_place) for seen in (deciding, writing, projecting)] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    assert not projecting.doubts
