"""`undrift dp` with simulated workers: its settings, runs, folders, sweeps and report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from undrift import cli
from undrift.core.errors import BadRunFolder, BadSetting, UndriftError, UnknownName
from undrift.data.dataset import Dataset
from undrift.dataparallel.command import from_mapping, resolve, run_parallel
from undrift.dataparallel.parallel_config import ParallelConfig
from undrift.dataparallel.training import ParallelTraining
from undrift.jobs.course import Result
from undrift.jobs.folder import RunFolder
from undrift.jobs.sweep import plan


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


SMALL = {"workers": 3, "batch": 4, "steps": 4, "rounds": 4, "dtype": "float64", "ratio": 8, "seed": 1, "lr": 0.05}
OWN = {"model": f"{__name__}:normed", "dataset": f"{__name__}:pictures"}


def trained(out: Path | None = None, **settings: Any) -> Result:
    return run_parallel(out=out, **(SMALL | settings))


def test_what_is_compiled_is_the_iteration_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traced graph, run as it is, with BatchNorm, dropout and crops."""
    traced: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda graph, **how: traced.append(graph) or graph)
    how = OWN | {"execution": "stacked"}
    plain, compiled = (ParallelTraining(resolve(from_mapping(SMALL | how | {"replay": True}))) for _ in range(2))
    compiled.compile = True  # which on a CPU is never asked for
    for training in (plain, compiled):
        training.rounds(2)
        training.rounds(1)
    assert traced and torch.equal(plain.z, compiled.z) and torch.equal(plain.buffers, compiled.buffers)
    assert not torch.equal(plain.z[0], plain.z[1])


@pytest.mark.parametrize(
    "name", ["sgd", "adamw", "ef", "saef", "psync", "ef21", "ef21-sgdm", "def", "def-a", "def-adamw"]
)
def test_stacked_workers_equal_workers_in_turn(name: str) -> None:
    """Also with BatchNorm, whose statistics are each worker's own, dropout and samples that are cropped."""
    how = OWN | {"method": name, "epsilon": 1e-3}  # a bias before BatchNorm has rounding for a gradient
    stacked, turns = (trained(execution=e, **how) for e in ("stacked", "pool"))
    replayed = trained(execution="stacked", replay=True, **how)
    assert all(torch.equal(tensor, replayed.model[key]) for key, tensor in stacked.model.items())
    for key, tensor in stacked.model.items():
        assert apart(tensor.double(), turns.model[key].double()) < 1e-11, key
    assert stacked.records[-1]["train_loss"] == pytest.approx(turns.records[-1]["train_loss"], rel=1e-11)
    assert apart(stacked.model["1.running_mean"], torch.zeros(6)) > 0.01, "statistics were kept"


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    first = nn.Conv2d(shape[0], 6, 3)
    return nn.Sequential(first, nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(216, classes))


def pictures() -> Dataset:
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (60, 8, 8, 1), dtype=np.uint8), random.integers(0, 3, 60)
    return Dataset("pictures", x, y, x[:20], y[:20], 3, (0.5,), (0.3,), crop=1, flip=True)


def test_every_method_learns_and_methods_differ() -> None:
    names = ("sgd", "ef", "saef", "psync", "ef21", "ef21-sgdm", "def", "def-a")
    settings = dict(steps=20, rounds=6, lr=0.1, dtype="float32")
    results = {name: trained(method=name, momentum=0.0, **settings) for name in names}
    for name, result in results.items():
        losses = [r["train_loss"] for r in result.records]
        assert name.startswith("ef21") or losses[-1] < 0.8 * losses[0], name  # with RBGS it does not converge
    last = {name: result.records[-1]["loss"] for name, result in results.items()}
    assert last.pop("ef21-sgdm") == last["ef21"], "without momentum they are one"
    assert len(set(last.values())) == len(names) - 1
    assert results["def-a"].records[-1]["x_loss"] == last["def-a"], "DEF-A's model is x"
    assert (
        results["def"].records[-1]["x_loss"] == last["def-a"] and results["def-a"].records[-1]["y_loss"] == last["def"]
    )
    assert results["psync"].records[-1]["x_loss"] == last["saef"], "PSync and SAEF walk the same path"


def test_topk_leaves_the_padding_of_a_vector_out() -> None:
    """The 650 parameters of logreg are padded to 656."""
    assert trained(compressor="topk", model="logreg").records[-1]["bytes_up"] > 0


def test_workers_share_every_pass_and_another_pass_is_dealt_anew() -> None:
    training = ParallelTraining(resolve(from_mapping({"workers": 3, "batch": 5})))
    members = set(training.data.members.tolist())
    first = torch.stack([training.rows(t) for t in range(training.per_pass)])
    assert first.shape[1:] == (3, 5) and len(set(first.flatten().tolist())) == first.numel()
    assert set(first.flatten().tolist()) <= members and len(members) - first.numel() < 15
    assert not torch.equal(first[0], training.rows(training.per_pass))
    assert torch.equal(first[0], training.rows(0))


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The checkpoint of round 2 and the records up to round 3, as a kill leaves them."""
    whole = trained(tmp_path / "whole", lam="auto", rounds=5, checkpoint_every=2)
    trained(tmp_path / "cut", lam="auto", rounds=2, checkpoint_every=2)
    with (tmp_path / "cut" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "los')
    result = run_parallel(out=tmp_path / "cut", resume=True, rounds=5)
    assert all(torch.equal(tensor, whole.model[name]) for name, tensor in result.model.items())
    assert [r["train_loss"] for r in result.records] == [r["train_loss"] for r in whole.records]
    assert 0.0 < whole.records[-1]["lambda"] < 1.0
    with pytest.raises(BadRunFolder, match="its ratio is 8.0, not 9.0"):
        run_parallel(out=tmp_path / "cut", resume=True, ratio=9)
    with pytest.raises(BadRunFolder, match="its workers is 3, not 4"):
        run_parallel(out=tmp_path / "cut", resume=True, workers=4)


@pytest.mark.parametrize(
    "settings", [{"method": "sgd", "ratio": 64.0}, {"method": "ef", "lam": "0.3"}, {"lam": "0.30"}]
)
def test_the_same_command_goes_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A run keeps the ratio and lambda that its method settles, which must not make the command another one."""
    trained(tmp_path / "run", rounds=1, **settings)
    assert len(run_parallel(out=tmp_path / "run", resume=True, **(settings | {"rounds": 2})).records) == 2


def test_a_run_that_diverges_ends(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the training loss is not finite: the run has diverged"):
        result = trained(tmp_path / "run", lr=1e29, rounds=50)
    assert result.stopped == "diverged" and len(result.records) < 10
    assert RunFolder(tmp_path / "run").is_finished()


def test_statistics_are_taken_anew_at_the_tested_weights() -> None:
    how = OWN | {"lr": 0.2}
    kept_, anew = trained(**how), trained(statistics=2, **how)
    assert kept_.records[-1]["train_loss"] == anew.records[-1]["train_loss"]
    assert kept_.records[-1]["loss"] != anew.records[-1]["loss"]


def test_a_sweep_of_methods_and_its_report(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(
        'model = "logreg"\nworkers = 2\nrounds = 2\nsteps = 3\nlr = 0.02\n[sweep]\nmethods = ["sgd", "def"]\n'
        '[sweep.only.def]\nlam = [0.3, "auto"]\nratio = 16\n'
    )
    command = ["sweep", str(tmp_path / "sweep.toml"), "--out", str(tmp_path / "runs"), "--processes", "1"]
    assert cli.main(command) == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert names == ["def-lam=0.3-seed=0", "def-lam=auto-seed=0", "sgd-seed=0"]
    page = (tmp_path / "runs" / "report.html").read_text()
    assert "undrift dp " in page and "lam=auto" in page and "digits, logreg" in page and "unset" not in page
    (tmp_path / "typo.toml").write_text('[sweep]\nmethods = ["dev"]\n')
    with pytest.raises(UnknownName, match="did you mean 'def'"):
        plan(tmp_path / "typo.toml")
    (tmp_path / "both.toml").write_text('[sweep]\nmethods = ["def"]\nalgorithms = ["fedavg"]\n')
    with pytest.raises(BadSetting, match="not both"):
        plan(tmp_path / "both.toml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "eff"}, "did you mean 'ef'"),
        ({"lam": "half"}, "lam must lie in [0, 1] or be 'auto', not 'half'"),
        ({"lam": 2}, "lam must lie in [0, 1]"),
        ({"workers": 1000}, "need 4000 training samples at least"),
        ({"average_every": 5}, "average_every is SAEF's"),
        ({"ratio": 0.1}, "ratio must be a number of at least 1"),
        ({"worker": 3}, "did you mean 'workers'"),
        ({"set": {"mu": 1}}, "unknown field of def 'mu'"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UndriftError) as told:
        trained(**settings)
    assert message in str(told.value)


def test_def_and_its_kin_have_leaders_unless_told_otherwise() -> None:
    found = {
        method: ParallelConfig(method=method).compressor
        for method in ("def", "def-a", "def-adamw", "ef", "ef21", "sgd")
    }
    assert found == {
        "def": "leader",
        "def-a": "leader",
        "def-adamw": "leader",
        "ef": "rbgs",
        "ef21": "rbgs",
        "sgd": "rbgs",
    }
    assert ParallelConfig(compressor="rbgs").compressor == "rbgs"
    with pytest.raises(BadSetting, match="has none; use flat or tensor, or compressor rbgs"):
        ParallelConfig(block="shuffle")
