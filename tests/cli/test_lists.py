"""`undrift list` and `cite`."""

from __future__ import annotations

import json

import pytest

from undrift import cli


def test_what_there_is_is_listed_and_cited(capsys: pytest.CaptureFixture[str]) -> None:
    for kind, name in (
        ("algorithms", "gradma-s"),
        ("datasets", "digits"),
        ("models", "resnet20-gn"),
        ("partitions", "dirichlet-balanced"),
    ):
        assert cli.main(["list", kind, "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert name in [entry["name"] for entry in listed] and all(entry["about"] for entry in listed)
        assert cli.main(["list", kind]) == 0
        assert name in capsys.readouterr().out
    assert cli.main(["cite", "gradma-s"]) == 0
    assert "@inproceedings{luo2023gradma" in capsys.readouterr().out
