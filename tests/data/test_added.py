"""`undrift data add`: arrays get a name, are trained on by it, and what cannot be right is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from undrift import cli
from undrift.core.errors import UndriftError
from undrift.data import load as datasets


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("UNDRIFT_DATA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "undrift"


def arrays(**more: Any) -> dict[str, Any]:
    """Points whose label is the sign of their first number."""
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    return {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]} | more


def save(path: Path, **content: Any) -> Path:
    np.savez(path, **content)
    return path


def test_an_added_set_is_listed_and_learned(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert datasets.data_root() is None
    assert cli.main(["data", "add", "points", str(save(tmp_path / "p.npz", **arrays()))]) == 0
    assert f"written to {home / 'points.npz'}; use it with --dataset points" in capsys.readouterr().out
    data = datasets.load_dataset("points")
    np.testing.assert_array_equal(np.asarray(data.x_train), arrays()["x_train"])
    assert (data.name, data.classes, len(data.y_test)) == ("points", 2, 20)
    assert dict(datasets.available(home))["points"] == "40 training and 20 test samples, 2 classes"
    words = "run --dataset points --model logreg --partition iid --clients 4 --cohort 4 --rounds 20 --lr 0.5 --out"
    assert cli.main([*words.split(), str(tmp_path / "run")]) == 0
    assert "accuracy 1.0000, best" in capsys.readouterr().out
    assert cli.main(["run", "--dataset", "pionts", "--out", str(tmp_path / "none")]) == 2
    assert "did you mean 'points'?" in capsys.readouterr().err
    (tmp_path / "s.toml").write_text('dataset = "points"\nrounds = 1\nclients = 4\ncohort = 4\n[sweep]\nseeds = [0]\n')
    from undrift.jobs.sweep import plan

    assert plan(tmp_path / "s.toml")[0][0].config.dataset == "points"


def test_a_known_set_is_checked_by_its_own_rules(tmp_path: Path, home: Path) -> None:
    pictures = {f"x_{part}": np.zeros((6, 28, 28), np.uint8) for part in ("train", "test")}
    labels = {f"y_{part}": np.arange(6) for part in ("train", "test")}
    datasets.add("mnist", save(tmp_path / "m.npz", **pictures, **labels))
    assert datasets.load_dataset("mnist").classes == 10
    with pytest.raises(UndriftError, match="is there already"):
        datasets.add("mnist", tmp_path / "m.npz")
    with pytest.raises(UndriftError, match="expected labels in y_train within 0..9"):
        datasets.add("fashion-mnist", save(tmp_path / "f.npz", **pictures, **labels | {"y_train": np.arange(6) + 9}))
    assert [file.name for file in home.iterdir()] == ["mnist.npz"]


def test_splits_and_the_folder_of_undrift_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path))
    whole = arrays()
    x, y = (np.concatenate([whole[f"{name}_train"], whole[f"{name}_test"]]) for name in "xy")
    split = np.array(["train"] * 45 + ["test"] * 15)
    assert datasets.add("halves", save(tmp_path / "h.zip.npz", x=x, y=y, split=split)).parent == tmp_path
    assert (len(datasets.load_dataset("halves").y_train), len(datasets.load_dataset("halves").y_test)) == (45, 15)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("Points", {}, "small letters"),
        ("../points", {}, "small letters"),
        ("digits", {}, "not read from digits.npz; choose another name"),
        ("points", {"y_train": np.zeros(3, np.int64)}, "40 inputs but 3 targets|samples"),
        ("points", {"y_test": np.zeros(20, np.float32)}, "expected class labels"),
        ("points", {"x_test": np.zeros((20, 5), np.float32)}, "the test data"),
    ],
)
def test_what_cannot_be_right_is_refused(name: str, content: Any, said: str, tmp_path: Path, home: Path) -> None:
    with pytest.raises(UndriftError, match=said):
        datasets.add(name, save(tmp_path / "bad.npz", **arrays(**content)))
    assert not home.exists()


def test_training_samples_are_not_taken_for_test_samples(tmp_path: Path) -> None:
    whole = arrays()
    with pytest.raises(UndriftError, match="holds no test samples"):
        datasets.add("points", save(tmp_path / "one.npz", x=whole["x_train"], y=whole["y_train"]))
