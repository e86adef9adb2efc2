"""What is read from a file without importing it is what the imported module says."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import undrift
from undrift import pipeline
from undrift.algorithms.checks import looks_at_single_uploads
from undrift.compress import BLOCKS, COMPRESSORS
from undrift.core.names import PACKAGES, algorithms_of, names, outline_of
from undrift.core.outline import Outline, outline
from undrift.data.partition import PARTITIONS
from undrift.dataparallel import methods, parallel_config
from undrift.pipeline import engines, pipe_config


@pytest.mark.parametrize("kind", PACKAGES)
def test_the_same_files_are_registered(kind: str) -> None:
    package = importlib.import_module(PACKAGES[kind])
    if kind == "trackers":
        for needed_package in ("tensorboard", "mlflow", "wandb", "trackio"):
            pytest.importorskip(needed_package, reason=f"{needed_package} is not installed")
    files = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
    modules = {file.replace("_", "-"): importlib.import_module(f"{package.__name__}.{file}") for file in files}
    needed = {"datasets": "load", "models": "build", "trackers": "Tracker"}.get(kind)
    known = [n for n, module in modules.items() if (hasattr(module, needed) if needed else algorithms_of(module))]
    assert names(kind) == sorted(known) and len(known) > 3
    assert all(inspect.getdoc(outline_of(kind, name)) == inspect.getdoc(modules[name]) for name in known)


@pytest.mark.parametrize("name", names("algorithms"))
def test_an_algorithm_has_the_same_fields(name: str) -> None:
    module = importlib.import_module(f"undrift.algorithms.{name.replace('-', '_')}")
    (read,), (real,) = algorithms_of(outline_of("algorithms", name)), algorithms_of(module)
    fields = [[(f.name, f.default) for f in dataclasses.fields(kind)] for kind in (read, real)]
    assert fields[0] == fields[1]
    assert looks_at_single_uploads(read) == looks_at_single_uploads(real)
    assert [c.__name__ for c in read.__mro__] == [c.__name__ for c in real.__mro__ if c.__module__ != "abc"]


def test_tables_have_the_same_names() -> None:
    assert parallel_config.CHOICES["method"] == tuple(methods.METHODS)
    assert (parallel_config.CHOICES["compressor"], parallel_config.CHOICES["block"]) == (COMPRESSORS, BLOCKS)
    assert pipe_config.CHOICES["method"] == tuple(engines.METHODS)
    read = outline("undrift.data.partition").PARTITIONS | outline("undrift.dataparallel.methods").FILES
    real = {**PARTITIONS, **methods.FILES}
    assert [(n, inspect.getdoc(o)) for n, o in read.items()] == [(n, inspect.getdoc(o)) for n, o in real.items()]


def test_nothing_is_run(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(
        '"""Title."""\nimport absent\nfrom absent import other\nSIZES = (2, 3 * 4)\nTABLE = {"a": absent.make(), "b": other}\n'
        'def work(x):\n    """Works."""\n    raise SystemExit\nwork(1)\n'
    )
    read = Outline("file", tmp_path / "file.py")
    assert (read.__doc__, read.SIZES, read.TABLE) == ("Title.", (2, 12), {"a": ..., "b": ...})
    assert read.work.__doc__ == "Works." and read.work() is None
    assert not hasattr(read, "nothing")


def test_exported_names_are_the_ones_of_their_modules() -> None:
    assert {*undrift.__all__} <= {*dir(undrift)}
    for package in (undrift, pipeline):
        for name in package.__all__:
            value = getattr(package, name)
            home = getattr(value, "__module__", None)
            assert home is None or getattr(importlib.import_module(home), name) is value
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        _ = undrift.runs


def test_importing_the_package_imports_neither_pytorch_nor_numpy() -> None:
    code = "import sys, undrift; print(len({'torch', 'numpy'} & {*sys.modules}), undrift.RunConfig().clients)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "100"]
