"""What is built installs and works: the wheel in an environment of its own, away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from undrift import __version__

ROOT = Path(__file__).parent.parent
EXTRAS = (  # what a plain installation does not bring
    "cryptography", "datasets", "dp_accounting", "flwr", "IPython", "mkdocs", "pandas", "playwright", "pytest", "scipy",
    "sklearn", "starlette", "tensorboard", "torchmetrics", "triton", "uvicorn",
)  # fmt: skip


def call(*command: object, cwd: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=kept | environment, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and the wheel that is built from it; without a network."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


def test_both_have_one_version_and_pass_twine(built: Path) -> None:
    assert {file.name for file in built.iterdir()} == {
        f"undrift-{__version__}.tar.gz",
        f"undrift-{__version__}-py3-none-any.whl",
    }
    call(sys.executable, "-m", "twine", "check", "--strict", *sorted(built.iterdir()), cwd=built)


def test_everything_that_is_no_code_is_in_the_wheel(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    tracked = call("git", "ls-files", "undrift", cwd=ROOT) if (ROOT / ".git").exists() else ""
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert set(tracked.split()) <= held | {"undrift/py.typed"} and "undrift/data/digits.npz" in held
    assert not any(name.startswith(("tests/", "docs/", "benchmarks/")) for name in held)
    with tarfile.open(source) as archive:
        assert any(name.endswith("/undrift/jobs/suites/sweeps/demo.toml") for name in archive.getnames())


def test_the_wheel_works_away_from_the_checkout(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    call(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    shared = [entry for entry in sys.path if "site-packages" in entry]  # for PyTorch; .pth files in them are not read
    absent = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS}))"  # a line of a .pth file may be an import
    (packages / "shared.pth").write_text("\n".join([*shared, absent]))
    undrift = tmp_path / "venv" / "bin" / "undrift"
    where = call(python, "-c", "import undrift; print(undrift.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path / "venv"))
    assert "  demo " in call(undrift, "suites", "list", cwd=tmp_path)
    call(undrift, "suites", "copy", "my_algorithm", cwd=tmp_path)
    words = ("run", "--algorithm", "my_algorithm:NormalisedM", "--model", "logreg", "--rounds", "3", "--cohort", "4")
    assert "runs/my_algorithm_NormalisedM-digits-seed0" in call(undrift, *words, cwd=tmp_path)
    call(undrift, "report", "runs", "--out", "report.html", cwd=tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 50_000
