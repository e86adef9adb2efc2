"""Many runs from one TOML file: algorithms x settings x seeds, resumable. docs/sweeps.md describes the file."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import Field, asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from undrift.algorithms.checks import check_algorithm
from undrift.core.device import pick_device
from undrift.core.errors import BadRunFolder, BadSetting, CannotWrite, MissingData, UndriftError, one_line_warnings
from undrift.core.names import module_of
from undrift.core.run_files import SWEEP
from undrift.core.seals import write_sealed
from undrift.data.load import check_dataset, load_dataset
from undrift.data.partition import PARTITIONS
from undrift.dataparallel import command as parallel
from undrift.jobs import packs
from undrift.jobs.config import FIELDS, RESUMABLE, JobConfig, RunConfig, build_algorithm, from_mapping
from undrift.jobs.course import Progress
from undrift.jobs.crew import Crew, Died
from undrift.jobs.folder import RunFolder
from undrift.jobs.plain_values import as_type, check_known, read_toml, table_of_fields
from undrift.jobs.run import run
from undrift.jobs.tracking import check_trackers
from undrift.pipeline import pipe_config
from undrift.pipeline.train import run_pipe


class Job(NamedTuple):
    """One run of a sweep."""

    name: str  # the name of its folder
    config: JobConfig
    kind: str = "algorithm"  # a key of KINDS


class Kind(NamedTuple):
    """What a sweep needs of the command that runs its jobs."""

    fields: Mapping[str, Field[Any]]  # its settings
    resolve: Callable[[dict[str, Any], dict[str, Any]], JobConfig]  # common settings, varied ones -> a job's config
    algorithm_fields: Callable[[Any], dict[str, Any]]  # all fields of a config's algorithm, where `set` holds some
    run: Callable[..., Any]
    pack_key: Callable[[Any, RunFolder], Hashable]  # equal for runs that can be packed together; None: runs alone


KEYS = ("algorithms", "methods", "seeds", "target", "else_dataset", "grid", "only")
Watch = Callable[[str, int, int], None]  # a job's name, rounds done, rounds asked for
Say = Callable[[str], None]
Tell = Callable[[tuple[str, int, int]], None]  # the same, from another process
DEATHS = 3
GIVEN_UP = f"its process died {DEATHS} times, perhaps for want of memory; the same command again goes on"


def plan(path: Path, track: str | None = None) -> tuple[list[Job], dict[str, Any]]:
    """List and check every run that a sweep file asks for; also return its [sweep] table. `track` overrides the file's."""
    settings = read_toml(path)
    settings |= {} if track is None else {"track": track}
    if "sweep" not in settings:
        raise BadSetting(f"{path} has no [sweep] table, so it is one run; start it with 'undrift run {path}'")
    sweep = _table("[sweep]", settings.pop("sweep"))
    check_known("key of [sweep]", sweep, KEYS)
    if "else_dataset" in sweep:
        try:
            load_dataset(as_type("dataset", settings.get("dataset", FIELDS["dataset"].default), str))
        except MissingData:
            settings["dataset"] = sweep["else_dataset"]
    what = "method" if "methods" in sweep or "method" in settings else "algorithm"
    command = KINDS[what]
    if "algorithms" in sweep and what == "method":
        raise BadSetting("a sweep has algorithms, of undrift run, or methods, of undrift dp, not both")
    algorithms = sweep.get(f"{what}s", [settings.get(what, command.fields[what].default)])
    seeds = sweep.get("seeds", [settings.get("seed", 0)])
    for name, values, kind in ((f"{what}s", algorithms, str), ("seeds", seeds, int)):
        valid = isinstance(values, list) and values and all(isinstance(v, kind) for v in values)
        if not valid or len(set(values)) < len(values):
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
    check_known(f"{what} of [sweep.only]", only, algorithms)
    jobs: dict[str, Job] = {}
    for algorithm in algorithms:
        grid = common | only.get(algorithm, {})
        lists = [value if isinstance(value, list) else [value] for value in grid.values()]
        for *choice, seed in itertools.product(*lists, seeds):
            values = dict(zip(grid, choice, strict=True))
            varied = [f"{n}={v}" for n, v in values.items() if isinstance(grid[n], list)]
            name = "-".join([algorithm, *varied, f"seed={seed}"]).replace("/", "_").replace(":", "_")
            try:
                config = command.resolve(settings | {what: algorithm, "seed": seed}, values)
                check_dataset(config.dataset)
                if ":" not in config.model:
                    module_of("models", config.model)
            except BadSetting as error:  # which does not name the run
                raise BadSetting(f"{name}: {error}") from error
            # The report would count the same run twice as two seeds.
            key = repr(asdict(config) | {"set": command.algorithm_fields(config)})
            if key in jobs:
                raise BadSetting(f"{jobs[key].name} and {name} are the same run; leave one of the values out")
            jobs[key] = Job(name, config, what)
    for used in {job.config.track for job in jobs.values()}:
        check_trackers(used, True)
    return list(jobs.values()), sweep


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadSetting(f"{name} must be a table of names and values, not {value!r}")
    return value


def resolve_federated(chosen: dict[str, Any], values: Mapping[str, Any]) -> RunConfig:
    """The settings of a run of `undrift run`; `values` are settings of the run or fields of the algorithm."""
    chosen["set"] = table_of_fields(chosen.get("set", {}))
    for name, value in values.items():
        (chosen if name in FIELDS and name != "set" else chosen["set"])[name] = value
    config = from_mapping(chosen)
    most = config.clients if config.sampling == "bernoulli" else config.cohort
    check_algorithm(build_algorithm(config), config.clients, most)
    check_known("partition", [config.partition.partition(":")[0]], PARTITIONS)
    return config


KINDS = {  # kinds of sweep, by the setting that names what is compared; pipe only in suites
    "algorithm": Kind(FIELDS, resolve_federated, lambda config: asdict(build_algorithm(config)), run, packs.kind),
    "method": Kind(
        parallel.FIELDS, lambda chosen, values: parallel.resolve(parallel.from_mapping(chosen | values)),
        lambda config: {}, parallel.run_parallel, lambda config, folder: None,
    ),
    "pipe": Kind(
        pipe_config.FIELDS, lambda chosen, values: pipe_config.from_mapping(chosen | values),
        lambda config: {}, run_pipe, lambda config, folder: None,
    ),
}  # fmt: skip


def run_sweep(
    file: Path, jobs: list[Job], out: Path, processes: int, watch: Watch, say: Say, pack: bool | None
) -> dict[str, str]:
    """Run the jobs of a file as `run_all` does, and note in the folder which ones there are to be and which have failed."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "sweep.toml").write_bytes(file.read_bytes())
    planned = {"runs": {job.name: job.config.rounds for job in jobs}, "failed": {}}
    write_sealed(out / SWEEP, planned)
    failed = run_all(jobs, out, processes, watch, say, pack)
    write_sealed(out / SWEEP, planned | {"failed": failed})
    return failed


def run_all(
    jobs: list[Job], out: Path, processes: int, watch: Watch, say: Say, pack: bool | None = None
) -> dict[str, str]:
    """Run what is not finished, `processes` programs at a time; return the messages of failed runs by name.

    Runs of equal shapes are one program on a GPU, or where `pack` is True.
    """
    failed: dict[str, str] = {}
    deaths: Counter[str] = Counter()
    with Crew(processes) as crew:
        groups = group_jobs(jobs, out, pack)
        parts = {group[0].name: [group] for group in groups}
        for group, result in crew.do(partial(_programs, out, processes), deque(g for g in groups if len(g) > 1)):
            single = [[job] for job in group]
            parts[group[0].name], packed = (single, "") if isinstance(result, Died) else result
            if packed:
                say(packed)
        programs = deque(itertools.chain(*parts.values()))
        for program, result in crew.do(partial(_run_program, out), programs, lambda news: watch(*news)):
            if isinstance(result, Died):
                deaths.update(job.name for job in program)
                failed |= {job.name: GIVEN_UP for job in program if deaths[job.name] == DEATHS}
                if again := [job for job in program if deaths[job.name] < DEATHS]:
                    say(
                        f"the process of {program[0].name} died (exit code {result.code}); the run goes on from its checkpoint"
                    )
                # After a kill the checkpoints of a pack may be of different rounds; if it dies again, it is too large.
                programs += group_jobs(again, out, pack) if deaths[program[0].name] == 1 else [[job] for job in again]
                continue
            messages, note = result
            failed |= messages
            if note:
                say(note)
    return failed


def group_jobs(jobs: list[Job], out: Path, pack: bool | None) -> list[list[Job]]:
    """Group the runs that can be packed together, in the order of the first of each group."""
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        key, folder = None, RunFolder(out / job.name)
        with contextlib.suppress(Exception):  # such as a damaged folder: its run will report it
            packing = pack or (pack is None and pick_device(job.config.device).type == "cuda")
            if packing and not _is_finished(job, folder):
                key = KINDS[job.kind].pack_key(job.config, folder)
        groups.setdefault(job.name if key is None else key, []).append(job)
    return list(groups.values())


def _programs(out: Path, processes: int, group: list[Job], tell: Any) -> tuple[list[list[Job]], str]:
    """Split a group into parts that fit in memory, with a message; into single runs where the first cannot be built."""
    first: Any = group[0].config
    try:
        cost = packs.cost(first, processes)
        parts = packs.split(group, cost.most)
        largest = max(map(len, parts))
        rounds = sum(job.config.rounds - RunFolder(out / job.name).last_checkpoint() for job in group)
        programs = "one program" if len(parts) == 1 else f"{len(parts)} programs"
        return parts, (
            f"packed: {len(group)} runs in {programs}, {group[0].name} ... {group[-1].name}; "
            f"{largest * cost.memory / 1e9:.1f} GB at a time, {cost.seconds * rounds:.0f} s if run one after another"
        )
    except Exception:  # each run will report it
        return [[job] for job in group], ""
    finally:
        torch.cuda.empty_cache()


def go_on_with_sweep(error: CannotWrite) -> CannotWrite:
    """The same error, with what to do in a sweep."""
    return CannotWrite(str(error).replace("go on with --resume", "the same command goes on"))


def _run_program(out: Path, program: list[Job], tell: Tell) -> tuple[dict[str, str], str]:
    """Run jobs in a worker process, packed if there are several; return messages of failed jobs and of a failed pack."""
    failed, note = {}, ""
    if len(program) > 1:
        configs: list[Any] = [job.config for job in program]
        try:
            with one_line_warnings():
                packs.run_packed(
                    configs, [out / job.name for job in program], [_progress(job, tell) for job in program]
                )
        except CannotWrite as error:
            raise go_on_with_sweep(error) from error
        except Exception as error:
            note = f"{len(program)} runs could not be packed ({_message(error)}) and were run one by one: {program[0].name}, ..."
        gc.collect()  # frees what the pack held on the device
        torch.cuda.empty_cache()
    for job in program:  # those that were packed are finished now
        folder, progress = RunFolder(out / job.name), _progress(job, tell)
        try:
            if not _is_finished(job, folder):
                with one_line_warnings(job.name):
                    KINDS[job.kind].run(job.config, out=folder.path, resume=folder.exists(), progress=progress)
            tell((job.name, job.config.rounds, job.config.rounds))
        except CannotWrite as error:  # nor could the other runs
            raise go_on_with_sweep(error) from error
        except Exception as error:
            failed[job.name] = _message(error)
    return failed, note


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, UndriftError) else repr(error)


def _progress(job: Job, tell: Tell) -> Progress:
    return lambda record, rounds: tell((job.name, record["round"], rounds))


def _is_finished(job: Job, folder: RunFolder) -> bool:
    """Whether the folder holds the finished run of this job; it is an error if it holds another run."""
    if not folder.exists():
        return False
    kind, was, now = KINDS[job.kind], folder.settings(), asdict(job.config)
    # A setting may be newer than the folder.
    pairs = [(n, was.get(n, kind.fields[n].default), now[n]) for n in now.keys() - {"set", *RESUMABLE}]
    for name, value in kind.algorithm_fields(job.config).items():
        pairs.append((name, was.get("set", {}).get(name), list(value) if isinstance(value, tuple) else value))
    for name, before, value in pairs:
        if before != value:
            raise BadRunFolder(f"{folder.path} holds another run: its {name} is {before}, not {value}")
    # Of the settings that a resumed run may change, these say when it ends.
    return folder.is_finished() and all(was.get(name, "") == now[name] for name in ("rounds", "stop_at"))
