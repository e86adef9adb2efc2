"""`undrift run`, `dataparallel` and `pipe`: train, show the progress, and say what came out."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from undrift.cli.command import arg, command
from undrift.cli.console import ProgressDisplay
from undrift.cli.flags import Fields, training_arguments
from undrift.cli.folders import choose_folder
from undrift.cli.settings import read_settings
from undrift.core import ranks
from undrift.core.errors import BadSetting
from undrift.core.names import printable
from undrift.dataparallel import parallel_config as parallel
from undrift.jobs import config as federated
from undrift.jobs.plain_values import read_toml
from undrift.pipeline import pipe_config as pipeline

EITHER = "instead of --algorithm, with {}: the algorithm that {}"


@command(
    "run",
    "simulate federated training: one run",
    *training_arguments(federated),
    arg("--local", EITHER.format("--server", "clients run"), federated.WHAT, metavar="NAME"),
    arg("--server", EITHER.format("--local", "the server runs"), federated.WHAT, metavar="NAME"),
)
def run_command(arguments: argparse.Namespace) -> None:
    from undrift.jobs.run import run

    if arguments.local or arguments.server:
        if arguments.algorithm is not None:
            raise BadSetting("give --algorithm, or --local and --server, not both")
        arguments.algorithm = f"{arguments.local or 'fedavg'}+{arguments.server or 'fedavg'}"
    train(arguments, federated.FIELDS, run)


@command(
    "dataparallel",
    "train one model with compressed data-parallel workers",
    *training_arguments(parallel),
    aliases=["dp"],
)
def dataparallel_command(arguments: argparse.Namespace) -> None:
    from undrift.dataparallel.command import run_parallel

    train(arguments, parallel.FIELDS, run_parallel)


@command(
    "pipe",
    "train one model in blocks that work at the same time",
    *training_arguments(pipeline),
    arg("--schedule", "print the timeline of N batches and end", type=int, metavar="N"),
)
def pipe_command(arguments: argparse.Namespace) -> None:
    from undrift.pipeline.resolve import timeline
    from undrift.pipeline.train import run_pipe

    if arguments.schedule is None:
        train(arguments, pipeline.FIELDS, functools.partial(run_pipe, say=print))
    else:
        config, settings = read_settings(arguments, pipeline.FIELDS)
        print(timeline(pipeline.from_mapping(pipeline.plain(config) | settings), arguments.schedule))


def train(arguments: argparse.Namespace, fields: Fields, run: Callable[..., Any]) -> None:
    """Run what the file and the flags ask for, show its progress, and print its result."""
    config, settings = read_settings(arguments, fields)
    chosen = {n: f.default for n, f in fields.items()} | config | settings
    name = str(settings.get("method") or chosen.get("algorithm") or chosen.get("method"))
    folder = f"{name}-{chosen['dataset']}-seed{chosen['seed']}".replace("/", "_").replace(":", "_")
    with choose_folder(arguments, printable(folder)) as say_where:
        out, begun, score = arguments.out, 0, ""
        if arguments.resume:
            name = stored_name(out / "run.toml", name)

        def show(record: dict[str, Any], rounds: int) -> None:
            nonlocal begun, score
            if not begun:  # only now: a mistake in the settings needs neither folder nor bar
                begun = record["round"]
                say_where()
                display.start()
            if record["accuracy"] is not None:
                score = f"accuracy {record['accuracy']:.4f}"
            line = f"{name}: round {record['round']} of {rounds}{score and f', {score}'}"
            display.show(record["round"], rounds, begun - 1, score, line)

        with ProgressDisplay(name) as display:
            result = run(config, **settings, out=out, resume=arguments.resume, progress=show)
    if ranks.rank() == 0:
        for line in outcome(result, out):
            print(line)


def stored_name(file: Path, name: str) -> str:
    """The method of the run that goes on, which need not be given again; `name` if there is no run."""
    stored = read_toml(file) if file.exists() else {}
    return str(stored.get("algorithm", stored.get("method", name)))


def outcome(result: Any, out: Path) -> Iterator[str]:
    """What is said of a run that has ended."""
    last = result.records[-1] if result.records else {}
    scores = [r["accuracy"] for r in result.records if r["accuracy"] is not None]
    text = f"accuracy {scores[-1]:.4f}, best {max(scores):.4f} (on test)" if scores else f"loss {last.get('loss')}"
    for name in ("own_dice", "own_accuracy"):
        if last.get(name) is not None:
            text += f", {name} {last[name]:.4f} (mean over clients, each on its own samples)"
    end = f"stopped by {result.stopped}"
    if result.stopped == "diverged":
        end = f"diverged, so the model is that of round {result.model_round}; {result.config.advice()}"
    yield f"{len(result.records)} rounds, {text}; {end}; written to {out}"
    if "samples" in result.about:
        yield f"on {description(result.about)}"
    for remark in result.config.remarks():
        yield f"note: {remark}"


def description(about: dict[str, Any]) -> str:
    """What a run was trained on, and how its clients were run."""
    shape, classes = "x".join(map(str, about["inputs"])), about["classes"]
    text = f"{about['samples']} samples of {about['clients']} clients, tested on {about['test_samples']}"
    text += f"; inputs {shape}, " + (f"{classes} classes" if classes else "no class labels")
    return text + (f"; execution {about['execution']}" if "execution" in about else "")
