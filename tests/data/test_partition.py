"""Partitions: nothing lost or repeated but by `resample`, nobody left empty, sizes and label mixtures as described."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.small import CPU
from undrift.cli import main
from undrift.core.errors import BadSetting, UnknownName
from undrift.data.federation import federate
from undrift.data.load import class_counts, load_dataset
from undrift.data.partition import OWNER_RULES, PARTITIONS, STREAM, partition

Labels = NDArray[np.int64]

SPECS = (
    "iid",
    "dirichlet:0.01",
    "dirichlet:1",
    "dirichlet:5e-324",
    "dirichlet:1e308",
    "dirichlet-balanced:0.01",
    "dirichlet-balanced:5",
    "dirichlet-balanced:5e-324",
    "similarity:0",
    "similarity:10%",
    "similarity:0.5",
    "similarity:1",
    "shards:1",
    "shards:2",
)


def needed_per_client(spec: str) -> int:
    return 2 if spec.startswith("dirichlet:") or spec == "shards:2" else 1


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, Labels, int, int]:
    """A spec with labels of any distribution (one class, a rare class, gaps, huge ids) and any allowed N."""
    spec = draw(st.sampled_from(SPECS))
    least = needed_per_client(spec)
    labels = draw(
        st.one_of(
            st.lists(st.integers(0, 4), min_size=least, max_size=60),
            st.lists(st.sampled_from([0, 7, 10**12]), min_size=least, max_size=60),
            st.integers(least, 60).map(lambda count: [3] * count),
            st.integers(least, 60).map(lambda count: [0] * (count - 1) + [1]),
            st.integers(least, 60).map(lambda count: list(range(count))),
        )
    )
    most = len(labels) // least
    clients = draw(st.one_of(st.integers(1, most), st.just(most)))
    return spec, np.array(labels, dtype=np.int64), clients, draw(st.integers(0, 2**32 - 1))


@settings(deadline=2000, max_examples=400)
@given(problems())
def test_every_sample_goes_to_exactly_one_client_and_nobody_is_empty(
    problem: tuple[str, Labels, int, int],
) -> None:
    spec, labels, clients, seed = problem
    parts = partition(spec, labels, clients, seed)
    assert len(parts) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert all(part.dtype == np.int64 for part in parts)
    sizes = [len(part) for part in parts]
    assert min(sizes) >= (2 if spec.startswith("dirichlet:") else 1)
    if not spec.startswith(("dirichlet:", "shards:2")):
        assert max(sizes) - min(sizes) <= 1
    if spec == "shards:2":
        assert max(sizes) - min(sizes) <= 2
    if spec.startswith(("dirichlet-balanced", "similarity")):
        assert sizes == sorted(sizes, reverse=True)  # the samples left over go to the first clients
    again = partition(spec, labels, clients, seed)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_the_property_above_is_asked_of_every_partition_but_three() -> None:
    assert (
        {spec.partition(":")[0] for spec in SPECS}
        == set(OWNER_RULES) - {"sites"}
        == set(PARTITIONS) - {"sites", "own", "resample"}
    )


@pytest.mark.parametrize("spec", [*SPECS, "resample:40"])
def test_another_seed_gives_another_partition_and_lists_are_shuffled(spec: str) -> None:
    labels = np.arange(2000) % 10
    parts = partition(spec, labels, 10, seed=1)
    others = partition(spec, labels, 10, seed=2)
    assert any(not np.array_equal(one, other) for one, other in zip(parts, others, strict=True))
    long_ones = [part for part in parts if len(part) > 20]
    assert long_ones and all((np.diff(part) < 0).any() for part in long_ones)
    # The labels within a client's list are not in order either, where it has several.
    several = [labels[part] for part in long_ones if len(set(labels[part])) > 1]
    assert all((np.diff(held) < 0).any() and (np.diff(held) > 0).any() for held in several)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.data())
def test_iid_gives_every_client_its_share_of_every_class(listed: list[int], data: st.DataObject) -> None:
    labels = np.array(listed)
    clients = data.draw(st.integers(1, len(labels)))
    for part in partition("iid", labels, clients, seed=0):
        for one_class in np.unique(labels):
            share = (labels == one_class).sum() / clients
            assert abs((labels[part] == one_class).sum() - share) < 1


def test_iid_is_random_within_a_class() -> None:
    first, _ = partition("iid", np.zeros(1000, dtype=np.int64), 2, seed=0)
    assert 200 < (first % 2).sum() < 300  # dealt in turn without shuffling it would be 0 or 500


def test_similarity_0_is_sorted_by_label_and_1_is_random() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 160))
    by_label = partition("similarity:0", labels, 16, seed=0)
    in_client_order = np.concatenate([np.sort(labels[part]) for part in by_label])
    np.testing.assert_array_equal(in_client_order, np.sort(labels))
    at_random = partition("similarity:1", labels, 16, seed=0)
    counts = np.array([np.bincount(labels[part], minlength=10) for part in at_random])
    assert (counts.sum(axis=1) == 100).all()
    # 160 counts around 10 vary by 10·0.9·(1 - 1/16) ≈ 8.4 if random, 0 if stratified, hundreds if sorted.
    assert 5 < counts.var() < 14


def test_similarity_deals_the_share_at_random_and_the_rest_sorted() -> None:
    labels = np.repeat(np.arange(16), 100)
    parts = partition("similarity:25%", labels, 16, seed=3)
    counts = np.array([np.bincount(labels[part], minlength=16) for part in parts])
    assert (counts.sum(axis=1) == 100).all()
    # Piece i of the sorted three quarters is about class i; the dealt quarter brings 25/16 of each class.
    near_diagonal = sum(np.diagonal(counts, offset).sum() for offset in (-1, 0, 1)) / counts.sum()
    assert 0.75 <= near_diagonal < 0.75 + 0.25 * 5 / 16
    same = partition("similarity:0.25", labels, 16, seed=3)
    assert all(np.array_equal(one, other) for one, other in zip(parts, same, strict=True))


def test_shards_are_whole_runs_of_the_sorted_labels() -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 60))
    parts = partition("shards:2", labels, 30, seed=0)  # 60 shards of 10 samples, each of one class
    for part in parts:
        held = np.bincount(labels[part], minlength=10)
        assert len(part) == 20 and set(held) <= {0, 10, 20}
    assert any(len(set(labels[part])) == 2 for part in parts)


def test_sites_are_the_clients() -> None:
    sites = np.array([5, 2, 5, 9, 2, 5])
    parts = partition("sites", np.zeros(6, dtype=np.int64), 3, seed=0, sites=sites)
    assert [sorted(part.tolist()) for part in parts] == [[1, 4], [0, 2, 5], [3]]
    masks = np.zeros((6, 4, 4), dtype=np.int64)
    assert [len(part) for part in partition("sites", masks, 3, seed=0, sites=sites)] == [2, 3, 1]


@settings(deadline=2000, max_examples=100)
@given(st.integers(1, 50), st.integers(1, 300), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_resample_gives_everybody_as_many_samples_that_depend_on_seed_and_client_alone(
    samples: int, clients: int, each: int, seed: int
) -> None:
    parts = partition(f"resample:{each}", np.zeros(samples, dtype=np.int64), clients, seed)
    assert len(parts) == clients and all(len(part) == each and part.dtype == np.int64 for part in parts)
    assert min(part.min() for part in parts) >= 0 and max(part.max() for part in parts) < samples
    fewer = partition(f"resample:{each}", np.arange(samples), max(1, clients // 3), seed)
    assert all(np.array_equal(one, other) for one, other in zip(fewer, parts, strict=False))
    longer = partition(f"resample:{each + 1}", np.arange(samples), clients, seed)
    assert all(np.array_equal(one[:each], other) for one, other in zip(longer, parts, strict=True))


def test_resample_draws_every_sample_alike_with_replacement_and_for_each_client_anew() -> None:
    parts = partition("resample:20", np.zeros(100, dtype=np.int64), 150_000, seed=0)  # more than are drawn at once
    drawn = np.stack(parts)
    counts = np.bincount(drawn.ravel(), minlength=100)
    assert abs(counts - 30_000).max() < 5 * np.sqrt(30_000)
    repeats = np.mean([len(set(part.tolist())) < 20 for part in parts[:2000]])
    assert 0.82 < repeats < 0.92  # 1 - 100! / (80! 100^20) = 0.87
    assert len(np.unique(drawn, axis=0)) == 150_000
    in_common = (drawn[:-1, :, None] == drawn[1:, None, :])[:2000].mean()
    assert 0.009 < in_common < 0.011


def test_resample_leaves_the_validation_samples_alone_and_needs_no_labels() -> None:
    federation = federate(load_dataset("digits"), "resample:20", 3000, 0, CPU, val_fraction=0.5)
    held = set(federation.members.tolist())
    assert len(federation.validation) == len(held) == 719 and not held & set(federation.validation.tolist())


@pytest.mark.parametrize("spec", ["iid", "resample:7"])
def test_class_counts_are_those_of_each_clients_samples(spec: str) -> None:
    data = load_dataset("digits")
    parts = partition(spec, data.y_train.astype(np.int64), 30, seed=1)
    expected = [np.bincount(data.y_train[part], minlength=10) for part in parts]
    np.testing.assert_array_equal(class_counts(data, spec, 30, 1)[0], expected)


def test_memory_per_client_of_a_federation() -> None:
    """8 bytes for each sample of a client and 16 for the client; lists or dicts of clients would take hundreds."""
    data, clients, each = load_dataset("digits"), 200_000, 5
    tracemalloc.start()
    federation = federate(data, f"resample:{each}", clients, 0, CPU)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    kept = federation.members.nbytes + federation.start.nbytes + federation.sizes.nbytes
    assert federation.clients == clients and kept == clients * (8 * each + 16)
    assert clients * 8 * each < peak < 2.5 * kept  # numpy's arrays are traced, and the members are copied once


def plain_class_wise_dirichlet(labels: Labels, clients: int, concentration: float, seed: int) -> list[set[int]]:
    """The description step by step, with lists and loops, from the same random numbers in the same order."""
    random = np.random.Generator(np.random.PCG64([seed, STREAM]))
    lists = {one: [i for i in range(len(labels)) if labels[i] == one] for one in sorted(set(labels.tolist()))}
    held: list[set[int]] = [set() for _ in range(clients)]
    uniforms = iter(random.random(2 * clients))
    for _ in range(2):
        for client in range(clients):
            non_empty = [one for one in lists if lists[one]]
            held[client].add(lists[non_empty[int(next(uniforms) * len(non_empty))]].pop())
    for one in lists:
        shares = random.dirichlet([concentration] * clients)
        remaining = random.permutation(np.array(lists[one], dtype=np.int64)).tolist()
        begin, reached = 0, 0.0
        for client in range(clients):
            reached += shares[client]
            end = len(remaining) if client == clients - 1 else int(reached * len(remaining))
            held[client] |= set(remaining[begin:end])
            begin = end
    return held


@pytest.mark.parametrize("concentration", [0.01, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("clients", [1, 3, 10, 30])
def test_class_wise_dirichlet_is_what_is_described(concentration: float, clients: int) -> None:
    # 61 samples, one class of a single sample: with 30 clients the guaranteed draws empty several classes.
    labels = np.random.default_rng(7).permutation(np.repeat([0, 1, 2, 5], [30, 20, 10, 1]))
    parts = partition(f"dirichlet:{concentration}", labels, clients, seed=11)
    expected = plain_class_wise_dirichlet(labels, clients, concentration, seed=11)
    assert [set(part.tolist()) for part in parts] == expected


def mean_label_entropy(parts: list[Labels], labels: Labels) -> float:
    entropies = []
    for part in parts:
        shares = np.bincount(labels[part]) / len(part)
        entropies.append(-sum(share * np.log(share) for share in shares if share > 0))
    return float(np.mean(entropies))


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-balanced"])
def test_label_entropy_grows_with_the_concentration_up_to_iid(name: str) -> None:
    labels = np.arange(10000) % 10
    entropies = [
        mean_label_entropy(partition(f"{name}:{concentration}", labels, 20, seed=0), labels)
        for concentration in (0.01, 0.1, 1, 100, 1e308)
    ]
    assert all(lower < higher for lower, higher in itertools.pairwise(entropies))
    assert entropies[0] < 1.2 and entropies[-1] > np.log(10) - 0.02  # log 10 is what iid has


def test_balanced_dirichlet_follows_the_clients_own_mixtures() -> None:
    labels = np.arange(60000) % 10
    begin = time.process_time()
    parts = partition("dirichlet-balanced:0.1", labels, 100, seed=0)
    assert time.process_time() - begin < 2
    shares = np.array([np.bincount(labels[part], minlength=10) for part in parts]) / 600
    # The largest share of a Dirichlet(0.1) draw over 10 classes is 0.66 on average; an even client has 0.1.
    assert 0.5 < shares.max(axis=1).mean() < 0.8


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.1"])
def test_a_hundred_thousand_clients_take_seconds(spec: str) -> None:
    labels = np.arange(300_000) % 10
    begin = time.process_time()
    parts = partition(spec, labels, 100_000, seed=0)
    assert time.process_time() - begin < 10
    assert len(parts) == 100_000 and sum(map(len, parts)) == 300_000 and min(map(len, parts)) >= 2


@pytest.mark.parametrize(
    ("spec", "clients", "says"),
    [
        ("dirichlet", 2, "needs a number above 0"),
        ("dirichlet:nan", 2, "needs a number above 0"),
        ("dirichlet:0", 2, "needs a number above 0"),
        ("dirichlet:-1", 2, "needs a number above 0"),
        ("dirichlet:inf", 2, "needs a number above 0"),
        ("dirichlet-balanced:much", 2, "dirichlet-balanced:0.1"),
        ("dirichlet:1", 6, "at most 5 clients"),
        ("similarity", 2, "similarity:10%"),
        ("similarity:1.5", 2, "between 0 and 1"),
        ("similarity:101%", 2, "between 0 and 1"),
        ("similarity:-0.1", 2, "between 0 and 1"),
        ("similarity:nan", 2, "between 0 and 1"),
        ("shards", 2, "shards:2"),
        ("shards:0", 2, "shards:2"),
        ("shards:1.5", 2, "whole number"),
        ("shards:6", 2, "12 shards"),
        ("sites", 2, "try 'iid'"),
        ("iid:3", 2, "no parameter"),
        ("resample", 2, "resample:20"),
        ("resample:0", 2, "resample:20"),
        ("resample:2.5", 2, "whole number"),
        ("resample:1e300", 2, "use fewer samples or fewer clients"),
        ("resample:3", 0, "at least 1"),
        ("iid", 11, "only 10 training samples.*resample:20"),
        ("iid", 0, "at least 1"),
    ],
)
def test_bad_settings_are_refused_with_advice(spec: str, clients: int, says: str) -> None:
    with pytest.raises(BadSetting, match=says) as caught:
        partition(spec, np.arange(10) % 3, clients, seed=0)
    assert "\n" not in str(caught.value)


def test_wrong_number_of_sites_and_labels_that_are_masks_are_refused() -> None:
    with pytest.raises(BadSetting, match="set the number of clients to 3"):
        partition("sites", np.zeros(4, dtype=np.int64), 2, seed=0, sites=np.array([0, 1, 2, 2]))
    with pytest.raises(BadSetting, match="one class per sample"):
        partition("iid", np.zeros((4, 2, 2), dtype=np.int64), 2, seed=0)


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'dirichlet'"):
        partition("dirichlt:0.1", np.arange(10), 2, seed=0)


def test_own_is_sites_in_an_order_that_depends_on_no_other_client() -> None:
    owner = np.array([2, 0, 0, 1, 2, 2, 0, 2, 0, 0])
    labels = np.zeros(10, np.int64)
    parts, sites = (partition(spec, labels, 3, 5, owner) for spec in ("own", "sites"))
    assert [sorted(part) for part in parts] == [sorted(part) for part in sites]
    few = owner != 1  # client 1 has other samples: client 2 goes on as before, by its own count of samples
    more = np.concatenate([owner[few], [1, 1, 1]])
    again = partition("own", np.zeros(len(more), np.int64), 3, 5, more)
    for k in (0, 2):
        place = {row: n for n, row in enumerate(np.flatnonzero(owner == k))}
        replaced = {row: n for n, row in enumerate(np.flatnonzero(more == k))}
        assert [place[row] for row in parts[k]] == [replaced[row] for row in again[k]]
    assert parts[0].tolist() != sorted(parts[0])


def test_every_partition_says_what_it_does() -> None:
    for name, rule in PARTITIONS.items():
        assert (rule.__doc__ or "").splitlines()[0].startswith(name)


def test_what_clients_hold_out_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The split that a run makes: a fifth of each client's own samples."""
    data = load_dataset("digits")
    whole, _ = class_counts(data, "dirichlet:0.3", 10, 3)
    trained, tested = class_counts(data, "dirichlet:0.3", 10, 3, 0.2)
    np.testing.assert_array_equal(trained + tested, whole)
    made = federate(data, "dirichlet:0.3", 10, 3, CPU, own_test=0.2)
    own = made.held_out["test"]
    for client in range(10):
        mine = data.y_train[own.rows[own.owners == client].numpy()]
        np.testing.assert_array_equal(np.bincount(mine, minlength=10), tested[client])
        assert abs(len(mine) - 0.2 * whole[client].sum()) <= 0.5
    shown = ["data", "show", "--partition", "dirichlet:0.3", "--clients", "10", "--seed", "3", "--own-test", "0.2"]
    assert main([*shown, "--out", str(tmp_path / "split.svg")]) == 0
    assert "hold out" in capsys.readouterr().out
    assert "#e69f00" in (tmp_path / "split.svg").read_text().lower()
