"""The package's few C functions, compiled by gcc for this very processor when one of them is first wanted.

They stand beside plain forms in PyTorch, which serve where there is no gcc, no Linux, or no AVX2. The library is kept in the
user's cache folder and made anew when the sources or the processor change. It has to share PyTorch's OpenMP threads: a
second set of threads would fight with the first one for the cores. UNDRIFT_NATIVE=0 turns it off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCES = [Path(__file__).with_name(name) for name in ("dense.c", "rows.c")]
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared"]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None: the plain forms are to be used."""
    gcc = shutil.which("gcc")
    if os.environ.get("UNDRIFT_NATIVE") == "0" or sys.platform != "linux" or gcc is None:
        return None
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    try:
        if "libgomp" not in Path("/proc/self/maps").read_text():  # this PyTorch has other threads
            return None
        return ctypes.CDLL(str(compiled(gcc)))
    except (OSError, subprocess.SubprocessError):
        return None


def compiled(gcc: str) -> Path:
    """The file of the library, from the cache or made now."""
    processor = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    contents = [source.read_bytes() for source in SOURCES]
    name = hashlib.sha256(b"\0".join([*contents, " ".join(FLAGS).encode(), processor.encode()])).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "undrift"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written to
        folder = Path(tempfile.mkdtemp(prefix="undrift-"))
    made = folder / f"native-{name}.so"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=folder) as aside:  # a finished file appears at once or not at all
            new = Path(aside) / made.name
            command = [gcc, *FLAGS, *map(str, SOURCES), "-lm", "-o", str(new)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            new.replace(made)
    return made


def address(t: Tensor | None) -> ctypes.c_void_p:
    """Where a tensor's entries begin; NULL for none."""
    return ctypes.c_void_p(None if t is None else t.data_ptr())
