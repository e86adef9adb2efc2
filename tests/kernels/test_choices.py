"""The fastest form of a kernel is measured once, kept, and taken over by a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from undrift.jobs.run import run
from undrift.kernels import choices

GPU = torch.device("cuda")
FORMS = [(1, 2), (3, 4), (5, 6)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
    """A GPU on which the second form is the fastest; the forms that were timed."""
    timed: list[tuple[int, int]] = []

    def measure(go: object) -> float:
        timed.append(go.args[0])  # type: ignore[attr-defined]
        return {1: 3.0, 3: 1.0, 5: 2.0}[timed[-1][0]]

    monkeypatch.setattr(choices, "measure", measure)
    monkeypatch.setattr(choices, "file", lambda device: tmp_path / "choices.json")
    monkeypatch.setattr(choices, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    choices.read_stored.cache_clear()
    yield timed  # type: ignore[misc]
    choices.read_stored.cache_clear()


def choose() -> tuple[int, int]:
    return choices.choose("product 8x8", FORMS, lambda form: None, GPU)


def test_it_is_measured_once_and_kept_on_disk(clock: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose() == choose() == (3, 4) and clock == FORMS
    monkeypatch.setattr(choices, "_chosen", {})  # another process
    choices.read_stored.cache_clear()
    assert choose() == (3, 4) and clock == FORMS
    assert choices.choices_made() == {"product 8x8": "3x4"}


def test_what_the_resumed_run_had_comes_first(clock: list[tuple[int, int]]) -> None:
    choices.take({"product 8x8": "5x6"})
    assert choose() == (5, 6) and not clock
    choices.take({"product 8x8": "7x7"})  # a form that is no more
    assert choose() == (3, 4) and clock == FORMS


def test_a_folder_keeps_the_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those made after its first round."""
    monkeypatch.setattr(choices, "_chosen", {"early": "1x2"})
    settings = dict(dataset="digits", model="logreg", clients=4, cohort=2, out=tmp_path / "run")

    def later(record: dict[str, object], rounds: int) -> None:
        if record["round"] == 2:
            choices.take({"late": "3x4"})

    run(rounds=3, progress=later, **settings)  # type: ignore[arg-type]
    monkeypatch.setattr(choices, "_chosen", {})
    run(rounds=4, resume=True, out=settings["out"])  # type: ignore[arg-type]
    assert choices.choices_made() == {"early": "1x2", "late": "3x4"}
