"""`undrift doctor`: what is installed, what this machine has, which data are at hand, and a self-test of a few seconds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from undrift.core.device import host_memory
from undrift.core.errors import UndriftError
from undrift.core.names import module_of, names
from undrift.core.version import __version__
from undrift.data.load import added_names, data_root
from undrift.jobs.crew import cores
from undrift.jobs.run import run
from undrift.kernels.native import library

SELF_TEST: dict[str, Any] = dict(
    algorithm="scaffold", model="logreg", clients=20, cohort=5, rounds=5, eval_every=5, seed=0, lr=0.05
)
LEARNED = 0.4  # what the self-test reaches at least; guessing would be 0.1
ALIKE = 1e-4  # how far the parameters of the stacked and the plain run may be apart

Say = Callable[[str], None]


def examine(say: Say) -> bool:
    """Say what there is, line by line; return whether the self-test passed."""
    for name, text in [*versions(), *machine(), *data()]:
        say(f"{name:14} {text}")
    passed = True
    for device in ["cpu", *["cuda"] * torch.cuda.is_available()]:
        problem, seconds = self_test(device)
        say(f"{'self-test':14} {device}: {problem or 'passed'} ({seconds:.1f} s)")
        passed = passed and not problem
    return passed


def versions() -> Iterator[tuple[str, str]]:
    """The versions of Python, of this package, of what it needs and of what it can use."""
    yield "undrift", f"{__version__} in {Path(__file__).parents[1]}"
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    asked = importlib.metadata.requires("undrift") or []
    needed = [name_in(line) for line in asked if "extra ==" not in line]
    yield "needs", ", ".join(map(version_of, needed))
    extras = sorted(importlib.metadata.metadata("undrift").get_all("Provides-Extra") or [])
    for extra in [extra for extra in extras if extra not in ("bench", "dev", "docs")]:
        packages = [name_in(line) for line in asked if re.search(rf"extra == .{extra}.", line)]
        missing = [name for name in packages if not has(name)]
        text = ", ".join(map(version_of, packages))
        yield "extra", f"{extra}: {text}" if not missing else f"{extra}: not installed; pip install 'undrift[{extra}]'"


def name_in(requirement: str) -> str:
    """
    >>> name_in("torch<2.14,>=2.11"), name_in("flwr[simulation]==1.41.*; extra == 'bench'")
    ('torch', 'flwr')
    """
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def has(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def version_of(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}" if has(package) else f"{package} is missing"


def machine() -> Iterator[tuple[str, str]]:
    """Processor, memory, graphics card, and the compiler of the C functions."""
    memory = f"{host_memory('MemAvailable') / 1e9:.1f} of {host_memory('MemTotal') / 1e9:.1f} GB free"
    yield "machine", f"{cores()} cores, {torch.get_num_threads()} threads, {memory}"
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            about, free = torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number)
            yield "GPU", f"{about.name}, {free[0] / 1e9:.1f} of {free[1] / 1e9:.1f} GB free, CUDA {torch.version.cuda}"
    else:
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        yield "GPU", f"none that PyTorch sees ({build}): runs use the CPU"
    yield "gcc", compiler()


def compiler() -> str:
    """Whether the functions in C serve."""
    gcc = shutil.which("gcc")
    version = ""
    if gcc is not None:
        said = subprocess.run([gcc, "-dumpfullversion"], capture_output=True, text=True, check=False).stdout
        version = f"{said.strip()} in {gcc}: "
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if library() is not None:
            return f"{version}the functions in C serve"
    if os.environ.get("UNDRIFT_NATIVE") == "0":
        return f"{version}not used, because UNDRIFT_NATIVE is 0"
    if gcc is None:
        return "not found: PyTorch does what the functions in C would do faster; install gcc"
    why = str(warned[0].message) if warned else "the functions in C need Linux, AVX2 and PyTorch's libgomp"
    return f"{version}not used; {why}"


def data() -> Iterator[tuple[str, str]]:
    """The folder of the data sets, and which of them have files in it. Nothing is read, and nothing is fetched."""
    try:
        root = data_root()
    except UndriftError as error:
        yield "data", str(error)
        return
    yield "data folder", str(root or "none; set UNDRIFT_DATA, or use undrift data add")
    own = [name for name in names("datasets") if name in ("digits", "noise") or name.startswith("synthetic-")]
    found = [f"{name} (in the package)" for name in own]
    found += [name for name in names("datasets") if root is not None and at_hand(name, root)]
    yield "data sets", ", ".join([*found, *(f"{name} (added)" for name in added_names())])


def at_hand(name: str, root: Path) -> bool:
    """Whether a data set's archive or one of its usual folders is there."""
    source = getattr(module_of("datasets", name), "SOURCE", None)
    places = [f"{name}.npz", *(source.folders if source else (name,))]
    return any((root / place).exists() for place in places)


def self_test(device: str) -> tuple[str, float]:
    """Train on the embedded digits, stacked and plainly; return what is wrong, if anything, and the seconds it took."""
    begun = time.monotonic()
    try:
        fast, plain = (run(device=device, execution=how, **SELF_TEST) for how in ("stacked", "debug"))
    except Exception as error:  # a doctor says what is wrong, whatever it is
        return f"failed with {type(error).__name__}: {' '.join(str(error).split())}", time.monotonic() - begun
    apart = max((fast.model[name] - plain.model[name]).abs().max().item() for name in plain.model)
    if not fast.accuracy or fast.accuracy < LEARNED:
        return f"did not learn: accuracy {fast.accuracy}", time.monotonic() - begun
    if not apart < ALIKE:
        return f"two ways to compute one run are {apart:.1e} apart", time.monotonic() - begun
    return "", time.monotonic() - begun
