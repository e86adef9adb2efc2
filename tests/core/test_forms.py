"""Which form of a function runs, and what a watcher is told."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from undrift.core.forms import Form, doubt, faster, plain, plain_forms, watch


def example() -> Form[[Tensor], str]:
    """A function that says which form of it ran: `short` for less than three entries, `any` else; itself for none."""

    @plain
    def size(x: Tensor) -> str:
        """How long x is."""
        return "plain"

    @faster(size, when=lambda x: len(x) < 3)
    def size_short(x: Tensor) -> str:
        return "short"

    @faster(size, when=lambda x: len(x) > 0)
    def size_any(x: Tensor) -> str:
        return "any"

    return size


def test_the_first_form_whose_condition_holds_runs() -> None:
    size = example()
    assert [size(torch.ones(n)) for n in (0, 2, 3)] == ["short", "short", "any"]
    assert size(x=torch.ones(5)) == "any" and size.plain(torch.ones(5)) == "plain"
    size.forms.clear()
    assert size(torch.ones(2)) == "plain"


def test_a_form_looks_like_its_function() -> None:
    size = example()
    assert size.__name__ == "size" and size.__doc__ == "How long x is."  # type: ignore[attr-defined]
    assert size.__wrapped__ is size.plain
    assert list(inspect.signature(size).parameters) == ["x"]


def test_only_plain_functions_run_where_that_is_asked_for() -> None:
    size, x = example(), torch.ones(2)
    with plain_forms():
        with plain_forms():
            assert size(x) == "plain"
        assert size(x) == "plain" and size.choose(x) is size.plain
    assert size(x) == "short"
    with pytest.raises(KeyError), plain_forms():
        raise KeyError
    assert size(x) == "short"


def test_it_holds_for_threads_that_were_there_before() -> None:
    size, x = example(), torch.ones(2)
    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(size, x).result() == "short"
        with plain_forms():
            assert set(pool.map(size, [x] * 8)) == {"plain"}
        assert pool.submit(size, x).result() == "short"


def test_a_watcher_is_told_what_ran() -> None:
    @plain(by_value=True)
    def decide(x: Tensor) -> float:
        return x.max().item()

    @plain(in_place=True)
    def write(x: Tensor) -> Tensor:
        return x.add_(1)

    faster(decide, when=lambda x: len(x) > 2)(lambda x: -1.0)
    faster(write, when=lambda x: len(x) > 2)(lambda x: x)
    with watch() as nothing:
        example()(torch.ones(2))
    assert not nothing.by_value and not nothing.in_place and not nothing.doubts
    with watch() as fast:
        decide(torch.ones(3))
        write(torch.ones(3))
    assert not fast.by_value and fast.in_place  # its faster forms write as well, but decide by no value
    with watch() as outer:
        with watch() as inner:
            decide(torch.ones(2))
        write(torch.ones(2))
    assert inner.by_value and not inner.in_place and outer.by_value and outer.in_place
    with watch() as slow, plain_forms():
        decide(torch.ones(3))
    assert slow.by_value


def test_a_watcher_sees_its_own_thread_alone() -> None:
    @plain(by_value=True)
    def decide() -> None:
        doubt(torch.tensor(True))

    with ThreadPoolExecutor(1) as pool, watch() as seen:
        pool.submit(decide).result()
    assert not seen.by_value and not seen.doubts


def test_doubts_are_collected() -> None:
    doubt(torch.tensor(True))  # nobody is told
    with watch() as outer:
        doubt(torch.tensor([True, False]))
        with watch() as inner:
            doubt(torch.tensor(False))
    assert [flag.tolist() for flag in outer.doubts] == [[True, False], False]
    assert [flag.tolist() for flag in inner.doubts] == [False]
