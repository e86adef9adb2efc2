"""The run folder: what a run leaves there, and when it is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import undrift
from tests.small import QUICK, timeless
from undrift.core.errors import BadRunFolder

FIELDS = {"round", "loss", "accuracy", "bytes_down", "bytes_up", "gradients", "consistency", "seconds"}


def test_a_run_leaves_its_folder(tmp_path: Path) -> None:
    result = undrift.run(algorithm="fedprox", out=tmp_path / "run", rounds=4, set={"mu": 0.5}, **QUICK)
    settings = tomllib.loads((tmp_path / "run/run.toml").read_text())
    assert settings["algorithm"] == "fedprox" and settings["set"]["mu"] == 0.5 and settings["set"]["lr"] == 0.1
    assert settings["made"]["torch"] == torch.__version__ and settings["execution"] == "stacked"
    lines = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert [r["round"] for r in lines] == [1, 2, 3, 4] and lines[0].keys() >= FIELDS
    assert [r["accuracy"] is not None for r in lines] == [False, False, True, True]  # every third, and the last
    assert timeless(lines) == timeless(result.records)
    assert all(re.fullmatch("[0-9a-f]{8}", line["check"]) for line in lines)
    stored = load_file(tmp_path / "run/model.safetensors")
    assert stored.keys() == result.model.keys() == {"head.1.weight", "head.1.bias"}
    assert all(torch.equal(stored[n], t) for n, t in result.model.items())
    again = undrift.run(tmp_path / "run/run.toml", out=tmp_path / "again")
    assert timeless(again.records) == timeless(lines), "run.toml is a configuration too"


def test_an_out_that_holds_another_run_is_left_alone(tmp_path: Path) -> None:
    undrift.run(QUICK | {"rounds": 2}, out=tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(BadRunFolder, match="holds a run already"):
        undrift.run(QUICK | {"rounds": 2}, out=tmp_path)
    with pytest.raises(BadRunFolder, match="its seed is 0, not 9"):
        undrift.run(out=tmp_path, resume=True, seed=9)
    with pytest.raises(BadRunFolder, match="its lr is 0.1, not 0.3"):
        undrift.run(out=tmp_path, resume=True, set={"lr": 0.3})
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("harm", ["flip", "truncate", "json", "gone", "rounds", "toml"])
def test_a_damaged_checkpoint_is_refused_and_kept(harm: str, tmp_path: Path) -> None:
    undrift.run(QUICK | {"rounds": 3}, out=tmp_path)
    tensors = tmp_path / "checkpoint/round-000003.safetensors"
    content = tensors.read_bytes()
    if harm == "flip":
        tensors.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif harm == "truncate":
        tensors.write_bytes(content[:100])
    elif harm == "gone":
        tensors.unlink()
    elif harm == "json":
        (tmp_path / "checkpoint/round-000003.json").write_text('{"round": 3')
    elif harm == "rounds":
        (tmp_path / "rounds.jsonl").write_text("")
    else:
        (tmp_path / "run.toml").write_text("algorithm = ")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(BadRunFolder):
        undrift.run(out=tmp_path, resume=True, rounds=5)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_two_processes_cannot_run_in_one_folder(tmp_path: Path) -> None:
    from undrift.jobs.folder import RunFolder

    undrift.run(QUICK | {"rounds": 2}, out=tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys,time\nfrom pathlib import Path\nfrom undrift.jobs.folder import RunFolder\n"
         "with RunFolder(Path(sys.argv[1])).locking():\n    print('held', flush=True)\n    time.sleep(60)", str(tmp_path)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(BadRunFolder, match="another process"):
            undrift.run(out=tmp_path, resume=True, rounds=4)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()  # type: ignore[union-attr]
    with RunFolder(tmp_path).locking():
        pass
