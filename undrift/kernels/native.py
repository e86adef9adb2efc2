"""The package's C functions, compiled by gcc for this processor at their first use.

The plain forms serve without gcc, Linux, AVX2 or libgomp. They round differently, so a warning says where gcc is there but fails.
The library must share PyTorch's OpenMP threads: a second pool would compete for the cores. The user's cache folder holds it until
the sources or the processor change. UNDRIFT_NATIVE=0 disables it.
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
import warnings
from pathlib import Path

import torch
from torch import Tensor

from undrift.core.files import cache_folder

SOURCES = [Path(__file__).with_name(name) for name in ("dense_cpu.c", "conv_cpu.c", "memory_cpu.c")]
HEADERS = [Path(__file__).with_name(name) for name in ("lanes.h", "conv_cpu.h")]
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared"]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None if the plain forms must serve."""
    gcc = shutil.which("gcc")
    if os.environ.get("UNDRIFT_NATIVE") == "0" or sys.platform != "linux" or gcc is None:
        return None
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    if b"libgomp" not in Path("/proc/self/maps").read_bytes():  # this PyTorch uses other threads
        return None
    try:
        return load_cached(gcc)
    except (OSError, RuntimeError):  # the home folder is missing or read-only
        pass
    try:
        with tempfile.TemporaryDirectory(prefix="undrift-") as folder:  # a loaded library does not need its file
            return ctypes.CDLL(str(compile_in(Path(folder), gcc)))
    except (OSError, subprocess.SubprocessError) as error:
        warn_of(error)
        return None


def warn_of(error: Exception) -> None:
    """Say that the plain forms serve, and why."""
    why = getattr(error, "stderr", None) or str(error).encode()
    last = why.decode(errors="replace").strip().splitlines()[-1:]
    warnings.warn(
        f"gcc made nothing of the C functions, so PyTorch serves: slower, and the last digits differ ({''.join(last)})",
        stacklevel=2,
    )


def load_cached(gcc: str) -> ctypes.CDLL | None:
    """Load the library from the cache folder, compiling it if necessary; None if gcc fails."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    flags = next((line for line in Path("/proc/cpuinfo").read_bytes().splitlines() if line.startswith(b"flags")), b"")
    name = digest(b"\0".join([*(file.read_bytes() for file in SOURCES + HEADERS), " ".join(FLAGS).encode(), flags]))
    for file in folder.glob(f"{name}-*.so"):
        if file.name == f"{name}-{digest(file.read_bytes())}.so":  # a truncated library would crash Python
            return ctypes.CDLL(str(file))
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        try:
            new = compile_in(Path(temporary), gcc)
        except subprocess.SubprocessError as error:
            warn_of(error)
            return None
        file = folder / f"{name}-{digest(new.read_bytes())}.so"
        new.replace(file)  # atomic
    return ctypes.CDLL(str(file))


def compile_in(folder: Path, gcc: str) -> Path:
    """Compile the library in a folder."""
    file = folder / "native.so"
    command = [gcc, *FLAGS, *map(str, SOURCES), "-lm", "-o", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return file


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def address(t: Tensor | None) -> ctypes.c_void_p:
    """The address of a tensor's data, or NULL."""
    return ctypes.c_void_p(None if t is None else t.data_ptr())
