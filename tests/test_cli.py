"""The command line: lists, citations and data, and flags beside a file of settings."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from undrift import cli


def test_list_cite_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNDRIFT_DATA", raising=False)
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
    assert cli.main(["data", "show", "digits", "--clients", "20", "--out", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["data", "prepare", "digits", "--out", str(tmp_path / "digits.npz")]) == 0
    assert np.load(tmp_path / "digits.npz")["x_train"].shape == (1438, 8, 8, 1)
    assert cli.main(["data", "prepare", "digits", "--out", str(tmp_path / "digits.npz")]) == 2
    assert "exists already" in capsys.readouterr().err


QUICK = """
import sys
from undrift import cli

for command in sys.argv[1:]:
    try:
        code = cli.main(command.split())
    except SystemExit as end:  # argparse's own
        code = end.code
    print(">", command, code, sorted({"torch", "numpy", "rich"} & {*sys.modules}))
"""


def test_help_lists_and_citations_import_neither_pytorch_nor_numpy() -> None:
    helps = [f"{name} --help" for name, (_, _, _, aliases) in cli.COMMANDS.items() for name in (name, *aliases)]
    lists = [f"list {kind}{json}" for kind in cli.KINDS for json in ("", " --json")]
    commands = ["--help", "--version", *helps, *lists, "cite gradma-s", "cite def+gradma", "list models"]
    wrong = ["cite gradme", "list algorithm", "run --algoritm fedavg", "ruin"]
    done = subprocess.run([sys.executable, "-c", QUICK, *commands, *wrong], capture_output=True, text=True, check=True)
    said = [line for line in done.stdout.splitlines() if line.startswith(">")]
    assert said == [f"> {command} {2 if command in wrong else 0} []" for command in (*commands, *wrong)]
    assert "did you mean 'gradma'?" in done.stderr and "did you mean '--algorithm'?" in done.stderr


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
