"""Counter-based random numbers: the host and the tensor form agree, and the numbers look random."""

from __future__ import annotations

import pytest
import torch

from undrift.core.streams import (
    Purpose,
    below,
    fold,
    mix,
    mix_int,
    sample,
    samples,
    stream,
    to_signed,
    uniform,
    words,
)


def test_mix_is_splitmix64() -> None:
    # The first outputs of SplitMix64 seeded with 0 (Vigna's reference generator).
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    increment = 0x9E3779B97F4A7C15
    assert [mix_int((k + 1) * increment) for k in range(3)] == expected


def test_tensor_and_host_forms_agree() -> None:
    values = [0, 1, 12345, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    mixed = mix(torch.tensor([to_signed(v) for v in values]))
    assert mixed.tolist() == [to_signed(mix_int(v)) for v in values]
    key = stream(3, Purpose.DROPOUT, 7)
    assert fold(key, torch.tensor([5])).item() == to_signed(stream(3, Purpose.DROPOUT, 7, 5))
    nested = fold(fold(key, torch.tensor([5])), torch.tensor([9]))
    assert nested.item() == to_signed(stream(3, Purpose.DROPOUT, 7, 5, 9))


def test_streams_differ_by_every_part() -> None:
    keys = {stream(s, p, r, c) for s in range(3) for p in Purpose for r in range(5) for c in range(5)}
    assert len(keys) == 3 * len(Purpose) * 25


def test_numbers_are_uniform() -> None:
    word = words(torch.tensor(to_signed(stream(0, Purpose.AUGMENT))), 200_000)
    u = uniform(word)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.003 and abs(u.var() - 1 / 12) < 0.002
    counts = torch.bincount(below(word, 7), minlength=7)
    assert len(counts) == 7 and (counts - 200_000 / 7).abs().max() < 700
    neighbours = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]
    assert abs(neighbours) < 0.01


@pytest.mark.parametrize(("population", "size"), [(1, 1), (10, 3), (10, 10), (1_000_000, 5)])
def test_sample_draws_without_replacement(population: int, size: int) -> None:
    drawn = [sample(stream(0, Purpose.COHORT, t), population, size) for t in range(50)]
    assert all(len(set(d)) == size and min(d) >= 0 and max(d) < population for d in drawn)
    assert drawn == [sample(stream(0, Purpose.COHORT, t), population, size) for t in range(50)]


@pytest.mark.parametrize(("population", "size"), [(1, 1), (10, 3), (10, 10), (100, 10), (2**31 - 1, 40)])
def test_drawing_for_many_rounds_at_once_gives_the_same(population: int, size: int) -> None:
    for seed in (0, 5, 2**64 - 1):
        keys = fold(stream(seed, Purpose.COHORT), torch.arange(200))
        plain = [stream(seed, Purpose.COHORT, t) for t in range(200)]
        assert keys.tolist() == [to_signed(key) for key in plain]
        assert samples(keys, population, size).tolist() == [sample(key, population, size) for key in plain]


def test_sample_is_fair_in_membership_and_order() -> None:
    members, first = torch.zeros(8), torch.zeros(8)
    for t in range(8000):
        drawn = sample(stream(1, Purpose.COHORT, t), 8, 3)
        members[drawn] += 1
        first[drawn[0]] += 1
    assert (members - 3000).abs().max() < 200  # five standard deviations
    assert (first - 1000).abs().max() < 150
