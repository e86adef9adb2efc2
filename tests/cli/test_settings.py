"""Flags beside a file of settings."""

from __future__ import annotations

import tomllib
from pathlib import Path

from undrift import cli


def test_flags_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'rounds = 2\nclients = 9\ncohort = 3\nmodel = "logreg"\nepochs = 1.0\n[set]\nlr = 0.3\n'
    )
    code = cli.main(
        f"run {tmp_path / 'c.toml'} --clients 8 --steps 2 --set weight_decay=0.01 --out {tmp_path / 'o'}".split()
    )
    stored = tomllib.loads((tmp_path / "o/run.toml").read_text())
    assert code == 0 and (stored["rounds"], stored["clients"], stored["steps"], stored["epochs"]) == (2, 8, 2, 0.0)
    assert stored["set"]["lr"] == 0.3 and stored["set"]["weight_decay"] == 0.01
