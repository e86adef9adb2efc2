"""The examples run as their readers would run them, print a result, and do what they say."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import undrift
from undrift.algorithms.fedavgm import FedAvgM

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "undrift" / "jobs" / "suites" / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
NAMESPACES = ROOT / "benchmarks" / "namespaces.py"  # needs root
SMALL: dict[str, Any] = {"clients": 10, "cohort": 3, "rounds": 3, "model": "logreg", "dtype": "float64"}


def command(*arguments: str, cwd: Path) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun(*arguments: str, cwd: Path) -> str:
    """The command on two ranks. On a busy machine one of twenty aborts when Python ends, after all was done: again, then."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    for _ in range(2):
        try:
            return command(*launch, cwd=cwd)
        except AssertionError as error:
            if "terminate called without an active exception" not in str(error):
                raise
    return command(*launch, cwd=cwd)


def my_algorithm() -> Any:
    spec = importlib.util.spec_from_file_location("my_algorithm", FOLDER / "my_algorithm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_algorithm"] = module
    spec.loader.exec_module(module)
    return module


def trained(algorithm: Any, **settings: Any) -> Tensor:
    result = undrift.run(algorithm=algorithm, **(SMALL | {"execution": "stacked"} | settings))
    return torch.cat([tensor.flatten() for tensor in result.model.values()])


def test_there_are_examples() -> None:
    assert {"ddp_def.py", "my_algorithm.py", "own_model_and_data.py"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_runs_and_prints_a_result(path: Path, tmp_path: Path) -> None:
    printed = command(str(path), cwd=tmp_path)
    numbers = [float(n) for n in re.findall(r"(?:accuracy|loss) (\d+\.\d+)", printed)]
    assert numbers
    assert max(numbers) > 0.5  # all are two- or ten-class tasks that are learnt within seconds


@pytest.mark.system
def test_a_federation_in_namespaces(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    if os.geteuid() or not shutil.which("tc"):
        with pytest.raises(AssertionError, match="need root"):
            command(str(NAMESPACES), cwd=tmp_path)
        return
    printed = command(str(NAMESPACES), cwd=tmp_path)
    accuracy = re.search(r"4 clients behind 20 Mbit/s, 3 rounds, accuracy (\S+)", printed)
    assert accuracy is not None and float(accuracy[1]) > 0.5
    crossed = re.search(r"([\d,]+) bytes crossed the links", printed)
    assert crossed is not None and int(crossed[1].replace(",", "")) > 3 * 2 * 3_000_000  # 3 rounds, both ways


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


def test_ddp_with_def_on_two_ranks(tmp_path: Path) -> None:
    printed = torchrun(str(FOLDER / "ddp_def.py"), cwd=tmp_path)
    assert "2 ranks, accuracy 0.9" in printed
    assert "1410 bytes sent" in printed  # 12 b (W - 1) / W with b = ceil(15010 / 64): numbers, and the leader's choice


def test_own_algorithm_on_the_command_line(tmp_path: Path) -> None:
    arguments = ["--algorithm", "my_algorithm:NormalisedM", "--rounds", "2", "--out", str(tmp_path / "run")]
    printed = command("-m", "undrift", "run", *arguments, "--model", "logreg", cwd=FOLDER)
    assert "2 rounds, accuracy" in printed
    assert "my_algorithm:NormalisedM" in (tmp_path / "run" / "run.toml").read_text()


def test_own_algorithm_differs_from_fedavg_and_from_its_server_alone() -> None:
    own = trained(my_algorithm().NormalisedM(lr=0.1))
    for other in ("fedavg", FedAvgM(lr=0.1, beta1=0.5)):
        assert (own - trained(other)).abs().max() > 1e-3


def test_own_algorithm_takes_steps_of_equal_length() -> None:
    """One client, one step, no momentum: x moves by exactly lr along the same direction."""
    alone = {"clients": 1, "cohort": 1, "partition": "iid", "steps": 1}
    near, far = (trained(my_algorithm().NormalisedM(lr=lr), **alone, rounds=1) for lr in (0.25, 0.5))
    assert (near - far).norm().item() == pytest.approx(0.25, rel=1e-6)


def test_own_algorithm_stacked_equals_pooled() -> None:
    own = my_algorithm().NormalisedM(lr=0.1)
    assert torch.allclose(trained(own), trained(own, execution="pool"), rtol=0, atol=1e-12)
