"""The one start of every command: reads settings, opens the run's folder, and begins or resumes the run."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from undrift.core import ranks
from undrift.core.device import arithmetic
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.jobs.config import RESUMABLE, JobConfig
from undrift.jobs.course import C, Course, Progress, Result, drive
from undrift.jobs.folder import ReadOnlyFolder, RunFolder
from undrift.jobs.plain_values import from_toml
from undrift.jobs.protocol import Run
from undrift.jobs.tracking import check_trackers
from undrift.kernels import choices
from undrift.kernels.native import library

REPAID = 50_000  # steps: compiling takes 10 to 20 s, and saves 0.1 to 0.5 ms in a step of a small model
R = TypeVar("R", bound=Run)
Given = JobConfig | Mapping[str, Any] | str | Path | None
Convert = Callable[[dict[str, Any]], dict[str, Any]]


def start(
    config: Given,
    settings: Mapping[str, Any],
    build: Callable[[dict[str, Any]], tuple[C, contextlib.AbstractContextManager[Run]]],
    out: str | Path | None,
    resume: bool,
    progress: Progress | None,
    *,
    plain: Convert = dict,
    settle: Convert = dict,
    alike: Sequence[str] = ("threads", "ranks"),
) -> Result[C]:
    """Begin or resume a run, and drive it to its end; see `begin`."""
    options: dict[str, Any] = {"plain": plain, "settle": settle, "alike": alike}
    with begin(config, settings, build, out, resume, progress, **options) as course:
        return drive(course)


@contextlib.contextmanager
def begin(
    config: Given,
    settings: Mapping[str, Any],
    build: Callable[[dict[str, Any]], tuple[C, contextlib.AbstractContextManager[Run]]],
    out: str | Path | None,
    resume: bool,
    progress: Progress | None,
    *,
    plain: Convert = dict,
    settle: Convert = dict,
    alike: Sequence[str] = ("threads", "ranks"),
) -> Iterator[Course[Run, C]]:
    """Begin or resume a run.

    `build` resolves the settings and builds the run, but writes nothing: its context is entered with the folder locked.
    `plain` normalises given and stored settings; `settle` resolves them as they are stored. A resumed run warns where one
    of `alike` has changed, because the last digits may differ.
    """
    kind = RunFolder if ranks.rank() == 0 else ReadOnlyFolder
    folder = None if out is None else kind(Path(out))
    given = plain(read(config)) | plain(dict(settings))
    if resume:
        if folder is None:
            raise BadSetting("resume needs the run's folder; give --out DIR")
        given = merge_stored(folder, given, plain, settle, alike)
    chosen, context = build(given)
    ranks.all_well()  # before anything is written
    course = open_course(context, chosen, folder, resume, progress)
    with arithmetic(chosen.precision, chosen.deterministic), course as opened:
        yield opened


def read(config: Given) -> dict[str, Any]:
    """The settings of a config, a mapping or a TOML file."""
    if isinstance(config, str | Path):
        return from_toml(Path(config))
    return asdict(config) if isinstance(config, JobConfig) else dict(config or {})


def merge_stored(
    folder: RunFolder, asked: dict[str, Any], plain: Convert, settle: Convert, alike: Sequence[str]
) -> dict[str, Any]:
    """The settings of a resumed run: those stored, and those asked for. Refuse changes that make it another run."""
    stored = folder.settings()
    made = stored.pop("made", {})
    if not isinstance(made, Mapping) or not isinstance(stored.get("set", {}), Mapping):
        raise BadRunFolder(f"{folder.settings_file} is damaged: [set] and [made] must be tables")
    stored = plain(stored)
    new = settle(stored | asked)
    fixed = {n: v for n, v in new.items() if n not in ("set", *RESUMABLE)}
    for before, after in ((stored, fixed), (stored.get("set") or {}, new.get("set") or {})):
        for name, value in after.items():
            if before.get(name, value) != value:
                raise BadRunFolder(
                    f"{folder.path} holds another run: its {name} is {before[name]}, not {value}; choose another --out"
                )
    for what, now in (("threads", torch.get_num_threads()), ("ranks", ranks.count())):
        if what in alike and made.get(what) not in (None, now) and ranks.rank() == 0:
            warnings.warn(
                f"{folder.path} was run on {made[what]} {what}, now there are {now}: the last digits may differ",
                stacklevel=5,  # outside the command's function and `ranks.joined`
            )
    if isinstance(kernels := made.get("kernels"), Mapping):
        choices.take(kernels)
    if "native" in made and made["native"] != (library() is not None) and ranks.rank() == 0:
        then, today = ("with", "without") if made["native"] else ("without", "with")
        warnings.warn(
            f"{folder.path} was run {then} the functions in C, now it is {today} them: the last digits may differ",
            stacklevel=5,
        )
    given = stored | asked
    if "set" in given:
        given["set"] = stored.get("set", {}) | asked.get("set", {})
    for choice in ("execution", "compile"):
        if asked.get(choice, "auto") == "auto":  # keep the first choice, so that the run goes on bit for bit
            given[choice] = stored.get(choice, "auto")
    return given


@contextlib.contextmanager
def open_course(
    context: contextlib.AbstractContextManager[R],
    config: C,
    folder: RunFolder | None,
    resume: bool,
    progress: Progress | None,
) -> Iterator[Course[R, C]]:
    """Open a run in its folder, and keep the folder locked."""
    with contextlib.ExitStack() as stack:
        if ranks.rank() == 0:
            check_trackers(config.track, folder is not None)
        if folder is not None:
            folder.make(resume)
            stack.enter_context(folder.locking())
        ranks.all_well()  # rank 0 may have failed to make the folder
        course = Course(stack.enter_context(context), config, folder, resume, progress)
        stack.callback(course.tracking.end, "interruption", lambda: None)
        yield course


def compiles(config: JobConfig, steps: int) -> bool:
    """Whether to compile on a GPU: if asked for, or if so many steps repay the time."""
    if config.compile != "auto":
        return config.compile == "on"
    return steps >= REPAID and not config.deterministic and importlib.util.find_spec("triton") is not None
