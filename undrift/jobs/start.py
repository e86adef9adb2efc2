"""The one start: from settings to a course on its way; resume, folder, lock and arithmetic are the same for every command."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from undrift.core import ranks
from undrift.core.device import arithmetic
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.jobs.config import RESUMABLE, JobConfig, from_toml
from undrift.jobs.course import C, Course, Progress, Result, drive
from undrift.jobs.folder import ReadOnlyFolder, RunFolder
from undrift.jobs.protocol import Run

REPAID = 50_000  # steps: compiling takes ten to twenty seconds, and a step of a small model saves 0.1 to 0.5 ms
R = TypeVar("R", bound=Run)
Given = JobConfig | Mapping[str, Any] | str | Path | None


def start(
    config: Given,
    settings: Mapping[str, Any],
    build: Callable[[dict[str, Any]], tuple[C, AbstractContextManager[Run]]],
    out: str | Path | None,
    resume: bool,
    progress: Progress | None,
    *,
    plain: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
    settle: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    alike: Sequence[str] = ("threads", "ranks"),
) -> Result[C]:
    """Begin a run, or go on with it, and drive it to its end.

    `build` makes the resolved settings and the run, and writes nothing; what is to happen with the folder locked is done as its
    context is entered. `plain` brings given and stored settings to one form, `settle` to the form in which they are stored.
    Where one of `alike` changes, the last digits may.
    """
    folder = None
    if out is not None:
        folder = RunFolder(Path(out)) if ranks.rank() == 0 else ReadOnlyFolder(Path(out))
    given = plain(read(config)) | plain(settings)
    if resume:
        if folder is None:
            raise BadSetting("resume needs the run's folder; give --out DIR")
        given = go_on(folder, given, plain, settle, alike)
    chosen, context = build(given)
    ranks.all_well()  # before anything is written
    with (
        arithmetic(chosen.precision, chosen.deterministic),
        set_out(context, chosen, folder, resume, progress) as course,
    ):
        return drive(course)


def read(config: Given) -> dict[str, Any]:
    """The settings that a config, a mapping or a TOML file holds."""
    if isinstance(config, str | Path):
        return from_toml(Path(config))
    return asdict(config) if isinstance(config, JobConfig) else dict(config or {})


def go_on(
    folder: RunFolder,
    asked: dict[str, Any],
    plain: Callable[[Mapping[str, Any]], dict[str, Any]],
    settle: Callable[[dict[str, Any]], dict[str, Any]],
    alike: Sequence[str],
) -> dict[str, Any]:
    """The settings of a run that is resumed: those it was begun with, and what may change of them."""
    stored = folder.settings()
    made = stored.pop("made", {})
    stored = plain(stored)
    check_same_run(folder, stored, settle(stored | asked))
    for what, now in (("threads", torch.get_num_threads()), ("ranks", ranks.count())):
        if what in alike and made.get(what) not in (None, now) and ranks.rank() == 0:
            warnings.warn(
                f"{folder.path} was run on {made[what]} {what}, now there are {now}: the last digits may differ",
                stacklevel=5,  # past the command's function and what joins the ranks
            )
    given = stored | asked
    if "set" in given:
        given["set"] = stored.get("set", {}) | asked.get("set", {})
    for choice in ("execution", "compile"):
        if asked.get(choice, "auto") == "auto":  # what it was begun with, so that it goes on bit for bit
            given[choice] = stored.get(choice, "auto")
    return given


def check_same_run(folder: RunFolder, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse to go on with a run under settings that it was not started with."""
    for name, value in asked.items():
        was: Any = stored.get(name)
        if name == "set":
            for field, new in value.items():
                if was and was.get(field, new) != new:
                    raise BadRunFolder(
                        f"{folder.path} holds another run: its {field} is {was[field]}, not {new}; choose another --out"
                    )
        elif name not in RESUMABLE and name in stored and was != value:
            raise BadRunFolder(
                f"{folder.path} holds another run: its {name} is {was}, not {value}; choose another --out"
            )


@contextlib.contextmanager
def set_out(
    context: AbstractContextManager[R],
    config: C,
    folder: RunFolder | None,
    resume: bool,
    progress: Progress | None,
) -> Iterator[Course[R, C]]:
    """A run in its folder, which is locked for as long as it takes."""
    with contextlib.ExitStack() as stack:
        if folder is not None:
            folder.make(resume)
            stack.enter_context(folder.locked())
        ranks.all_well()  # a folder that rank 0 cannot have: no rank may wait for another then
        yield Course(stack.enter_context(context), config, folder, resume, progress)


def compiles(config: JobConfig, steps: int) -> bool:
    """Whether so many steps are compiled on a GPU: asked for, or enough to repay the time it takes."""
    if config.compile != "auto":
        return config.compile == "on"
    return steps >= REPAID and not config.deterministic and importlib.util.find_spec("triton") is not None
