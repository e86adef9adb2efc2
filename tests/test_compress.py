"""Compressors: shared places, blocks, and the entries that are kept."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.dataparallel.cases import network
from undrift.compress import LargestEntries, count_kept, make_compressor
from undrift.dataparallel.workers import Ranks, SimulatedWorkers

SIZES = [p.numel() for p in network().parameters()]


def masked(compressor: Any, v: Tensor, t: int) -> Tensor:
    rest = v.clone()
    compressor.exchange(rest, t, Ranks())
    return v - rest


@pytest.mark.parametrize("name", ["rbgs", "randk"])
@pytest.mark.parametrize("block", ["flat", "tensor"])
def test_shared_places_are_a_linear_projection(name: str, block: str) -> None:
    made = make_compressor(name, block, 4, 1, SIZES)
    u, v = torch.randn(2, sum(SIZES), dtype=torch.float64)
    count = sum(count_kept(n, 4) for n in (SIZES if block == "tensor" else [sum(SIZES)]))
    for t in range(30):
        c = functools.partial(masked, made, t=t)
        assert torch.equal(c(c(u)), c(u)), "idempotent"
        assert torch.allclose(c(2 * u + v), 2 * c(u) + c(v))
        assert float(c(u) @ (u - c(u))) == 0.0, "orthogonal"
        assert int((c(u) != 0).sum()) == count


def test_every_start_of_a_block_is_as_likely_and_wraps() -> None:
    n, made = 11, make_compressor("rbgs", "flat", 4, 5, [11])
    v = torch.arange(1.0, 12.0)
    starts: dict[tuple[int, ...], int] = {}
    for t in range(4400):
        places = made.places(t, v.device)  # type: ignore[attr-defined]
        index = tuple(i for place in places for i in range(place.start, place.stop))
        assert all((b - a) % n == 1 for a, b in itertools.pairwise(index)) and len(index) == 3
        starts[index] = starts.get(index, 0) + 1
    assert len(starts) == n, "all d starts occur, also those that wrap"
    assert max(abs(count - 400) for count in starts.values()) < 100  # five standard deviations
    total = sum(torch.zeros(n).index_fill(0, torch.tensor(index), 1.0) * v for index in starts)
    assert torch.equal(total, 3 * v), "the sum over all starts of C(v) is b v"


def test_shuffled_blocks_visit_everything_once_in_a_pass() -> None:
    made = make_compressor("rbgs", "shuffle", 4, 0, [10, 13])
    orders = []
    for visit in range(5):
        places = [made.places(4 * visit + n, torch.device("cpu"))[0] for n in range(4)]  # type: ignore[attr-defined]
        assert sorted(i for p in places for i in range(p.start, p.stop)) == list(range(23))
        orders.append([p.start for p in places])
    assert len({tuple(order) for order in orders}) > 1


def test_the_largest_entries_are_kept() -> None:
    v = torch.tensor([[0.1, -5.0, 2.0, 0.0], [3.0, 0.2, -0.1, 4.0]])
    assert LargestEntries((4,), 2).places(v).tolist() == [[1, 2], [0, 3]]
    assert LargestEntries((2, 2), 2).places(v).tolist() == [[1, 2], [0, 3]]


def test_the_leaders_largest_entries_are_kept_of_all_and_everybody_leads_in_turn() -> None:
    made = make_compressor("leader", "flat", 3, 0, [6])
    p = torch.tensor([[9.0, 1, 2, -8, 3, 0], [1.0, 5, 6, 2, 3, 4]])
    workers = SimulatedWorkers(2)
    for t, (places, mean) in enumerate([([0, 3], [5.0, -3.0]), ([1, 2], [3.0, 4.0]), ([0, 3], [5.0, -3.0])]):
        rest = p.clone()
        exchanged = made.exchange(rest, t, workers, keep=True)
        assert exchanged.places[0].tolist() == places and exchanged.values[0].tolist() == mean  # type: ignore[union-attr]
        assert exchanged.kept is not None and torch.equal(exchanged.kept, p[:, places])
        assert torch.equal(rest, p.index_fill(1, torch.tensor(places), 0.0))


def test_random_entries_are_drawn_evenly() -> None:
    made = make_compressor("randk", "flat", 5, 0, [20])
    counts = np.zeros(20)
    for t in range(2000):
        (index,) = made.places(t, torch.device("cpu"))  # type: ignore[attr-defined]
        assert len(set(index.tolist())) == 4
        counts[index.numpy()] += 1
    assert np.abs(counts - 400).max() < 100
