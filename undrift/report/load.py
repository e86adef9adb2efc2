"""Read run folders, and group runs that differ only in their seed."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from undrift.core.errors import BadRunFolder
from undrift.core.outline import outline
from undrift.core.run_files import DEPLOYED, ROUNDS, SETTINGS, Checkpoint, last_checkpoint, read_settings
from undrift.report.records import Records, read_records

DEPTH = 2  # levels below a given path that are searched for run folders
TASK = ("dataset", "partition", "model", "clients", "colour")  # scores compare only if these are equal
# Settings that do not change the results.
HOW = (
    *("device", "execution", "chunk", "checkpoint_every", "deterministic"),
    *("replay", "compile", "client_state", "differences"),
)
# By command, the settings that belong to a method as fields belong to an algorithm.
OWN = {
    "dp": outline("undrift.dataparallel.parallel_config").OWN,
    "pipe": outline("undrift.pipeline.pipe_config").OWN,
}
NAMED_BY_VALUE = ("dataset", "partition", "model")  # values that need no name before them


class Run(NamedTuple):
    """One run folder."""

    folder: Path
    settings: Mapping[str, Any]  # flat: run.toml with the fields of its [set] table
    records: Records  # the lines of rounds.jsonl
    made: Mapping[str, Any] = {}  # the [made] table: versions, commit, device
    fields: frozenset[str] = frozenset()  # the settings that are fields of the algorithm
    command: str = "run"  # the command that runs it again
    kind: str = "run"  # the command that made it: run, dp, pipe or deploy
    stopped: str = ""  # why it has ended, such as "diverged"; "" if it has not

    @property
    def rounds(self) -> int:
        """The number of recorded rounds."""
        return int(self.records.column("round")[-1]) if len(self.records) else 0


class Group(NamedTuple):
    """Runs that differ only in their seed; the report compares groups."""

    label: str
    algorithm: str
    kind: str  # as of its runs
    task: str  # groups of one kind with the same text may be compared
    runs: list[Run]  # one for each seed
    repeats: list[Run]  # further runs of a seed; counting them would feign certainty


def load(paths: list[Path]) -> list[Run]:
    """Read the runs in the given paths, each a run folder or a folder that holds some."""
    return tell_apart([_load_one(folder) for folder in find(paths)])


def tell_apart(runs: list[Run]) -> list[Run]:
    """The runs, with data, models and losses told apart that go by one name, as objects in Python and files that changed do."""
    both = ("dataset", "model")
    names = ("dataset", ("dataset",), "samples"), ("model", both, "layers"), ("loss", both, "loss")
    for setting, alike, fact in names:
        keys = [repr([run.kind, *(run.settings.get(name) for name in alike)]) for run in runs]
        found: dict[str, set[str]] = {}
        for key, run in zip(keys, runs, strict=True):
            found.setdefault(key, set()).add(_identity(run, fact))
        for n, (key, run) in enumerate(zip(keys, runs, strict=True)):
            if len(found[key] - {""}) > 1 and (which := _identity(run, fact)):
                named = which if setting == fact else f"{run.settings.get(setting)} {which[:6]}"
                runs[n] = run._replace(settings={**run.settings, setting: named})
    return runs


def _identity(run: Run, fact: str) -> str:
    """What [made.task] says of the run's data, model or loss; empty if it says nothing."""
    task = run.made.get("task")
    return str(task.get(fact, "")) if isinstance(task, Mapping) else ""


def find(paths: list[Path]) -> list[Path]:
    """The run folders in the given paths."""
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise BadRunFolder(f"{path} does not exist; give a run folder or a folder that holds some")
        for folder in _run_folders(path, DEPTH):
            folders.setdefault(folder.resolve(), folder)
    if not folders:
        where = ", ".join(map(str, paths)) or "the given paths"
        raise BadRunFolder(f"no run folder (one with a run.toml) in {where}; make one with undrift run --out")
    return list(folders.values())


def sweep_target(paths: list[Path]) -> float | None:
    """The target accuracy of the first sweep.toml in the paths that has one."""
    for path in paths:
        if (path / "sweep.toml").is_file():
            sweep = _toml(path / "sweep.toml").get("sweep", {})
            target = number(sweep, "target") if isinstance(sweep, dict) else None
            if target is not None:
                return target
    return None


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group the runs of a kind by everything but their seed, in their order. Kinds have other settings, so other labels."""
    kinds: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        key = repr(sorted((name, repr(value)) for name, value in run.settings.items() if name != "seed"))
        kinds.setdefault(run.kind, {}).setdefault(key, []).append(run)
    return [group for alike in kinds.values() for group in _groups_of_a_kind(list(alike.values()))]


def by_task(groups: list[Group]) -> list[list[Group]]:
    """Split the groups into lists that may be compared."""
    tasks: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        tasks.setdefault((group.kind, group.task), []).append(group)
    return list(tasks.values())


def number(record: Mapping[str, Any], key: str) -> float | None:
    """A finite number, or None for anything else."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        return None
    return float(value) if abs(value) < 1e300 else None


def as_text(value: Any) -> str:
    """A setting's value as in TOML, without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else str(value)


def varying_settings(runs: list[Run]) -> list[str]:
    """The settings, other than the seed, that are not the same in all runs."""
    return [
        name for name in _all_names(runs) if name != "seed" and len({repr(run.settings.get(name)) for run in runs}) > 1
    ]


def _run_folders(path: Path, depth: int) -> list[Path]:
    if (path / SETTINGS).is_file():
        return [path]
    if depth == 0 or not path.is_dir():
        return []
    children = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    return [folder for child in children for folder in _run_folders(child, depth - 1)]


def _load_one(folder: Path) -> Run:
    settings, run = read_settings(folder)
    fields, made = settings.pop("set", {}), settings.pop("made", {})
    if not isinstance(fields, dict) or not isinstance(made, dict):
        raise BadRunFolder(f"{folder / SETTINGS} is damaged: [set] and [made] must be tables")
    command = str(settings.pop("command", "dp" if "method" in settings else "run"))
    if command == "dp":
        settings = {"algorithm": settings.pop("method"), **settings}
    if not isinstance(settings.get("algorithm"), str):
        raise BadRunFolder(f"{folder / SETTINGS} names no algorithm; is it the file of a run?")
    made = {name: settings.pop(name) for name in HOW if name in settings} | made  # [made] knows the real device
    fields = {f"set.{name}" if name in settings else name: value for name, value in fields.items()}
    kind = "deploy" if (folder / DEPLOYED).exists() else command
    last = last_checkpoint(folder, run)
    stopped = str(last.facts.get("stopped", "")) if last and last.facts.get("finished") else ""
    own = frozenset(fields) | {name for name in OWN.get(command, ()) if name in settings}
    return Run(folder, settings | fields, _records(folder, run, last), made, own, command, kind, stopped)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRunFolder(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or nested a thousand times
        raise BadRunFolder(f"{path} is not valid TOML: {error}") from error


def _records(folder: Path, run: str, last: Checkpoint | None) -> Records:
    """The rounds, also those after the last checkpoint: the run may go on, or was killed."""
    return read_records(folder / ROUNDS, run, last.lines(ROUNDS) if last else None)


def _groups_of_a_kind(alike: list[list[Run]]) -> list[Group]:
    """A group for each list of runs that differ only in their seed. Labels say what differs within a task."""
    firsts = [members[0] for members in alike]
    varying = set(varying_settings(firsts))
    tasks = [_task(first, varying) for first in firsts]
    rivals: dict[str, list[Run]] = {}
    for task, first in zip(tasks, firsts, strict=True):
        rivals.setdefault(task, []).append(first)
    named = {task: _named_settings(runs) for task, runs in rivals.items()}
    groups = []
    for members, task in zip(alike, tasks, strict=True):
        algorithm, kept = str(members[0].settings["algorithm"]), _longest_of_each_seed(members)
        words = [f"{name}={as_text(members[0].settings.get(name))}" for name in named[task][algorithm]]
        repeats = [run for run in members if all(run is not k for k in kept)]
        groups.append(Group(" ".join([algorithm, *words]), algorithm, members[0].kind, task, kept, repeats))
    return groups


def _task(run: Run, varying: set[str]) -> str:
    """What a run has to solve: the main facts, and others that are not the same in all runs."""
    facts = [name for name in TASK if name in run.settings and (name in NAMED_BY_VALUE or name in varying)]
    return ", ".join(_place(run, name) for name in facts)


def _named_settings(rivals: list[Run]) -> dict[str, list[str]]:
    """What labels name, by algorithm: settings that vary among all, and fields that vary among the algorithm's own runs."""
    among_all = varying_settings(rivals)
    fields = {name for run in rivals for name in run.fields}
    names = [name for name in _all_names(rivals) if name not in ("seed", "algorithm", *TASK)]
    named = {}
    for algorithm in dict.fromkeys(str(run.settings["algorithm"]) for run in rivals):
        own = varying_settings([run for run in rivals if run.settings["algorithm"] == algorithm])
        named[algorithm] = [name for name in names if name in own or (name in among_all and name not in fields)]
    return named


def _all_names(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.settings))


def _place(run: Run, name: str) -> str:
    value = as_text(run.settings.get(name))
    return value if name in NAMED_BY_VALUE and name in run.settings else f"{name}={value}"


def _longest_of_each_seed(runs: list[Run]) -> list[Run]:
    best: dict[str, Run] = {}
    for run in runs:
        seed = repr(run.settings.get("seed"))
        if seed not in best or run.rounds > best[seed].rounds:
            best[seed] = run
    return list(best.values())
