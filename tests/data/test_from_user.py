"""The user's data: every accepted form holds all samples, and what could be read in two ways is refused in one line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torch.utils.data import Dataset as TorchDataset

import undrift
from tests.small import tiny_mlp
from undrift.core.errors import BadData, BadSetting
from undrift.data.dataset import Dataset
from undrift.data.from_user import dataset_from

random = np.random.default_rng(0)
X, Y = random.normal(size=(40, 5)).astype(np.float32), random.integers(0, 3, 40)
SIZES = (25, 15)
TEST = X[:6], Y[:6]


def samples(x: Any, y: Any) -> list[tuple[Any, Any]]:
    return list(zip(x, y, strict=True))


def of_clients(make: Any) -> list[Any]:
    """One part per client, made of its arrays."""
    return [make(X[:25], Y[:25]), make(X[25:], Y[25:])]


def tensors(x: Any, y: Any) -> TensorDataset:
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


WHOLE: dict[str, Any] = {
    "arrays": (X, Y, *TEST),
    "lists": (X.tolist(), Y.tolist(), X[:6].tolist(), Y[:6].tolist()),
    "a list of arrays": [X, Y, *TEST],
    "a mapping": {"x_train": X, "y_train": Y, "x_test": X[:6], "y_test": Y[:6]},
    "pairs": ((X, Y), TEST),
    "pairs of lists": ((X.tolist(), Y.tolist()), TEST),
    "torch Datasets": (tensors(X, Y), tensors(*TEST)),
    "samples": (samples(X, Y), samples(*TEST)),
    "samples of tensors": (samples(torch.from_numpy(X), torch.from_numpy(Y)), TEST),
    "a Dataset": Dataset("own", X, Y, *TEST, 3),
}
CLIENTS: dict[str, Any] = {
    "pairs": (of_clients(lambda x, y: (x, y)), TEST),
    "pairs in a tuple": (tuple(of_clients(lambda x, y: (x, y))), TEST),
    "pairs of lists": (of_clients(lambda x, y: (x.tolist(), y.tolist())), TEST),
    "torch Datasets": (of_clients(tensors), tensors(*TEST)),
    "samples": (of_clients(samples), samples(*TEST)),
    "samples in a tuple": (tuple(of_clients(samples)), TEST),
    "samples of plain numbers": (of_clients(lambda x, y: samples(x.tolist(), y.tolist())), TEST),
    "one client of each kind": ([samples(X[:25], Y[:25]), tensors(X[25:], Y[25:])], TEST),
}


@pytest.mark.parametrize("form", WHOLE)
def test_a_whole_data_set_is_read_in_every_form(form: str) -> None:
    data = dataset_from(WHOLE[form])
    assert np.allclose(np.asarray(data.x_train), X) and data.y_train.tolist() == Y.tolist()
    assert len(data.x_test) == len(data.y_test) == 6 and data.classes == 3 and data.sites is None


@pytest.mark.parametrize("form", CLIENTS)
def test_clients_are_read_in_every_form(form: str) -> None:
    data = dataset_from(CLIENTS[form])
    assert np.allclose(np.asarray(data.x_train), X) and data.y_train.tolist() == Y.tolist()
    assert data.sites is not None and np.bincount(data.sites).tolist() == list(SIZES) and data.classes == 3


def test_a_run_says_what_it_found(tmp_path: Path) -> None:
    """640 samples in lists of (x, y) are 640 samples, not the first two of each client."""
    x, y = torch.randn(640, 5), torch.arange(640) % 3
    clients = [samples(x[n::8], y[n::8]) for n in range(8)]
    result = undrift.run(model=tiny_mlp(), data=(clients, (x[:16], y[:16])), rounds=1, steps=1, out=tmp_path)
    found = {"samples": 640, "clients": 8, "test_samples": 16, "inputs": [5], "classes": 3}
    assert found.items() <= result.about.items()
    assert found.items() <= tomllib.loads((tmp_path / "run.toml").read_text())["made"].items()
    assert result.about["execution"] in ("stacked", "pool")


class Dicts(TorchDataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": X[i], "y": Y[i]}


class Failing(Dicts):
    def __getitem__(self, i: int) -> Any:
        raise OSError("the file is gone")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(samples(X, Y))

    def __len__(self) -> int:
        return len(X)


BAD: dict[str, tuple[Any, str]] = {
    "a list of batches": ([samples(X.reshape(4, 10, 5), Y.reshape(4, 10))], "samples, or batches"),
    "arrays in a list": ([[X, Y]], "client 0 is a list of 2 .ndarray, ndarray."),
    "lists of rows": ([[[1.0, 0], [2.0, 1]]], "client 0 is a list of 2 .list, list."),
    "a tuple of samples": ([((1.0, 0), (2.0, 1))], "client 0 is a tuple of 2 .tuple, tuple."),
    "an array alone": (X[:, :2], "the training data is an array .40, 2."),
    "clients that are arrays": ([X, X], "client 0 is an array"),
    "three arrays": ([(X, Y, Y)], "client 0 is a tuple of 3"),
    "a client without samples": ([(X, Y), []], "client 1 has no samples"),
    "a client of no rows": ([(X, Y), (X[:0], Y[:0])], "client 1 has no samples"),
    "no clients": ([], "has no samples"),
    "too few targets": ([(X, Y), (X, Y[:3])], "40 inputs but 3 targets of client 1"),
    "dictionaries": ([Dicts()], "client 0: sample 0 is a dict, not .input, target."),
    "a Dataset that fails": (Failing(), "sample 0 failed: OSError: the file is gone"),
    "a loader with a sampler": (
        DataLoader(tensors(X, Y), sampler=WeightedRandomSampler([1.0] * 40, 40)),
        "the training data is a DataLoader with a WeightedRandomSampler",
    ),
    "a generator": ((s for s in samples(X, Y)), "the training data is a generator"),
    "a mapping as a part": ({"x": X, "y": Y}, r"the training data is a mapping of 'x', 'y'; give a tuple"),
    "two inputs of another kind than the test's": (
        [((X[0], X[1]), 0), ((X[2], X[3]), 1)],
        "the inputs of the training data are .*'0', .*'1', .*those of the test data .5. of float32",
    ),
    "inputs that are no numbers": (((X, np.array(["a"] * 40)), Y), "part 1 of the inputs must be numbers"),
    "parts of other lengths": (((X, X[:7]), Y), "the parts of the inputs have 7 and 40 rows"),
    "samples of other parts": (
        [({"ids": X[0]}, 0), ({"mask": X[0]}, 0)],
        "the parts of input 0 are .*ids.*, those of input 1 .*mask",
    ),
    "channels first": ((np.zeros((40, 3, 8, 8), np.uint8), Y), "move the channels to the end"),
    "text": ("train.csv", "the training data is a str"),
    "pictures and floats": ([(X, Y), ((X * 0).astype(np.uint8), Y)], r"inputs of client 0 are \[5\] of float32"),
    "other shapes": ([(X, Y), (X[:, :3], Y)], r"those of client 1 \[3\] of float32"),
    "ragged samples": ([(X[0], 0), (X[0, :3], 1)], r"input 0 has the shape \[5\], input 1 \[3\]"),
    "ragged lists": ((([[1.0, 2.0], [3.0]]), [0, 1]), "no array can be made"),
}


@pytest.mark.parametrize("form", BAD)
def test_what_is_ambiguous_is_refused_in_one_line(form: str) -> None:
    train, why = BAD[form]
    with pytest.raises(BadData, match=why) as refused:
        dataset_from((train, TEST))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("data", [[(X, Y), TEST], [X, Y], (X, Y, X), ((X, Y),) * 4, X, None, "digits"])
def test_what_is_neither_form_is_refused(data: Any) -> None:
    with pytest.raises(BadData, match="data must be"):
        dataset_from(data)


def test_test_data_of_another_kind_are_refused() -> None:
    with pytest.raises(BadData, match=r"targets of the training data are \[\] of int64, those of the test data"):
        dataset_from((X, Y, X[:6], Y[:6].astype(np.float32)))
    with pytest.raises(BadData, match="40 inputs but 39 targets"):
        dataset_from(Dataset("own", X, Y[:39], *TEST, 3))


def test_samples_with_masks_are_samples() -> None:
    pictures = [(np.zeros((1, 4, 4)), np.ones((4, 4), np.int64)) for _ in range(3)]
    data = dataset_from(([pictures], pictures))
    assert np.asarray(data.x_train).shape == (3, 1, 4, 4) and data.y_train.shape == (3, 4, 4)


@pytest.mark.parametrize("data", [(X, Y), tensors(X, Y), DataLoader(tensors(X, Y))])
def test_training_data_alone_are_said_to_lack_test_samples(data: Any) -> None:
    with pytest.raises(BadData, match=r"has no test samples; give data=\(x_train, y_train, x_test, y_test\)"):
        dataset_from(data)


def test_grey_bytes_are_pictures() -> None:
    grey = (np.arange(40 * 16) % 256).astype(np.uint8).reshape(40, 4, 4)
    found = dataset_from((grey, Y, grey[:6], Y[:6]))
    assert np.asarray(found.x_train).shape == (40, 4, 4, 1) and np.asarray(found.x_test).shape == (6, 4, 4, 1)
    run = undrift.run(data=(grey, Y, grey[:6], Y[:6]), model="logreg", partition="iid", clients=2, cohort=2, rounds=1)
    assert run.about["inputs"] == [1, 4, 4]


class Drawn(TorchDataset[Any]):
    """A torch Dataset that turns its samples at random."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((5,), float(i)) * torch.randn(()).sign(), i % 3


def test_a_dataset_that_draws_at_random_is_warned_of() -> None:
    """It is read once, so that what it draws stays the same in all rounds."""
    test = (np.zeros((2, 5)), [0, 1])
    with pytest.warns(UserWarning, match="the training data gives another sample . each time it is asked"):
        dataset_from((Drawn(), test))
    with pytest.warns(UserWarning, match="client 1 gives another sample"):
        dataset_from(([TensorDataset(torch.zeros(9, 5), torch.arange(9)), Drawn()], test))


def tokens(rows: int = 12) -> tuple[Any, Any]:
    ids = np.random.default_rng(0).integers(0, 7, (rows, 6))
    ids[0, 0] = 8  # which is never said, only read
    return ids[:, :-1], np.where(ids[:, 1:] > 5, -100, ids[:, 1:])


def test_token_labels_give_a_named_model_its_vocabulary() -> None:
    x, y = tokens()
    assert dataset_from((x, y, x, y)).classes == 9
    result = undrift.run(
        model="gpt(depth=1,width=8,heads=2)", data=(x, y, x, y), partition="iid", clients=2, cohort=2, rounds=1, batch=2
    )
    assert result.model["tokens.weight" if "tokens.weight" in result.model else "embedding.tokens.weight"].shape == (
        9,
        8,
    )


def test_a_named_model_needs_classes() -> None:
    x, y = np.zeros((8, 3), np.float32), np.zeros((8, 2), np.float32)
    with pytest.raises(
        BadSetting, match="the data have no classes, from which mlp would take its outputs; give a model of yours"
    ):
        undrift.run(
            model="mlp", data=(x, y, x, y), partition="iid", clients=2, cohort=2, rounds=1, loss=torch.nn.MSELoss()
        )


def test_training_labels_that_are_all_left_out_are_refused() -> None:
    x, y = tokens()
    for test in (y, np.full_like(y, -100)):
        with pytest.raises(BadData, match="no label of the training samples counts: all are -100"):
            undrift.run(
                model="gpt(depth=1,width=8,heads=2)",
                data=(x, np.full_like(y, -100), x, test),
                partition="iid",
                clients=2,
                cohort=2,
                rounds=1,
            )
