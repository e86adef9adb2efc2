"""The fastest form of a kernel for its sizes: measured at its first use, kept on disk, and written into the run's folder.

The forms are equal up to rounding, so a resumed run takes the choices of its folder, and later runs those of the disk.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from undrift.core.files import cache_folder, replacing
from undrift.kernels.launch import current, triton

WARM_UPS, TIMES = 2, 5
T = TypeVar("T", bound=tuple[int, ...])
_chosen: dict[str, str] = {}  # what this process has chosen: the form, by kernel and sizes


def choose(kernel: str, forms: Iterable[T], run: Callable[[T], None], device: torch.device) -> T:
    """The fastest of the forms, of which `run` launches one. A rehearsal compiles all."""
    forms = list(forms)
    if device.type != "cuda" or len(forms) == 1:
        return forms[0]
    known = {spell(form): form for form in forms}
    if (name := _chosen.get(kernel) or read_stored(device).get(kernel, "")) in known:
        _chosen[kernel] = name
        return known[name]
    if current.get() is not None:
        for form in forms[1:]:
            run(form)
        return forms[0]
    if torch.cuda.is_current_stream_capturing():  # nothing can be timed now
        return forms[0]
    times = {name: measure(functools.partial(run, form)) for name, form in known.items()}
    _chosen[kernel] = min(times, key=lambda name: times[name])
    store(device)
    return known[_chosen[kernel]]


def measure(run: Callable[[], None]) -> float:
    """Milliseconds of a launch in a graph, as rounds are replayed; infinity where the kernel needs more than the GPU has."""
    aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        try:
            for _ in range(WARM_UPS):
                run()
        except triton.runtime.errors.OutOfResources:
            return float("inf")
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(TIMES):
                run()
        finally:
            graph.capture_end()
        times = []
        for _ in range(TIMES):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / TIMES)
    return float(statistics.median(times))


def spell(form: tuple[int, ...]) -> str:
    return "x".join(map(str, form))


def choices_made() -> dict[str, str]:
    """What this process has chosen, for run.toml."""
    return dict(sorted(_chosen.items()))


def take(chosen: Mapping[str, str]) -> None:
    """Take over what the resumed run had chosen."""
    _chosen.update({str(kernel): str(form) for kernel, form in chosen.items()})


def file(device: torch.device) -> Path:
    """One for each kind of GPU and each version of the compilers."""
    gpu = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    return cache_folder() / f"choices-{gpu}-{torch.__version__}-{triton.__version__}.json"


@functools.cache
def read_stored(device: torch.device) -> dict[str, str]:
    """What the disk holds; nothing if it cannot be read."""
    try:
        found = json.loads(file(device).read_text())
        return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}
    except (OSError, ValueError, RuntimeError):
        return {}


def store(device: torch.device) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # the home folder is missing or read-only
        path = file(device)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(json.dumps(read_stored(device) | _chosen, indent=1, sort_keys=True))
