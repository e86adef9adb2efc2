"""`undrift data`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from undrift import cli


def test_a_partition_is_drawn_and_a_data_set_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNDRIFT_DATA", raising=False)
    assert cli.main(["data", "show", "digits", "--clients", "20", "--out", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["data", "prepare", "digits", "--out", str(tmp_path / "digits.npz")]) == 0
    assert np.load(tmp_path / "digits.npz")["x_train"].shape == (1438, 8, 8, 1)
    assert cli.main(["data", "prepare", "digits", "--out", str(tmp_path / "digits.npz")]) == 2
    assert "exists already" in capsys.readouterr().err
