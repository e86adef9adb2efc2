"""Pack runs of a sweep into one program: which runs go together, how many fit on the device, and their folders."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from undrift.algorithms.base import Algorithm, Worker
from undrift.core.device import arithmetic, available_memory, pick_device
from undrift.core.trees import nbytes
from undrift.data.dataset import Dataset
from undrift.data.federation import Federation
from undrift.data.load import load_dataset
from undrift.jobs.config import RunConfig, build_algorithm
from undrift.jobs.course import Course, Progress, drive, pause
from undrift.jobs.folder import RunFolder
from undrift.jobs.run import build_simulation
from undrift.jobs.start import open_course
from undrift.jobs.stop_at import parse_stop
from undrift.simulate.choose import load_of
from undrift.simulate.packed import Pack, structure
from undrift.simulate.replay import Outlook
from undrift.simulate.simulation import Simulation

DIFFER = ("seed", "warmup", "lr_decay", "lr_drops", "lr_drop", "set")  # packed runs may differ in these settings


def kind(config: RunConfig, folder: RunFolder) -> Hashable:
    """The key that runs of one pack share, including their round; None for a run that cannot be packed."""
    execution = folder.settings().get("execution", "auto") if folder.exists() else config.execution
    alg, timed = build_algorithm(config), "time" in parse_stop(config.stop_at)
    apart = alg.personalises or alg.pools  # server work for each client, without a dimension for runs
    apart = apart or chooses_tensors(alg) or bool(config.lora)  # what is frozen differs with the seed
    apart = apart or config.privacy_clip > 0  # each round has its cost and its clipping to record
    apart = apart or config.asynchronous or bool(config.clock)  # each run has its own virtual time
    if config.compress or config.attack or execution == "pool" or config.client_state == "disk" or timed or apart:
        return None
    same = {name: value for name, value in asdict(config).items() if name not in DIFFER}
    seed = config.seed if config.colour else None  # which decides the clients' colours
    return folder.last_checkpoint(), seed, *same.items(), structure(alg)


def chooses_tensors(alg: Algorithm) -> bool:
    """Whether a method leaves tensors out, for good or from round to round."""
    return type(alg).trains is not Worker.trains or type(alg).at is not Worker.at


def set_up(
    config: RunConfig, dataset: Dataset, shared: Federation | None = None, alone: bool = False
) -> tuple[RunConfig, Simulation]:
    """Resolve the settings and build the simulation, on the samples of `shared` if given."""
    alg, device = build_algorithm(config), pick_device(config.device)
    execution = "stacked" if device.type == "cpu" and not alone else config.execution
    config = replace(config, set=asdict(alg), execution=execution)
    simulation = build_simulation(config, alg, dataset, config.model, device)
    if shared is not None:
        simulation.data = replace(simulation.data, train=shared.train, test=shared.test)
    return config, simulation


class Cost(NamedTuple):
    """The measured cost of a run."""

    most: int  # runs that fit into memory together
    memory: int  # bytes a run
    seconds: float  # seconds a round, for a run alone and without evaluation; 0 where that was not asked for
    state: int = 0  # bytes that a checkpoint of a run holds, about


def cost(config: RunConfig, processes: int, timed: bool = True) -> Cost:
    """Measure the cost of a run. Packs may use half of the free memory, which `processes` share."""
    config, simulation = set_up(config, load_dataset(config.dataset))
    outlook = Outlook(simulation)
    with arithmetic(config.precision, config.deterministic), contextlib.closing(simulation):
        cohorts = (simulation.attendance(t) for t in itertools.count())
        work = simulation.work(next(cohort for cohort in cohorts if len(cohort.ids)))
        working = load_of(simulation.state.x, simulation.state.buffers, work).bytes
        _, _, clients = simulation.serving()
        # A pack copies both states when it begins, and the server's again when a stretch ends.
        state = nbytes(simulation.state) + nbytes(clients)
        one = outlook.clients * working + 2 * nbytes(clients) + 3 * nbytes(simulation.state)
        most = int(0.5 * available_memory(simulation.device) / processes / one)
        seconds = 0.0
        if timed:
            simulation.settings = replace(simulation.settings, eval_every=config.rounds + 32)
            simulation.rounds(1)  # prepares everything
            seconds = min(time_round(simulation) for _ in range(4))  # the first one may still be slow
    most = max(1, min(most, config.chunk // outlook.clients) if config.chunk else most)
    return Cost(most, one, seconds, state)


def time_round(simulation: Simulation) -> float:
    """The mean seconds of up to four rounds."""
    began = time.perf_counter()
    count = len(simulation.rounds(4))
    return (time.perf_counter() - began) / count


def split(runs: Sequence[Any], most: int) -> list[list[Any]]:
    """Split runs into as few parts as possible, of about equal size and at most `most` runs.

    >>> split([1, 2, 3, 4, 5], 3)
    [[1, 2, 3], [4, 5]]
    """
    parts = -(-len(runs) // most)
    size = -(-len(runs) // parts)
    return [list(runs[at : at + size]) for at in range(0, len(runs), size)]


def run_packed(
    configs: Sequence[RunConfig], folders: Sequence[Path], progress: Sequence[Progress], leave_models: bool = True
) -> list[list[dict[str, Any]]]:
    """Run to their end runs that stand at the same round, each in its folder; return their records.

    Without `leave_models` only what an interruption needs is written.
    """
    dataset, shared, courses = load_dataset(configs[0].dataset), None, []
    with contextlib.ExitStack() as stack:
        stack.enter_context(arithmetic(configs[0].precision, configs[0].deterministic))
        for config, path, show in zip(configs, folders, progress, strict=True):
            config, simulation = set_up(config, dataset, shared, alone=len(configs) == 1)
            shared, folder = simulation.data, RunFolder(path)
            context = open_course(contextlib.closing(simulation), config, folder, folder.exists(), show)
            courses.append(stack.enter_context(context))
            courses[-1].leaves_model = leave_models
        drive_together(courses)
    return [course.records for course in courses]


def drive_together(courses: list[Course[Simulation, RunConfig]]) -> None:
    """Drive all runs to their end: together while they can, then alone those that had to leave the pack."""
    alone: list[Course[Simulation, RunConfig]] = []
    while len(together := [c for c in courses if c not in alone and c.ahead()[0]]) > 1:
        pack, whole = Pack([course.run for course in together]), True
        while whole:
            pause(courses)
            for course, records in zip(together, pack.scored_rounds(*together[0].ahead()), strict=True):
                if records:
                    course.take(records)
                    course.seconds *= len(together)  # its records have each run's share
                else:
                    alone.append(course)
            whole = all(course not in alone and course.ahead()[0] for course in together)
    for course in sorted(courses, key=lambda course: course.ahead()[0]):  # first those that have no rounds left
        drive(course, courses)
