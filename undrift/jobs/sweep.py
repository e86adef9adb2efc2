"""Many runs from one TOML file: algorithms x settings x seeds, side by side, resumable.

dataset = "digits"            # settings of `undrift run`, common to all runs
[set]
lr = 0.05                     # fields common to all algorithms
[sweep]
algorithms = ["fedavg", "fedprox"]
seeds = [0, 1]
else_dataset = "digits"       # instead of `dataset`, where that is not on this machine
target = 0.9                  # for "rounds to a target" in the report
[sweep.grid]                  # every combination, for every algorithm; settings or fields
lr = [0.1, 0.05]
[sweep.only.fedprox]          # for one algorithm alone; lists are tried one by one
mu = [0.01, 0.1]

With `methods` in place of `algorithms` the settings are those of `undrift dataparallel`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing.managers import SyncManager
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

import torch

from undrift.algorithms.settings import check_algorithm
from undrift.core.device import pick_device
from undrift.core.errors import BadRunFolder, BadSetting, MissingData, UndriftError, UnknownName
from undrift.core.names import module_of
from undrift.data.load import load_dataset
from undrift.data.partition import PARTITIONS
from undrift.dataparallel import command as parallel
from undrift.dataparallel.command import ParallelConfig
from undrift.jobs import packs
from undrift.jobs.config import FIELDS, RESUMABLE, RunConfig, fields_of, from_mapping, make_algorithm, read_toml
from undrift.jobs.course import Progress
from undrift.jobs.folder import RunFolder
from undrift.jobs.registry import algorithm_class
from undrift.jobs.run import run


class Job(NamedTuple):
    """One run of a sweep."""

    name: str  # of its folder
    config: RunConfig | ParallelConfig


KEYS = ("algorithms", "methods", "seeds", "target", "else_dataset", "grid", "only")
Watch = Callable[[str, int, int], None]  # a job's name, rounds done, rounds asked for


def plan(path: Path) -> tuple[list[Job], dict[str, Any]]:
    """Every run that a sweep file asks for, all checked before the first one starts, and its [sweep] table."""
    settings = read_toml(path)
    sweep = _table("[sweep]", settings.pop("sweep", {}))
    for name in sweep:
        if name not in KEYS:
            raise UnknownName("key of [sweep]", name, KEYS)
    if "else_dataset" in sweep and not there(settings.get("dataset", FIELDS["dataset"].default)):
        settings["dataset"] = sweep["else_dataset"]
    what = "method" if "methods" in sweep or "method" in settings else "algorithm"
    if "algorithms" in sweep and what == "method":
        raise BadSetting("a sweep has algorithms, of undrift run, or methods, of undrift dp, not both")
    fields = parallel.FIELDS if what == "method" else FIELDS
    algorithms = sweep.get(f"{what}s", [settings.get(what, fields[what].default)])
    seeds = sweep.get("seeds", [settings.get("seed", 0)])
    for name, values, kind in ((f"{what}s", algorithms, str), ("seeds", seeds, int)):
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(v, kind) for v in values)
            or len(set(values)) < len(values)
        ):
            raise BadSetting(f"[sweep] {name} must be a list of one or more different values, not {values}")
    if not isinstance(sweep.get("target", 0.0), int | float):
        raise BadSetting(f"[sweep] target must be a number, not {sweep['target']!r}")
    common = _table("[sweep.grid]", sweep.get("grid", {}))
    only = {n: _table(f"[sweep.only.{n}]", v) for n, v in _table("[sweep.only]", sweep.get("only", {})).items()}
    for name, values in itertools.chain(*(grid.items() for grid in (common, *only.values()))):
        if values == []:
            raise BadSetting(f"[sweep] {name} is an empty list; give at least one value")
        if name in (what, "seed"):
            raise BadSetting(f"{name} is no setting to vary in a grid; list its values as {name}s in [sweep]")
    for name in only:
        if name not in algorithms:
            raise UnknownName(f"{what} of [sweep.only]", name, algorithms)
    jobs: dict[str, Job] = {}
    for algorithm in algorithms:
        grid = common | only.get(algorithm, {})
        for values in _combinations(grid):
            for seed in seeds:
                varied = [f"{n}={v}" for n, v in values.items() if isinstance(grid[n], list)]
                name = _folder_name(algorithm, *varied, f"seed={seed}")
                chosen = settings | {what: algorithm, "seed": seed}
                try:
                    config = _parallel(chosen | values) if what == "method" else _federated(chosen, values)
                    check_names(config)
                except BadSetting as error:  # which does not say of which run
                    raise BadSetting(f"{name}: {error}") from error
                # A run that is there twice would count as two seeds in the report.
                decides = repr(asdict(config) | {"set": _fields(config)})
                if decides in jobs:
                    raise BadSetting(f"{jobs[decides].name} and {name} are the same run; leave one of the values out")
                jobs[decides] = Job(name, config)
    return list(jobs.values()), sweep


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadSetting(f"{name} must be a table of names and values, not {value!r}")
    return value


def _fields(config: RunConfig | ParallelConfig) -> dict[str, Any]:
    """All fields of the run's algorithm."""
    if isinstance(config, ParallelConfig):
        return {}
    return asdict(make_algorithm(algorithm_class(config.algorithm), config.algorithm, config.set))


def _federated(chosen: dict[str, Any], values: Mapping[str, Any]) -> RunConfig:
    """The settings of a run of `undrift run`, with what varies: settings of the run, or fields of the algorithm."""
    chosen["set"] = dict(chosen.get("set", {}))
    for name, value in values.items():
        (chosen if name in FIELDS and name != "set" else chosen["set"])[name] = value
    config = from_mapping(chosen)
    built = make_algorithm(algorithm_class(config.algorithm), config.algorithm, config.set)
    check_algorithm(built, config.clients, config.clients if config.sampling == "bernoulli" else config.cohort)
    return config


def _parallel(chosen: dict[str, Any]) -> ParallelConfig:
    """The settings of a run of `undrift dp`."""
    return parallel.resolve(parallel.from_mapping(chosen))


def there(dataset: str) -> bool:
    """Whether the data set can be read on this machine."""
    try:
        load_dataset(dataset)
    except MissingData:
        return False
    return True


def check_names(config: RunConfig | ParallelConfig) -> None:
    """Raise UnknownName for a data set, model or partition that is not there."""
    for kind, name in (("datasets", config.dataset), ("models", config.model)):
        if ":" not in name:
            module_of(kind, name)
    if isinstance(config, RunConfig) and config.partition.partition(":")[0] not in PARTITIONS:
        raise UnknownName("partition", config.partition.partition(":")[0], PARTITIONS)


def run_all(
    jobs: list[Job], out: Path, processes: int, watch: Watch, say: Callable[[str], None], pack: bool | None = None
) -> dict[str, str]:
    """Run what is not finished yet, `processes` programs at a time; the messages of the runs that failed, by name.

    Runs that share shapes are one program on a GPU, or where `pack` says so.
    """
    failed: dict[str, str] = {}
    context = multiprocessing.get_context("spawn")
    manager = SyncManager(ctx=context)
    manager.start(_end_with_parent)
    with manager:
        news = manager.Queue()
        with ProcessPoolExecutor(processes, context, initializer=_share_cores, initargs=(processes,)) as pool:
            waiting: dict[Future[Any], list[Job]] = {}
            try:
                groups = [pool.submit(_programs, group, out, processes) for group in grouped(jobs, out, pack)]
                programs = []
                for group in groups:
                    parts, packed = group.result()
                    programs += parts
                    if packed:
                        say(packed)
                waiting = {pool.submit(_run_program, program, out, news): program for program in programs}
                while waiting:
                    _tell(news, watch)
                    for done in [f for f in waiting if f.done()]:
                        program = waiting.pop(done)
                        error = done.exception()  # a worker that died
                        told, note = ({job.name: _message(error) for job in program}, "") if error else done.result()
                        failed |= told
                        if note:
                            say(note)
            except KeyboardInterrupt:
                for future in waiting:
                    future.cancel()
                for process in list((pool._processes or {}).values()):
                    process.terminate()
                raise
            _tell(news, watch)
    return failed


def _tell(news: Any, watch: Watch) -> None:
    """Pass on what the runs have reported, waiting a moment where there is nothing."""
    try:
        watch(*news.get(timeout=0.1))
        while True:
            watch(*news.get_nowait())
    except Empty:
        return


def grouped(jobs: list[Job], out: Path, pack: bool | None) -> list[list[Job]]:
    """The runs that can be packed together, in the order of the first of each."""
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        alike = None
        with contextlib.suppress(Exception):  # a damaged folder, say: its run will tell
            packing = pack or (pack is None and pick_device(job.config.device).type == "cuda")
            if packing and isinstance(job.config, RunConfig) and not _finished(job, RunFolder(out / job.name)):
                alike = packs.kind(job.config, RunFolder(out / job.name))
        groups.setdefault(job.name if alike is None else alike, []).append(job)
    return list(groups.values())


def _programs(group: list[Job], out: Path, processes: int) -> tuple[list[list[Job]], str]:
    """The group in parts that fit in memory, and what is to be said of them; one by one where even the first cannot be made."""
    if len(group) == 1:
        return [group], ""
    try:
        cost = packs.cost(_packable(group)[0], processes)
        parts = packs.split(group, cost.most)
        largest = max(map(len, parts))
        rounds = sum(job.config.rounds - RunFolder(out / job.name).reached() for job in group)
        programs = "one program" if len(parts) == 1 else f"{len(parts)} programs"
        return parts, (
            f"packed: {len(group)} runs in {programs}, {group[0].name} ... {group[-1].name}; "
            f"{largest * cost.memory / 1e9:.1f} GB at a time, {cost.seconds * rounds:.0f} s if run one after another"
        )
    except Exception:  # which they will tell themselves
        return [[job] for job in group], ""
    finally:
        torch.cuda.empty_cache()


def _run_program(program: list[Job], out: Path, news: Any) -> tuple[dict[str, str], str]:
    """Runs in a worker process, packed where they are several: the messages of those that failed, and of a pack that did."""
    failed, note = {}, ""
    if len(program) > 1:
        try:
            packs.run_packed(
                _packable(program), [out / job.name for job in program],
                [_progress(job, news) for job in program],
            )  # fmt: skip
        except Exception as error:
            note = f"{len(program)} runs could not be packed ({_message(error)}) and were run one by one: {program[0].name}, ..."
        gc.collect()  # what the pack held on the device
        torch.cuda.empty_cache()
    for job in program:  # finds finished what was packed
        try:
            _run_one(job, out / job.name, news)
        except Exception as error:
            failed[job.name] = _message(error)
    return failed, note


def _packable(program: list[Job]) -> list[RunConfig]:
    """The settings of runs that are packed, which are all of `undrift run`."""
    return [job.config for job in program if isinstance(job.config, RunConfig)]


def _message(error: BaseException) -> str:
    if isinstance(error, BrokenProcessPool):
        return "a process of the sweep was killed, perhaps for want of memory; the same command again goes on"
    return str(error) if isinstance(error, UndriftError) else repr(error)


def _progress(job: Job, news: Any) -> Progress:
    return lambda record, rounds: news.put((job.name, record["round"], rounds))


def _run_one(job: Job, folder: Path, news: Any) -> None:
    """One run: begin, go on, or find it finished."""
    stored = RunFolder(folder)
    if not _finished(job, stored):  # a finished run is not run again
        how: dict[str, Any] = {"out": folder, "resume": stored.exists(), "progress": _progress(job, news)}
        if isinstance(job.config, ParallelConfig):
            parallel.run_parallel(job.config, **how)
        else:
            run(job.config, **how)
    news.put((job.name, job.config.rounds, job.config.rounds))


def _finished(job: Job, stored: RunFolder) -> bool:
    """Whether the folder holds the job's run, at its end; that it holds another run is an error."""
    folder = stored.path
    if not stored.exists():
        return False
    was, now = stored.settings(), asdict(job.config)
    for name in now.keys() - {"set", *RESUMABLE}:
        before = was.get(name, fields_of(type(job.config))[name].default)  # a setting may be newer than the folder
        if before != now[name]:
            raise BadRunFolder(f"{folder} holds another run: its {name} is {before}, not {now[name]}")
    for name, value in _fields(job.config).items():
        value = list(value) if isinstance(value, tuple) else value
        if was.get("set", {}).get(name) != value:
            raise BadRunFolder(f"{folder} holds another run: its {name} is {was['set'].get(name)}, not {value}")
    return stored.finished() and bool(was["rounds"] == job.config.rounds)


def _share_cores(processes: int) -> None:
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores() // processes)))  # OMP_NUM_THREADS may want fewer
    _end_with_parent()


def cores() -> int:
    """Those that this process may use, which on a shared machine need not be all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end_with_parent() -> None:
    """End with the sweep, also when that is killed."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _combinations(grid: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    lists = [value if isinstance(value, list) else [value] for value in grid.values()]
    for values in itertools.product(*lists):
        yield dict(zip(grid, values, strict=True))


def _folder_name(*parts: str) -> str:
    return "-".join(parts).replace("/", "_").replace(":", "_")
