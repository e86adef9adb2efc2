"""`undrift doctor` says what there is, and its self-test notices what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from undrift import __version__, cli
from undrift.jobs import doctor


def test_a_healthy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros(3))
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path))
    monkeypatch.setenv("UNDRIFT_NATIVE", "0")
    doctor.library.cache_clear()
    try:
        assert cli.main(["doctor"]) == 0
    finally:
        doctor.library.cache_clear()
    said = capsys.readouterr().out
    assert f"undrift        {__version__} in " in said and f"torch {torch.__version__}" in said
    assert "not used, because UNDRIFT_NATIVE is 0" in said and str(tmp_path) in said
    sets = next(line for line in said.splitlines() if line.startswith("data sets"))
    assert "digits (in the package)" in sets and " mnist" in sets and "mine (added)" in sets and "cifar10" not in sets
    assert "self-test      cpu: passed" in said


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda result, how: next(iter(result.model.values())).add_(1e-3 * (how == "debug")), "apart"),
        (lambda result, how: result.records.clear(), "did not learn"),
        (lambda result, how: 1 / 0, "failed with ZeroDivisionError"),
    ],
)
def test_a_machine_that_computes_wrongly_is_noticed(harm: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = doctor.run

    def run(**settings: Any) -> Any:
        result = whole(**settings | {"rounds": 1})
        harm(result, settings["execution"])
        return result

    monkeypatch.setattr(doctor, "run", run)
    monkeypatch.setattr(doctor, "LEARNED", 0.05)
    problem, _ = doctor.self_test("cpu")
    assert said in problem
