"""`undrift.run`: the user's own models, data, losses and algorithms, and when a run stops."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import undrift
from tests.small import QUICK, data, timeless, tiny_mlp
from undrift import cli
from undrift.core.errors import BadData, BadSetting


def test_two_algorithms_with_one_seed_see_the_same_cohorts_and_batches() -> None:
    """Round 1 of SCAFFOLD is FedAvg's; with another seed it is not."""
    losses = [
        undrift.run(algorithm=a, rounds=1, seed=s, set={"lr": 0.1}, **QUICK).records[0]["train_loss"]
        for a, s in (("fedavg", 3), ("scaffold", 3), ("fedavg", 4))
    ]
    assert losses[0] == losses[1] != losses[2]


def test_own_model_and_arrays_with_batchnorm_dropout_and_a_frozen_layer() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    module[0].requires_grad_(False)
    own = data((60, 60, 60))
    result = undrift.run(
        model=module,
        data=(own.x_train, own.y_train, own.x_test, own.y_test),
        clients=3,
        cohort=2,
        partition="iid",
        rounds=20,
        eval_every=1,
        set={"lr": 0.2},
    )
    assert result.records[-1]["train_loss"] < 0.9 * result.records[0]["train_loss"]
    fresh = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    fresh.load_state_dict(result.model)
    assert torch.equal(fresh[0].weight, module[0].weight) and int(fresh[1].num_batches_tracked) > 0
    sent = 16 + 16 + 16 * 3 + 3 + (16 + 16 + 1)  # trainable parameters, and BatchNorm's statistics beside them
    assert result.records[0]["bytes_up"] == 2 * sent * 4


def test_torch_datasets_whole_or_one_a_client() -> None:
    own = data((20, 9, 33))
    x, y = torch.from_numpy(np.asarray(own.x_train)), torch.from_numpy(own.y_train)
    test = TensorDataset(torch.from_numpy(np.asarray(own.x_test)), torch.from_numpy(own.y_test))
    each = [TensorDataset(*(t[torch.from_numpy(own.sites == i)] for t in (x, y))) for i in range(3)]
    a = undrift.run(model=tiny_mlp(), data=(each, test), rounds=3, execution="stacked")
    b = undrift.run(model=tiny_mlp(), data=own, partition="sites", clients=3, cohort=3, rounds=3, execution="stacked")
    assert timeless(a.records) == timeless(b.records) and a.config.clients == 3 and a.config.cohort == 3
    whole = undrift.run(
        model=tiny_mlp(), data=(TensorDataset(x, y), test), partition="iid", clients=5, cohort=5, rounds=2
    )
    assert len(whole.records) == 2


def test_own_loss_and_metrics() -> None:
    random_ = np.random.default_rng(0)
    x = random_.normal(size=(80, 4)).astype(np.float32)
    y = x @ np.array([[1.0], [2.0], [-1.0], [0.5]], dtype=np.float32)
    result = undrift.run(
        model=nn.Linear(4, 1),
        data=(x[:60], y[:60], x[60:], y[60:]),
        loss=F.mse_loss,
        partition="iid",
        clients=4,
        cohort=2,
        rounds=40,
        metrics={"worst": lambda o, t: (o - t).abs().amax(), "error": lambda o, t: (o - t).abs().squeeze(-1)},
        eval_every=1,
    )
    first, last = result.records[0], result.records[-1]
    assert last["loss"] < 1e-3 * first["loss"] and last["accuracy"] is None
    assert 0 < last["error"] < last["worst"] < first["worst"]


def test_a_field_that_the_base_optimizer_does_not_read_is_said(tmp_path: Path) -> None:
    quick = {"clients": 4, "cohort": 2, "rounds": 1, "model": "logreg"}
    with pytest.warns(UserWarning, match="momentum has no effect with optimizer=sgd; set optimizer too"):
        undrift.run(quick, set={"momentum": 0.9}, out=tmp_path / "run")
    undrift.run(resume=True, out=tmp_path / "run", rounds=2)  # whose file has all fields
    undrift.run(quick, set={"momentum": 0.9, "optimizer": "momentum"})
    undrift.run(quick, set={"momentum": 0.9, "momentum2": 0.99, "epsilon": 1e-3, "optimizer": "adam"})


def test_validation_split_is_held_out_and_scored() -> None:
    result = undrift.run(rounds=3, val_fraction=0.2, **QUICK)
    assert 0 <= result.records[-1]["val_accuracy"] <= 1 and result.records[-1]["val_loss"] > 0
    from undrift.data.federation import federate
    from undrift.data.load import load_dataset

    fed = federate(load_dataset("digits"), "iid", 10, 0, torch.device("cpu"), 0.2)
    assert len(fed.validation) == round(0.2 * 1438)
    assert not set(fed.validation) & set(fed.members.tolist()) and len(fed.members) + len(fed.validation) == 1438


def test_stop_at_accuracy_and_time(tmp_path: Path) -> None:
    by_accuracy = undrift.run(rounds=400, stop_at="accuracy=0.5", **(QUICK | {"eval_every": 1}))
    assert by_accuracy.stopped == "accuracy" and by_accuracy.accuracy >= 0.5 and len(by_accuracy.records) < 400
    by_time = undrift.run(rounds=10**6, stop_at="time=1s", out=tmp_path / "t", **QUICK)
    assert by_time.stopped == "time" and 1 < len(by_time.records) < 10**6
    assert (tmp_path / "t/model.safetensors").exists()


def test_own_algorithm_class_object_and_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from undrift.algorithms.fedprox import FedProx

    by_object = undrift.run(algorithm=FedProx(mu=0.3), rounds=2, **QUICK)
    by_name = undrift.run(algorithm="fedprox", set={"mu": 0.3}, rounds=2, **QUICK)
    assert timeless(by_object.records) == timeless(by_name.records) and by_object.config == by_name.config
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom torch import nn\nfrom undrift.algorithms.fedprox import FedProx as Mine\n"
        "def net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], classes))\n"
        "def arrays():\n    r = np.random.default_rng(0)\n    x = r.normal(size=(90, 6)); y = (x[:, 0] > 0).astype(int)\n"
        "    return x[:60], y[:60], x[60:], y[60:]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = cli.main(
        [
            "run",
            "--algorithm",
            "mine:Mine",
            "--model",
            "mine:net",
            "--dataset",
            "mine:arrays",
            "--partition",
            "iid",
            "--clients",
            "6",
            "--cohort",
            "3",
            "--rounds",
            "5",
            "--set",
            "mu=0.2",
            "--out",
            "o",
        ]
    )
    assert code == 0
    stored = tomllib.loads((tmp_path / "o/run.toml").read_text())
    assert stored["algorithm"] == "mine:Mine" and stored["set"]["mu"] == 0.2


def test_an_image_folder_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are read for the batches that need them, ahead of time, and never held whole."""
    from PIL import Image

    from undrift.data._image_files import ImageFiles

    random_ = np.random.default_rng(0)
    for part, count in (("train", 9), ("val", 3)):
        for label in ("cat", "dog"):
            (tmp_path / part / label).mkdir(parents=True)
            for n in range(count):
                pixels = random_.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / label / f"{n}.png")
    taken: list[int] = []
    ahead: list[int] = []
    take, prefetch = ImageFiles.__getitem__, ImageFiles.prefetch
    monkeypatch.setattr(ImageFiles, "__getitem__", lambda self, index: taken.append(len(index)) or take(self, index))
    monkeypatch.setattr(ImageFiles, "prefetch", lambda self, index: ahead.append(len(index)) or prefetch(self, index))
    settings = {"dataset": f"imagefolder:{tmp_path}", "model": "logreg", "partition": "iid", "clients": 3, "cohort": 2}
    result = undrift.run(settings, rounds=2, steps=2, batch=3, set={"lr": 0.001}, execution="stacked")
    assert result.model["head.1.weight"].shape[1] == 3 * 224 * 224
    assert taken.pop() == 18, "the clients' scores of the last round"
    assert max(taken) == 6 and ahead and max(ahead) == 6, "two clients with batches of three, not the eighteen pictures"


def test_models_by_function_and_odd_models() -> None:
    own, federation = data((30, 30)), {"partition": "sites", "clients": 2, "cohort": 2, "rounds": 1}
    by_function = undrift.run(federation, model=lambda shape, classes: nn.Linear(shape[0], classes), data=own)
    assert by_function.model["weight"].shape == (3, 5)
    with pytest.raises(BadSetting, match="must return one tensor"):
        undrift.run(federation, model=TwoOutputs(), data=own)
    with pytest.raises(BadSetting, match="failed on samples of shape"):
        undrift.run(federation, model=nn.Linear(4, 3), data=own)
    with pytest.raises(BadSetting, match="not both"):
        undrift.run(federation, model=tiny_mlp(), data=own, dataset="digits")
    with pytest.raises(BadSetting, match="track_running_stats"):
        undrift.run(
            federation, model=nn.Sequential(nn.InstanceNorm1d(5, track_running_stats=True), tiny_mlp()), data=own
        )
    labels = np.asarray(own.y_train) + 1
    with pytest.raises(BadData, match="labels run from 0 to 3"):
        undrift.run(
            federation | {"partition": "iid"}, model=tiny_mlp(), data=(own.x_train, labels, own.x_test, own.y_test)
        )
    with pytest.raises(BadData, match="must be numbers"):
        undrift.run(federation, model=tiny_mlp(), data=(np.array([["a"]]), [0], np.array([["a"]]), [0]))
    without_test = undrift.run(
        federation | {"partition": "iid"},
        model=tiny_mlp(),
        data=(own.x_train, own.y_train, own.x_test[:0], own.y_test[:0]),
    )
    assert without_test.records[-1]["loss"] is None


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_mlp()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x), x


def test_token_ids_are_not_pictures() -> None:
    random_ = np.random.default_rng(0)
    x, y = random_.integers(0, 50, (40, 7), dtype=np.uint8), random_.integers(0, 3, 40)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(56, 3))
    assert (
        undrift.run(
            model=model, data=(x[:30], y[:30], x[30:], y[30:]), partition="iid", clients=3, cohort=2, rounds=2
        ).accuracy
        is not None
    )
