"""The index table of a round: who trains on which samples, when."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from undrift.data.batches import Plan, Table, table

SIZES = np.array([7, 64, 1, 130, 33, 65], dtype=np.int64)
START = np.concatenate([[0], np.cumsum(SIZES)[:-1]])
MEMBERS = torch.arange(int(SIZES.sum())) + 1000  # samples have numbers of their own


def batches(plan: Plan, round: int, ids: list[int], position: list[int], seed: int = 0) -> Table:
    of, name = np.array(ids), plan.shuffle_stream(seed, round)
    return table(plan, name, of, MEMBERS, START[of], SIZES[of], np.array(position))


def samples(made: Table, s: int, k: int) -> list[int]:
    return made.index[s, k, : made.count[s, k]].tolist()


def own(i: int) -> set[int]:
    return set(range(1000 + START[i], 1000 + START[i] + SIZES[i]))


def test_persistent_batches_go_on_where_they_stopped_and_cover_every_sample_once_a_pass() -> None:
    plan = Plan(batch=32, steps=3)
    seen: list[list[int]] = []
    for round, position in enumerate((0, 3, 6, 9)):
        made = batches(plan, round, [3], [position])
        seen += [samples(made, 0, k) for k in range(3)]
    # 130 = 4 * 32 + 2: five batches a pass, the last of two samples
    assert [len(b) for b in seen] == [32, 32, 32, 32, 2, 32, 32, 32, 32, 2, 32, 32]
    first, second = sum(seen[:5], []), sum(seen[5:10], [])
    assert set(first) == own(3) and set(second) == own(3) and len(first) == len(second) == 130
    assert first != second


def test_a_last_batch_of_one_sample_is_left_out_when_persistent_and_kept_in_epochs() -> None:
    persistent = batches(Plan(batch=32, steps=3), 0, [5], [0])  # 65 = 2 * 32 + 1
    assert persistent.count.tolist() == [[32, 32, 32]]
    assert batches(Plan(batch=32, epochs=1, persistent=False), 0, [5], [0]).count.tolist() == [[32, 32, 1]]
    assert batches(Plan(batch=32, steps=2), 0, [2], [0]).count.tolist() == [
        [1, 1]
    ]  # a client with one sample trains on it


def test_a_small_client_trains_on_all_it_has() -> None:
    made = batches(Plan(batch=32, steps=4), 0, [0], [0])
    assert made.count.tolist() == [[7, 7, 7, 7]]
    assert all(set(samples(made, 0, k)) == own(0) for k in range(4))


def test_epochs_give_each_client_its_own_number_of_steps() -> None:
    made = batches(Plan(batch=32, epochs=2, persistent=False), 0, [0, 1, 3], [0, 0, 0])
    assert made.steps.tolist() == [2, 4, 10]
    assert (made.count[0, 2:] == 0).all() and (made.index[0, 2:] == 0).all()
    for s, i in enumerate([0, 1, 3]):
        half = made.steps[s] // 2
        assert set(sum((samples(made, s, k) for k in range(half)), [])) == own(i)
        assert set(sum((samples(made, s, k) for k in range(half, 2 * half)), [])) == own(i)


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, [1, 1, 2]), (0.1, [1, 1, 1]), (1.5, [1, 3, 7])])
def test_fractional_epochs(epochs: float, steps: list[int]) -> None:
    # round(0.5 * 7 / 32) = 0 -> at least 1; round(0.5 * 64 / 32) = 1; round(0.5 * 130 / 32) = 2; with 1.5: 1+0, 2+1, 5+2
    assert batches(Plan(batch=32, epochs=epochs, persistent=False), 0, [0, 1, 3], [0, 0, 0]).steps.tolist() == steps


def test_a_client_draws_the_same_alone_and_in_any_cohort() -> None:
    plan = Plan(batch=16, steps=5)
    together = batches(plan, 4, [0, 1, 3, 4], [5, 2, 11, 0])
    for s, (i, position) in enumerate(((0, 5), (1, 2), (3, 11), (4, 0))):
        alone = batches(plan, 9, [i], [position])  # persistent batches do not depend on the round either
        assert [samples(alone, 0, k) for k in range(5)] == [samples(together, s, k) for k in range(5)]


def test_fresh_batches_depend_on_the_round_and_the_seed() -> None:
    plan = Plan(batch=16, steps=2, persistent=False)
    one = samples(batches(plan, 0, [3], [0]), 0, 0)
    assert one == samples(batches(plan, 0, [3], [77]), 0, 0)  # not on the position
    assert one != samples(batches(plan, 1, [3], [0]), 0, 0)
    assert one != samples(batches(plan, 0, [3], [0], seed=1), 0, 0)


def test_batches_without_replacement_are_spread_evenly() -> None:
    """Every sample is equally likely in the first batch of a pass."""
    hits = np.zeros(33)
    for t in range(3000):
        made = batches(Plan(batch=8, steps=1, persistent=False), t, [4], [0])
        hits[np.array(samples(made, 0, 0)) - 1000 - START[4]] += 1
    assert abs(hits - 3000 * 8 / 33).max() < 130  # five standard deviations
