"""Runs for a table: packed where possible, each finished one kept as a line of results, and a clean stop in between."""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from undrift.core import stopping
from undrift.core.device import pick_device
from undrift.core.errors import CannotWrite, UndriftError
from undrift.core.version import __version__
from undrift.data.load import load_dataset
from undrift.jobs import packs
from undrift.jobs.config import MOST, JobConfig, RunConfig
from undrift.jobs.course import commit
from undrift.jobs.folder import RunFolder
from undrift.jobs.results import Line, Results, curve_of, identity_settings, key_of, milestones, scores_of
from undrift.jobs.suite import COMMANDS
from undrift.jobs.sweep import KINDS, Job, group_jobs

Say = Callable[[str], None]
LARGEST_STOP = 4 << 30  # bytes of checkpoints that a program may have to write when it is stopped: a few seconds
OF_ONE = ("seed", "rounds", "set", "eval_every", "val_fraction")  # settings on which the cost of a round hardly depends


PACED = {"row", "settings", "device", "seconds", "rounds"}  # what a line has that tells how fast a run was


class Run(NamedTuple):
    """One run that is wanted."""

    command: str
    config: JobConfig
    about: Mapping[str, Any]  # for its line: the suite, the column, the row, and whether it is a trial

    @property
    def key(self) -> str:
        return key_of(identity_settings(self.command, self.config))


class NoTime(Exception):
    """A program would not end in the minutes that are left, but would in those of a fresh start."""


class Batch:
    """Does runs in a folder, unless its results hold them already; none is begun that cannot end within `minutes`."""

    def __init__(
        self, results: Results, say: Say, pack: bool | None = None, device: str = "", minutes: float = 0.0
    ) -> None:
        self.results, self.say, self.pack, self.device = results, say, pack, device
        self.end, self.whole = time.monotonic() + 60 * minutes, 60 * minutes
        self.costs: dict[str, packs.Cost] = {}  # without times
        self.paces = {pace_key(line): pace_of(line) for line in results.lines.values() if line.keys() >= PACED}
        self.runs_folder = results.folder / "runs"  # only of runs that are not finished
        self.failed: dict[str, str] = {}
        self.commit = commit()

    def do(self, runs: Sequence[Run]) -> list[Line | None]:
        """Do all runs, and return their lines in the same order; None for one that failed."""
        wanted = {run.key: run for run in runs}
        missing = [run for key, run in wanted.items() if self.results.get(key) is None]
        jobs = {self.name(run): run for run in missing}
        listed = [Job(name, self.settings(run), COMMANDS[run.command]) for name, run in jobs.items()]
        for group in group_jobs(listed, self.runs_folder, self.pack):
            for part in self.parts([jobs[job.name] for job in group]):
                self.do_together(part)
        return [self.results.get(run.key) for run in runs]

    def name(self, run: Run) -> str:
        return f"{run.about['column']}-{run.about['row']}-{run.key}".replace("/", "_").replace(":", "_")

    def settings(self, run: Run) -> JobConfig:
        """The settings with those of this machine, which change no result; slow rounds and a stop bring checkpoints."""
        return replace(run.config, device=self.device or run.config.device, checkpoint_every=MOST)

    def parts(self, runs: list[Run]) -> list[list[Run]]:
        """Runs that can be packed, in parts that fit in memory together, and whose checkpoints are soon written at a stop."""
        if len(runs) == 1:
            return [runs]
        try:
            cost = self.room(runs[0])
            return packs.split(runs, max(1, min(cost.most, LARGEST_STOP // max(cost.state, 1))))
        except UndriftError:  # the runs will say it
            return [[run] for run in runs]

    def alike(self, run: Run) -> str:
        """A key that runs of the same cost share."""
        settings = identity_settings(run.command, run.config)
        return alike_key(run.about["row"], settings, device_name(self.settings(run)))

    def room(self, run: Run) -> packs.Cost:
        """How many such runs fit on the device together; nothing is run for it."""
        key = self.alike(run)
        if key not in self.costs:
            config: Any = self.settings(run)
            self.costs[key] = packs.cost(config, 1, timed=False)
        return self.costs[key]

    def pace(self, run: Run) -> float | None:
        """Seconds a round, as finished runs of the same cost took them, or as was measured; None where neither is known."""
        key = self.alike(run)
        measured = self.results.get(f"cost {key}")
        return self.paces.get(key, None if measured is None else float(measured["cost"][2]))

    def cost(self, run: Run) -> packs.Cost:
        """What one run costs, measured once for runs of the same shape on this device."""
        key = f"cost {self.alike(run)}"
        line = self.results.get(key)
        if line is None:
            found = measure(run.command, self.settings(run))
            line = {"key": key, "cost": list(found)}
            self.results.add([line])
        return packs.Cost(*line["cost"])

    def check_time(self, runs: Sequence[Run]) -> None:
        """Raise NoTime for a program that would be cut off, unless a fresh start would cut it off too."""
        pace, left = self.pace(runs[0]), self.end - time.monotonic()
        if not self.whole or pace is None:
            return
        rounds = sum(run.config.rounds - self.folder(run).last_checkpoint() for run in runs)
        if left < pace * rounds < self.whole:
            raise NoTime(f"{self.name(runs[0])} takes about {pace * rounds:.0f} s, and {max(left, 0):.0f} s are left")

    def do_together(self, runs: list[Run]) -> None:
        """Do runs as one program, or one by one if that fails, and keep their lines instead of their folders."""
        self.check_time(runs)
        if len(runs) > 1:
            began = time.perf_counter()
            try:
                self.keep(runs, self.run_federated(runs), len(runs))
                name, seconds = runs[0].about["row"], time.perf_counter() - began
                self.say(f"{len(runs)} runs of {name} in {runs[0].about['column']} as one program: {seconds:.1f} s")
                return
            except (CannotWrite, stopping.Stopped):
                raise
            except Exception as error:
                self.say(f"{len(runs)} runs could not be packed ({error}); they are done one by one")
            finally:
                free_memory()
        for run in runs:
            try:
                self.keep([run], [self.do_alone(run)], 1)
            except CannotWrite:
                raise
            except Exception as error:
                self.failed[self.name(run)] = str(error) if isinstance(error, UndriftError) else repr(error)
                self.say(f"{self.name(run)} failed: {self.failed[self.name(run)]}")
            finally:
                free_memory()

    def run_federated(self, runs: list[Run]) -> list[list[dict[str, Any]]]:
        """Runs of `undrift run`, together or one alone, from where they stood."""
        configs: list[Any] = [self.settings(run) for run in runs]
        paths, quiet = [self.folder(run).path for run in runs], [lambda record, rounds: None] * len(runs)
        return packs.run_packed(configs, paths, quiet, leave_models=False)

    def do_alone(self, run: Run) -> list[dict[str, Any]]:
        """One run, from where it stood."""
        if run.command == "run":
            return self.run_federated([run])[0]
        folder = self.folder(run)
        result = KINDS[COMMANDS[run.command]].run(self.given_settings(run), out=folder.path, resume=folder.exists())
        records: list[dict[str, Any]] = result.records
        return records

    def given_settings(self, run: Run) -> dict[str, Any]:
        """The settings that are given; what the run settles by itself, such as a pipeline's cuts, stays open."""
        config = self.settings(run)
        given = {n: v for n, v in identity_settings(run.command, config).items() if n != "command"}
        return given | {"device": config.device, "checkpoint_every": config.checkpoint_every}

    def folder(self, run: Run) -> RunFolder:
        return RunFolder(self.runs_folder / self.name(run))

    def keep(self, runs: Sequence[Run], records: Sequence[list[dict[str, Any]]], together: int) -> None:
        """Write the lines of finished runs, then remove their folders."""
        lines = [
            line_of(run, own, together, device_name(self.settings(run)), self.commit)
            for run, own in zip(runs, records, strict=True)
        ]
        self.results.add(lines)
        self.paces |= {pace_key(line): pace_of(line) for line in lines}
        for run in runs:
            shutil.rmtree(self.folder(run).path, ignore_errors=True)
        with contextlib.suppress(OSError):  # others are there
            self.runs_folder.rmdir()


def alike_key(row: str, settings: Mapping[str, Any], device: str) -> str:
    return f"{device} {row} {key_of({n: v for n, v in settings.items() if n not in OF_ONE})}"


def pace_key(line: Line) -> str:
    """The key of the runs that cost as much as a finished one."""
    return alike_key(line["row"], line["settings"], line["device"])


def pace_of(line: Line) -> float:
    """Seconds a round of a finished run; of a packed one its share."""
    return float(line["seconds"] / max(line["rounds"], 1))


def line_of(run: Run, records: Sequence[Mapping[str, Any]], together: int, device: str, commit: str) -> Line:
    """What is kept of a run."""
    trial = bool(run.about.get("trial"))
    last = records[-1]["round"] if records else 0
    line = (
        {"key": run.key}
        | dict(run.about)
        | {"settings": identity_settings(run.command, run.config), "seed": run.config.seed}
    )
    line |= {
        "rounds": last,
        "stopped": "rounds" if last == run.config.rounds else "diverged",
        "scores": scores_of(records),
    }
    if not trial:
        shown = next((n for n in ("accuracy", "own_dice", "dice", "c_index") if n in line["scores"]), "loss")
        line |= {"shown": shown, "curve": curve_of(records, shown), "reached": milestones(records)}
        line |= {"bytes": sum(record.get("bytes_up", 0) + record.get("bytes_down", 0) for record in records)}
    seconds = sum(record["seconds"] or 0.0 for record in records)
    line |= {"seconds": round(seconds, 3), "together": together, "device": device}
    return line | {"torch": torch.__version__, "undrift": __version__, "commit": commit}


def measure(command: str, config: Any) -> packs.Cost:
    """What a run costs: seconds a round, and bytes, as far as they are known before."""
    if isinstance(config, RunConfig):
        return packs.cost(config, 1)
    steps = 3
    short = {n: v for n, v in identity_settings(command, config).items() if n != "command"}
    short |= {"rounds": 3, "steps": steps, "eval_every": 3, "lr_drops": "", "device": config.device}
    records = KINDS[COMMANDS[command]].run(short).records
    workers = getattr(config, "workers", 1) or 16
    whole = config.steps or len(load_dataset(config.dataset).y_train) // (workers * config.batch)
    cuda = pick_device(config.device).type == "cuda"
    seconds = min(record["seconds"] for record in records)  # the first round prepares everything
    return packs.Cost(1, torch.cuda.max_memory_allocated() if cuda else 0, seconds * whole / steps)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device_name(config: JobConfig) -> str:
    device = pick_device(config.device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
