"""Inputs of several parts, samples with names, loaders and streams: what the model is given, and that runs agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

import undrift
from undrift.core.errors import BadData, BadSetting
from undrift.core.pieces import Piece, join, part, pieces_of
from undrift.data.from_user import dataset_from

N, T, VOCABULARY = 30, 6, 11
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, VOCABULARY, (N, T))
MASK = np.arange(T) < RANDOM.integers(2, T + 1, (N, 1))
LABELS = (IDS * MASK).sum(1) % 3
SETTINGS: dict[str, Any] = dict(clients=3, cohort=2, rounds=2, steps=3, batch=4, partition="iid", dtype="float64")


class Pooled(nn.Module):
    """The mean of the embeddings that a mask shows; `joined` takes both in one tensor."""

    def __init__(self, joined: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.joined, self.table, self.head = joined, nn.Embedding(VOCABULARY, 5), nn.Linear(5, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        if self.joined:
            input_ids, attention_mask = input_ids[:, :T], input_ids[:, T:] > 0
        assert attention_mask is not None and attention_mask.dtype == torch.bool and input_ids.dtype == torch.int64
        shown = attention_mask.unsqueeze(-1).to(self.head.weight)
        return {"logits": self.head((self.table(input_ids) * shown).sum(1) / shown.sum(1))}


class Items(TorchDataset[Any]):
    def __init__(self, how: str, rows: range = range(N)) -> None:
        self.how, self.rows = how, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, n: int) -> Any:
        i = self.rows[n]
        ids, mask, y = torch.tensor(IDS[i]), torch.tensor(MASK[i]), int(LABELS[i])
        if self.how == "tuple":
            return (ids, mask), y
        named = {"input_ids": ids, "attention_mask": mask}
        return (named, y) if self.how == "names" else named | {"labels": torch.tensor(y)}


class Stream(IterableDataset[Any]):
    def __init__(self, how: str, rows: range = range(N)) -> None:
        self.items = Items(how, rows)

    def __iter__(self) -> Iterator[Any]:
        return (self.items[n] for n in range(len(self.items)))


def collate(samples: list[Any]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


NAMED = {"input_ids": IDS, "attention_mask": MASK}
FORMS: dict[str, Any] = {
    "arrays": (((IDS, MASK), LABELS), ((IDS, MASK), LABELS)),
    "four": ((IDS, MASK), LABELS, (IDS, MASK), LABELS),
    "four by name": {"x_train": NAMED, "y_train": LABELS, "x_test": NAMED, "y_test": LABELS},
    "named arrays": ((NAMED, LABELS), (NAMED, LABELS)),
    "arrays with labels": (NAMED | {"labels": LABELS}, NAMED | {"labels": LABELS}),
    "samples": (Items("tuple"), Items("tuple")),
    "samples by name": (Items("names"), Items("names")),
    "samples with labels": (Items("labels"), Items("labels")),
    "a stream": (Stream("labels"), Items("labels")),
    "a loader": (DataLoader(Items("tuple"), batch_size=7, shuffle=True), DataLoader(Items("tuple"), batch_size=4)),
    "a loader of a stream": (DataLoader(Stream("names")), DataLoader(Stream("names"))),
    "a loader with a function": (
        DataLoader(Items("labels"), collate_fn=collate),
        DataLoader(Stream("labels"), collate_fn=collate),
    ),
    "clients": (
        [Stream("labels", range(10)), DataLoader(Items("labels", range(10, 20))), Items("labels", range(20, N))],
        Items("labels"),
    ),
}


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """A run of the model that is given both parts in one tensor."""
    x = np.concatenate([IDS, MASK.astype(np.int64)], 1)
    result = undrift.run(model=Pooled(joined=True), data=(x, LABELS, x, LABELS), **SETTINGS)
    return result.model, result.records


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("execution", ["stacked", "debug"])
def test_runs_equal_those_of_joined_inputs(form: str, execution: str, expected: Any) -> None:
    settings = SETTINGS | {"execution": execution}
    if form == "clients":
        settings = settings | {"partition": "sites"}
    result = undrift.run(model=Pooled(), data=FORMS[form], **settings)
    assert result.about["inputs"] == [2 * T] and result.about["samples"] == N
    if form == "clients":
        assert result.about["clients"] == 3
        return
    for name, tensor in expected[0].items():
        torch.testing.assert_close(result.model[name], tensor, rtol=1e-12, atol=1e-12)
    assert result.records[-1]["accuracy"] == expected[1][-1]["accuracy"]


def test_parts_are_what_they_were() -> None:
    floats, one = RANDOM.standard_normal((N, 2, 3)), np.arange(N)
    inputs = dataset_from((((IDS, floats, MASK, one), LABELS), ((IDS, floats, MASK, one), LABELS))).x_train
    assert isinstance(inputs, np.ndarray)
    pieces = pieces_of(inputs)
    assert pieces == tuple(Piece("", s, k) for s, k in (((T,), "i"), ((2, 3), "f"), ((T,), "b"), ((), "i")))
    (ids, f, mask, n), named = part(pieces, torch.from_numpy(join(inputs)))
    assert not named and torch.equal(ids, torch.from_numpy(IDS)) and torch.equal(n, torch.arange(N))
    assert np.array_equal(f.numpy(), floats) and mask.dtype == torch.bool and np.array_equal(mask.numpy(), MASK)


def test_what_cannot_be_exact_or_called_is_refused() -> None:
    large = IDS + (1 << 25)
    data = ((large, MASK.astype(np.float32)), LABELS)
    with pytest.raises(BadData, match="whole numbers above 16777216 beside a part of floats"):
        undrift.run(model=Pooled(), data=(data, data), **SETTINGS)
    with pytest.raises(BadSetting, match="the inputs have 2 parts, but mlp takes one"):
        undrift.run(model="mlp", data=FORMS["arrays"], **SETTINGS)


def test_a_stream_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield IDS[0], 0

    monkeypatch.setattr("undrift.data.from_user.ENDLESS", 100)
    with pytest.raises(BadData, match="a stream of more than 100 samples; give one that ends"):
        dataset_from((Endless(), (IDS, LABELS)))


def test_arrays_on_disk_are_not_read_into_memory(tmp_path: Any) -> None:
    """A memory map goes through as it is, so that a CPU reads the samples of a round alone."""
    np.save(tmp_path / "x.npy", IDS)
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    found = dataset_from((x, LABELS, IDS, LABELS)).x_train
    assert isinstance(found, np.ndarray) and np.shares_memory(found, x)
