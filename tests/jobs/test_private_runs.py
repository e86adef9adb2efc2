"""Private runs by command: repeatable, resumed bit for bit, and no less private afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.small import QUICK, timeless
from undrift import run
from undrift.cli import main
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.round.accounting import Counted, Sampled

PRIVATE: dict[str, Any] = QUICK | {
    "sampling": "bernoulli",
    "privacy_clip": 0.5,
    "privacy_noise": 1.5,
    "checkpoint_every": 2,
}


@pytest.mark.parametrize(
    "method",
    [
        {},
        {"privacy_quantile": 0.5},
        {"algorithm": "fedadam"},
        {"algorithm": "dp-ftrl", "sampling": "fixed", "set": {"tree": 3}},
    ],
    ids=str,
)
def test_a_resumed_private_run_is_the_same_and_has_cost_the_same(method: dict[str, Any], tmp_path: Path) -> None:
    settings = PRIVATE | method
    whole = run(**settings, rounds=6, out=tmp_path / "whole")
    run(**settings, rounds=4, out=tmp_path / "parts")
    parts = run(out=tmp_path / "parts", resume=True, rounds=6)
    assert all(torch.equal(whole.model[name], parts.model[name]) for name in whole.model)
    apart = [[{k: v for k, v in r.items() if k not in ("loss", "accuracy", "forgetting")} for r in timeless(x.records)]
             for x in (whole, parts)]  # fmt: skip
    seen = [[(r["epsilon"], r["train_loss"], r.get("clip")) for r in records] for records in apart]
    assert seen[0] == seen[1]
    spent = [epsilon for epsilon, *_ in seen[0]]
    assert spent == sorted(spent) and 0 < spent[0] < spent[-1]


def test_epsilon_is_that_of_the_settings() -> None:
    records = run(**PRIVATE, rounds=3, privacy_delta=1e-3).records
    ours = Sampled(4 / 12, 1.5, 1e-3)
    for t, record in enumerate(records):
        ours.add(t, torch.zeros(0, dtype=torch.int64).numpy())
        assert record["epsilon"] == ours.epsilon


def test_a_tree_counts_who_was_asked() -> None:
    result = run(**(PRIVATE | {"algorithm": "dp-ftrl", "sampling": "fixed", "cohort": 12}), rounds=4)
    ours = Counted(12, 1024, 1.5, 1e-5)
    for t, record in enumerate(result.records):
        ours.add(t, torch.arange(12).numpy())
        assert record["epsilon"] == ours.epsilon


@pytest.mark.parametrize("name, value", [("privacy_noise", 15.0), ("privacy_clip", 5.0), ("privacy_delta", 0.1)])
def test_privacy_is_frozen(name: str, value: float, tmp_path: Path) -> None:
    run(**PRIVATE, rounds=2, out=tmp_path / "run")
    with pytest.raises(BadRunFolder, match=f"its {name} is {PRIVATE.get(name, 1e-5)}, not {value}"):
        run(out=tmp_path / "run", resume=True, rounds=4, **{name: value})


def test_a_plain_run_cannot_become_private_later(tmp_path: Path) -> None:
    run(**QUICK, sampling="bernoulli", rounds=2, out=tmp_path / "run")
    with pytest.raises(BadRunFolder, match="its privacy_clip is 0.0"):
        run(out=tmp_path / "run", resume=True, rounds=4, privacy_clip=0.5, privacy_noise=1.0)


@pytest.mark.parametrize(
    "settings",
    [{"privacy_clip": 0.0}, {"privacy_noise": 0.0}, {"privacy_clip": -1.0}, {"privacy_noise": float("nan")}],
    ids=str,
)
def test_half_of_privacy_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(BadSetting, match="privacy_clip and privacy_noise must both be above 0"):
        run(**(PRIVATE | settings), rounds=1)


def test_the_command_and_the_report_say_epsilon(tmp_path: Path, capsys: Any) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in PRIVATE.items()]
    assert main(["run", *words, "--rounds=3", "--out", str(tmp_path / "run")]) == 0
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")]) == 0
    assert "epsilon" in (tmp_path / "report.html").read_text()
    assert main(["run", *words, "--algorithm=scaffold", "--out", str(tmp_path / "other")]) == 2
    assert "Scaffold cannot be made private" in capsys.readouterr().err
