"""Times in tests are those of a quiet machine, and longer on a slow one."""

from __future__ import annotations

import pytest

from tests import patience


def test_times_grow_with_the_time_that_a_process_needs_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "slowness", patience.slowness.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setattr(patience, "QUIET", 0.01)  # as if this machine were very much slower than a quiet one
    assert patience.patient(60) > 600
    monkeypatch.setattr(patience, "QUIET", 1e9)
    assert patience.patient(60) == 60
