"""The package's few C functions, compiled by gcc for this very processor when one of them is first wanted.

They stand beside plain forms in PyTorch, which serve where there is no gcc, no Linux, no AVX2 or no libgomp. The library has to
share PyTorch's OpenMP threads: a second set of threads would fight with the first one for the cores. It is kept in the user's
cache folder and made anew when the sources or the processor change. UNDRIFT_NATIVE=0 turns it off.
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

SOURCES = [Path(__file__).with_name(name) for name in ("dense_cpu.c", "conv_cpu.c", "memory_cpu.c")]
HEADERS = [Path(__file__).with_name(name) for name in ("lanes.h", "conv_cpu.h")]
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared"]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None: the plain forms are to be used."""
    gcc = shutil.which("gcc")
    if os.environ.get("UNDRIFT_NATIVE") == "0" or sys.platform != "linux" or gcc is None:
        return None
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    if b"libgomp" not in Path("/proc/self/maps").read_bytes():  # this PyTorch has other threads
        return None
    try:
        return kept(gcc)
    except (OSError, RuntimeError):  # no home, or one that cannot be written to
        pass
    try:
        with tempfile.TemporaryDirectory(prefix="undrift-") as aside:  # once loaded, the file is not needed any more
            return ctypes.CDLL(str(compiled(gcc, Path(aside))))
    except (OSError, subprocess.SubprocessError):
        return None


def kept(gcc: str) -> ctypes.CDLL | None:
    """The library from the cache folder, made if need be; None: gcc does not make it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "undrift"
    folder.mkdir(parents=True, exist_ok=True)
    flags = next((line for line in Path("/proc/cpuinfo").read_bytes().splitlines() if line.startswith(b"flags")), b"")
    name = digest(b"\0".join([*(file.read_bytes() for file in SOURCES + HEADERS), " ".join(FLAGS).encode(), flags]))
    for found in folder.glob(f"{name}-*.so"):
        if found.name == f"{name}-{digest(found.read_bytes())}.so":  # whole: one that is cut short would end Python
            return ctypes.CDLL(str(found))
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        try:
            new = compiled(gcc, Path(aside))
        except subprocess.SubprocessError:
            return None
        made = folder / f"{name}-{digest(new.read_bytes())}.so"
        new.replace(made)  # a finished file appears at once or not at all
    return ctypes.CDLL(str(made))


def compiled(gcc: str, folder: Path) -> Path:
    """The file of the library, made in a folder."""
    made = folder / "native.so"
    command = [gcc, *FLAGS, *map(str, SOURCES), "-lm", "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return made


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def address(t: Tensor | None) -> ctypes.c_void_p:
    """Where a tensor's entries begin; NULL for none."""
    return ctypes.c_void_p(None if t is None else t.data_ptr())
