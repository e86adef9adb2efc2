"""Runs of a sweep that are packed into one program: which ones go together, how many fit on the device, and their folders."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from undrift.algorithms.base import Algorithm
from undrift.core.device import arithmetic, available_memory, pick_device
from undrift.core.trees import nbytes
from undrift.data.dataset import Dataset
from undrift.data.federation import Federation
from undrift.data.load import load_dataset
from undrift.jobs.config import RunConfig, make_algorithm, parse_stop
from undrift.jobs.course import Course, Progress, drive
from undrift.jobs.folder import RunFolder
from undrift.jobs.registry import algorithm_class
from undrift.jobs.run import simulated
from undrift.jobs.start import set_out
from undrift.simulate.choose import bytes_per_client
from undrift.simulate.packed import Pack, structure
from undrift.simulate.replay import Outlook
from undrift.simulate.simulation import Simulation

DIFFER = ("seed", "warmup", "lr_decay", "lr_drops", "lr_drop", "set")  # settings in which packed runs may differ


def kind(config: RunConfig, folder: RunFolder) -> Hashable:
    """What runs that are packed together have in common; None for one that runs alone.

    The round at which they stand is a part of it: what was interrupted is packed again with those at the same round.
    """
    execution = folder.settings().get("execution", "auto") if folder.exists() else config.execution
    if config.compress or execution == "pool" or config.client_state == "disk" or "time" in parse_stop(config.stop_at):
        return None
    alg = algorithm(config)
    # Methods with a part of the server's work for each client are not written for a dimension of runs.
    if alg.personalises or alg.pools:
        return None
    same = {name: value for name, value in asdict(config).items() if name not in DIFFER}
    seed = config.seed if config.colour else None  # a client's colour is drawn under the seed
    return folder.reached(), seed, *same.items(), structure(alg)


def algorithm(config: RunConfig) -> Algorithm:
    made: Algorithm = make_algorithm(algorithm_class(config.algorithm), config.algorithm, config.set)
    return made


def set_up(config: RunConfig, dataset: Dataset, shared: Federation | None = None) -> tuple[RunConfig, Simulation]:
    """The resolved settings and the run itself, on the samples of another one."""
    alg, device = algorithm(config), pick_device(config.device)
    execution = "stacked" if device.type == "cpu" else config.execution
    config = replace(config, set=asdict(alg), execution=execution)
    simulation = simulated(config, alg, dataset, config.model, device)
    if shared is not None:
        simulation.data = replace(simulation.data, train=shared.train, test=shared.test)
    return config, simulation


class Cost(NamedTuple):
    """What a run takes, measured before a sweep begins."""

    most: int  # runs that fit into memory together
    memory: int  # bytes of each
    seconds: float  # of a round, when it is run alone, without evaluation


def cost(config: RunConfig, processes: int) -> Cost:
    """How much a run like this one takes; packed runs get half of the memory that is free, shared by so many processes."""
    config, simulation = set_up(config, load_dataset(config.dataset))
    outlook = Outlook(simulation)
    with arithmetic(config.precision, config.deterministic), contextlib.closing(simulation):
        attended = (simulation.attendance(t) for t in itertools.count())
        work = simulation.work(next(part for part in attended if len(part.ids)))
        working = bytes_per_client(simulation.net, simulation.state.x, simulation.state.buffers, work)
        _, _, everybody = simulation.serving()
        kept = nbytes(everybody)
        # Twice what the clients keep, and thrice the server's state: copies are made when a pack begins and when a stretch ends.
        one = outlook.clients * working + 2 * kept + 3 * nbytes(simulation.state)
        most = int(0.5 * available_memory(simulation.device) / processes / one)
        simulation.settings = replace(simulation.settings, eval_every=config.rounds + 32)
        simulation.rounds(1)  # the first one prepares everything
        seconds = min(timed(simulation) for _ in range(4))  # the second one may still be slow
    most = max(1, min(most, config.chunk // outlook.clients) if config.chunk else most)
    return Cost(most, one, seconds)


def timed(simulation: Simulation) -> float:
    """The seconds of a round, over up to four that are made at once."""
    began = time.perf_counter()
    made = len(simulation.rounds(4))
    return (time.perf_counter() - began) / made


def split(runs: Sequence[Any], most: int) -> list[list[Any]]:
    """The runs in as few parts as possible of about the same size, none with more than `most`.

    >>> split([1, 2, 3, 4, 5], 3)
    [[1, 2, 3], [4, 5]]
    """
    parts = -(-len(runs) // most)
    size = -(-len(runs) // parts)
    return [list(runs[at : at + size]) for at in range(0, len(runs), size)]


def run_packed(configs: Sequence[RunConfig], folders: Sequence[Path], progress: Sequence[Progress]) -> None:
    """Run to their end what begins together or stands at the same round, each run with a folder of its own."""
    dataset, shared, courses = load_dataset(configs[0].dataset), None, []
    with contextlib.ExitStack() as stack:
        stack.enter_context(arithmetic(configs[0].precision, configs[0].deterministic))
        for config, path, tell in zip(configs, folders, progress, strict=True):
            config, simulation = set_up(config, dataset, shared)
            shared = simulation.data
            folder = RunFolder(path)
            run = contextlib.closing(simulation)
            courses.append(stack.enter_context(set_out(run, config, folder, folder.exists(), tell)))
        drive_together(courses)


def drive_together(courses: list[Course[Simulation, RunConfig]]) -> None:
    """All runs to their end: together those that can, and afterwards alone those that had to leave the pack."""
    alone: list[Course[Simulation, RunConfig]] = []
    while len(together := [c for c in courses if c not in alone and c.ahead()[0]]) > 1:
        pack, whole = Pack([course.run for course in together]), True
        while whole:
            for course, records in zip(together, pack.scored_rounds(*together[0].ahead()), strict=True):
                if records:
                    course.take(records)
                else:
                    alone.append(course)
            whole = all(course not in alone and course.ahead()[0] for course in together)
    for course in sorted(courses, key=lambda course: course.ahead()[0]):  # first what only needs its end to be written
        drive(course)
