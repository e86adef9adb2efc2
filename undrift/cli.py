"""The command line: `undrift run`, `deploy`, `dataparallel`, `pipe`, `sweep`, `report` and more. No logic of its own."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError

from undrift import __version__
from undrift.algorithms.settings import looks_at_single_uploads
from undrift.core import ranks
from undrift.core.errors import BadSetting, LostRank, UndriftError, UnknownName
from undrift.dataparallel import command as parallel
from undrift.deploy import settings as deployment
from undrift.jobs.config import CHOICES, FIELDS, TYPES, from_toml, parse_value, read_toml
from undrift.pipeline import settings as pipeline

KINDS = ("algorithms", "methods", "datasets", "models", "partitions")


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a mistake with one line, and a typo with the nearest name."""

    def error(self, message: str) -> NoReturn:
        raise BadSetting(f"{message}; try '{self.prog} --help'")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            old = unknown[0].split("=")[0].removeprefix("--").replace("-", "_")
            if old in deployment.RENAMED:
                raise BadSetting(f"--{old} is called --{deployment.RENAMED[old]} now".replace("_", "-"))
            flags = [o for a in self._subparser(found.command)._actions for o in a.option_strings]
            raise UnknownName(f"argument of '{self.prog} {found.command}'", unknown[0].split("=")[0], flags)
        return found

    def _subparser(self, command: str) -> argparse.ArgumentParser:
        (action,) = (a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        parser: argparse.ArgumentParser = action.choices[command]
        return parser


def parser() -> Parser:
    top = Parser(
        prog="undrift", description="Federated and distributed training that does not drift.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"undrift {__version__}")
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")

    run = commands.add_parser("run", help="simulate one federated training run", allow_abbrev=False)
    add_training(run, FIELDS, TYPES, CHOICES)
    run.add_argument("--local", metavar="NAME", help="the clients' part of this algorithm, with --server")
    run.add_argument("--server", metavar="NAME", help="the server's part of this algorithm, with --local")

    deploy = commands.add_parser(
        "deploy",
        help="real clients over Flower: write an app, make keys, or run it all on this machine",
        allow_abbrev=False,
    )
    deploy.add_argument("action", metavar="init|local|keys")
    deploy.add_argument(
        "place", nargs="?", type=Path, metavar="DIR", help="init, keys: a new folder; local: for the logs"
    )
    deploy.add_argument("--config", type=Path, metavar="FILE.toml", help="settings; flags override them")
    deploy.add_argument("--host", default="127.0.0.1", help="init, keys: the server's address [127.0.0.1]")
    deploy.add_argument("--insecure", action="store_true", help="local: without TLS and node authentication")
    deploy.add_argument(
        "--data", type=Path, metavar="FOLDER", help="local, with --dataset own: NAME.npz for each client"
    )
    add_flags(deploy, deployment.FLAGS, deployment.TYPES, CHOICES)

    workers = commands.add_parser(
        "dataparallel",
        aliases=["dp"],
        help="train one model with compressed data-parallel workers",
        allow_abbrev=False,
    )
    add_training(workers, parallel.FIELDS, parallel.TYPES, parallel.CHOICES)

    pipe = commands.add_parser("pipe", help="train one model in blocks that work at the same time", allow_abbrev=False)
    add_training(pipe, pipeline.FIELDS, pipeline.TYPES, pipeline.CHOICES)
    pipe.add_argument("--schedule", type=int, metavar="N", help="print the timeline of N batches and end")

    sweep = commands.add_parser("sweep", help="run algorithms x settings x seeds", allow_abbrev=False)
    sweep.add_argument("file", type=Path, metavar="FILE.toml")
    sweep.add_argument("--out", type=Path, required=True, metavar="DIR")
    sweep.add_argument(
        "--processes", type=int, default=0, metavar="N", help="runs at a time [one a core; one on a GPU]"
    )
    sweep.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run what shares shapes as one program [on a GPU]",
    )

    report = commands.add_parser("report", help="tables and plots of run folders as one HTML page", allow_abbrev=False)
    report.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    report.add_argument("--out", type=Path, required=True, metavar="FILE.html")
    report.add_argument("--target", type=float, metavar="ACCURACY", help="for rounds and bytes to a target")

    listing = commands.add_parser("list", help="what there is", allow_abbrev=False)
    listing.add_argument("kind", metavar="|".join(KINDS))
    listing.add_argument("--json", action="store_true")

    data = commands.add_parser(
        "data", help="which data sets are there, prepare one, or show a partition", allow_abbrev=False
    )
    data.add_argument("action", metavar="list|prepare|show")
    data.add_argument("name", nargs="?", default="digits", help="a data set [digits]")
    data.add_argument("--partition", default="dirichlet:0.1", metavar="SPEC")
    data.add_argument("--clients", type=int, default=100, metavar="N")
    data.add_argument("--seed", type=int, default=0)
    data.add_argument("--own-test", type=float, default=0.0, metavar="F", help="the share that clients hold out [0]")
    data.add_argument(
        "--out", type=Path, metavar="FILE", help="prepare: where NAME.npz goes; show: a .png or .svg picture"
    )

    figures = commands.add_parser(
        "figures", help="a map of the selector, loss surfaces and outlined pictures, for the report", allow_abbrev=False
    )
    figures.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="finished runs of a personal method")

    predict = commands.add_parser("predict", help="use a run's super model on a folder of pictures", allow_abbrev=False)
    predict.add_argument(
        "--super", type=Path, required=True, metavar="DIR", help="the folder of a finished personal run"
    )
    predict.add_argument("--in", type=Path, dest="pictures", metavar="FOLDER", help="pictures")
    predict.add_argument("--out", type=Path, metavar="FOLDER", help="for masks, overlays and predictions.csv")
    predict.add_argument("--gamma", type=float, metavar="GAMMA", help="another threshold than the stored one")
    predict.add_argument(
        "--site", metavar="SITE", help="use this site's model for all: its name or number, 0 for the server's"
    )
    predict.add_argument(
        "--tune-gamma", action="store_true", help="first tune it on the run's validation samples, and store it"
    )

    cite = commands.add_parser(
        "cite", help="the BibTeX entry of an algorithm's or a method's paper", allow_abbrev=False
    )
    cite.add_argument("name")
    return top


def add_training(
    command: argparse.ArgumentParser,
    fields: Mapping[str, dataclasses.Field[Any]],
    types: Mapping[str, Any],
    choices: Mapping[str, tuple[str, ...]],
) -> None:
    """A file of settings, a flag for each, and the run's folder."""
    command.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="settings; flags override them")
    add_flags(command, fields, types, choices)
    name = "algorithm" if "algorithm" in fields else "method"
    folder = f"the run's folder [runs/{name.upper()}-DATASET-seedN]"
    command.add_argument("--out", type=Path, metavar="DIR", help=folder)
    command.add_argument("--resume", action="store_true", help="go on from the folder's last checkpoint")


def add_flags(
    command: argparse.ArgumentParser,
    fields: Mapping[str, dataclasses.Field[Any]],
    types: Mapping[str, Any],
    choices: Mapping[str, tuple[str, ...]],
) -> None:
    for name, field in fields.items():
        flag, about = f"--{name.replace('_', '-')}", str(field.metadata["help"])
        if name == "set":
            command.add_argument(flag, action="append", default=None, metavar="FIELD=VALUE", help=about)
        elif types[name] is bool:
            action = argparse.BooleanOptionalAction if field.default else "store_true"  # what is on can be switched off
            command.add_argument(flag, action=action, default=None, help=about)
        else:
            shown = "|".join(choices[name]) if name in choices else name.upper()
            command.add_argument(flag, type=types[name], default=None, metavar=shown, help=f"{about} [{field.default}]")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one line on standard error and exit code 2."""
    try:
        with ranks.join():
            arguments = parser().parse_args(argv)
            if ranks.count() > 1 and COMMANDS[arguments.command] not in (
                run_command,
                dataparallel_command,
                pipe_command,
            ):
                raise BadSetting(
                    f"torchrun is for undrift run, dataparallel and pipe; start 'undrift {arguments.command}' without it"
                )
            return int(COMMANDS[arguments.command](arguments) or 0)
    except UndriftError as error:
        if ranks.speaks() or isinstance(error, LostRank):
            print(f"undrift: {error}", file=sys.stderr, flush=True)
        if not isinstance(error, LostRank):  # rank 0 may be waiting for this one, and notices when it has ended
            ranks.wait_for_first_rank()
        return 2
    except (OSError, OverflowError, SafetensorError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if ranks.speaks():
            print(f"undrift: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        ranks.wait_for_first_rank()
        return 2
    except KeyboardInterrupt as stopped:
        if ranks.speaks():
            print(f"undrift: stopped; {str(stopped) or 'go on with --resume'}", file=sys.stderr)
        return 130


def run_command(arguments: argparse.Namespace) -> None:
    from undrift.jobs.run import run

    if arguments.local or arguments.server:
        if arguments.algorithm is not None:
            raise BadSetting("give --algorithm, or --local and --server, not both")
        arguments.algorithm = f"{arguments.local or 'fedavg'}+{arguments.server or 'fedavg'}"
    train(arguments, FIELDS, run)


def dataparallel_command(arguments: argparse.Namespace) -> None:
    train(arguments, parallel.FIELDS, parallel.run_parallel)


def pipe_command(arguments: argparse.Namespace) -> None:
    from undrift.pipeline.resolve import timeline
    from undrift.pipeline.train import run_pipe

    if arguments.schedule is None:
        train(arguments, pipeline.FIELDS, functools.partial(run_pipe, say=print))
        return
    config, settings = read_settings(arguments, pipeline.FIELDS)
    print(timeline(pipeline.from_mapping(pipeline.plain(config) | settings), arguments.schedule))


def deploy_command(arguments: argparse.Namespace) -> None:
    from undrift.deploy.command import deploy

    config, settings = read_settings(arguments, deployment.FLAGS)
    deployment.check_flags(settings)
    deploy(arguments.action, arguments.place, config | settings, arguments.host, arguments.insecure, arguments.data)


def read_settings(
    arguments: argparse.Namespace, fields: Mapping[str, dataclasses.Field[Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the file, with those of --set in its `set`, and the settings of the flags, which override them."""
    config = {} if arguments.config is None else from_toml(arguments.config)
    settings = {n: v for n in fields if n != "set" and (v := getattr(arguments, n)) is not None}
    name = settings.get("algorithm", settings.get("method"))
    if name is not None and name != config.get("algorithm", config.get("method")):
        config.pop("set", None)  # another algorithm: the file's fields are not its own
    own = set_fields(arguments.set)
    for twice in own.keys() & settings:
        raise BadSetting(f"--{twice.replace('_', '-')} and --set {twice} are the same setting; give one of them")
    return (config | {"set": dict(config.get("set", {})) | own} if own else config), settings


def set_fields(pairs: list[str] | None) -> dict[str, Any]:
    """The algorithm's fields that --set gives."""
    fields = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise BadSetting(f"--set takes FIELD=VALUE, not {pair!r}")
        fields[name] = parse_value(value)
    return fields


def train(arguments: argparse.Namespace, fields: Mapping[str, dataclasses.Field[Any]], run: Callable[..., Any]) -> None:
    """Run what the file and the flags ask for, with a bar of progress, and say what came of it."""
    config, settings = read_settings(arguments, fields)
    named = {n: f.default for n, f in fields.items()} | config | settings
    name = str(settings.get("method") or named.get("algorithm") or named["method"])
    folder = f"{name}-{named['dataset']}-seed{named['seed']}".replace("/", "_").replace(":", "_")
    out = arguments.out or Path("runs") / folder
    tell(name, out, functools.partial(run, config, **settings), arguments.resume)


def tell(name: str, out: Path, run: Callable[..., Any], resume: bool) -> None:
    """Run with a bar of progress, and say what came of it."""
    if resume and (out / "run.toml").exists():  # it knows its own method, which need not be given again
        stored = read_toml(out / "run.toml")
        name = str(stored.get("algorithm", stored.get("method", name)))
    bar = progress_bar()
    task = bar.add_task(name, total=None, accuracy="")

    def show(record: dict[str, Any], rounds: int) -> None:
        bar.start()  # with the first round: a mistake in the settings needs no bar
        known = {} if record["accuracy"] is None else {"accuracy": f"accuracy {record['accuracy']:.4f}"}
        bar.update(task, completed=record["round"], total=rounds, **known)

    try:
        result = run(out=out, resume=resume, progress=show)
    finally:
        if bar.live.is_started:
            bar.stop()
    if ranks.rank():
        return
    last = result.records[-1] if result.records else {}
    scores = [r["accuracy"] for r in result.records if r["accuracy"] is not None]
    text = f"accuracy {scores[-1]:.4f}, best {max(scores):.4f} (on test)" if scores else f"loss {last.get('loss')}"
    for name in ("own_dice", "own_accuracy"):
        if last.get(name) is not None:
            text += f", {name} {last[name]:.4f} (mean over clients, each on its own samples)"
    print(f"{len(result.records)} rounds, {text}; stopped by {result.stopped}; written to {out}")
    for remark in result.config.remarks():
        print(f"note: {remark}")


def sweep_command(arguments: argparse.Namespace) -> int:
    from undrift.jobs.sweep import plan, run_all
    from undrift.report import page

    jobs, sweep = plan(arguments.file)
    if arguments.processes < 0:
        raise BadSetting(f"processes must be at least 1, not {arguments.processes}")
    processes = arguments.processes or default_processes(jobs[0].config.device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "sweep.toml").write_bytes(arguments.file.read_bytes())
    with progress_bar() as bar:
        whole = bar.add_task(f"{len(jobs)} runs", total=sum(j.config.rounds for j in jobs), accuracy="")
        at: dict[str, int] = {}

        def show(name: str, done: int, rounds: int) -> None:
            at[name] = done
            finished = sum(at.get(j.name) == j.config.rounds for j in jobs)
            bar.update(whole, completed=sum(at.values()), accuracy=f"{finished} of {len(jobs)} done, now {name}")

        try:
            failed = run_all(jobs, arguments.out, processes, show, bar.console.print, arguments.pack)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command again goes on") from None
    for name, message in failed.items():
        print(f"undrift: {name} failed: {message}", file=sys.stderr)
    if not any((arguments.out / job.name / "run.toml").exists() for job in jobs):
        return 1  # nothing to report of
    target = sweep.get("target")
    print_summary([arguments.out], target)
    page.write([arguments.out], arguments.out / "report.html", target)
    print(f"written to {arguments.out / 'report.html'}")
    return 1 if failed else 0


def report_command(arguments: argparse.Namespace) -> None:
    from undrift.report import page
    from undrift.report.load import sweep_target

    if arguments.out.suffix not in (".html", ".htm"):
        raise BadSetting(f"the report is an HTML page; give --out a name that ends in .html, not {arguments.out}")
    target = arguments.target if arguments.target is not None else sweep_target(arguments.folders)
    page.write(arguments.folders, arguments.out, target)
    print_summary(arguments.folders, target)
    print(f"written to {arguments.out}")


def print_summary(folders: list[Path], target: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from undrift.report import load as runs
    from undrift.report import scores, summary, text

    console = Console(width=None if sys.stdout.isatty() else 120)
    for groups in runs.by_task(runs.grouped(runs.load(folders))):
        header, *rows = text.table(scores.ranked(groups), target, brief=True)
        shown = Table(*header)
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
        console.print(summary.verdict(groups), highlight=False)


def list_command(arguments: argparse.Namespace) -> None:
    entries = listed(arguments.kind)
    if arguments.json:
        print(json.dumps(entries, indent=1))
        return
    width = max(len(entry["name"]) for entry in entries)
    for entry in entries:
        needs = f"  (of the updates the server needs: {entry['server_needs']})" if "server_needs" in entry else ""
        print(f"{entry['name']:{width}}  {entry['about']}{needs}")


def listed(kind: str) -> list[dict[str, Any]]:
    """What `undrift list KIND --json` prints."""
    from undrift.core.names import describe, names
    from undrift.data.partition import PARTITIONS
    from undrift.dataparallel.methods import FILES
    from undrift.jobs.registry import algorithm_class

    if kind not in KINDS:
        raise UnknownName("kind of list", kind, KINDS)
    if kind == "methods":
        return [{"name": n, "about": (file.__doc__ or "").splitlines()[0]} for n, file in FILES.items()]
    if kind == "partitions":
        return [{"name": n, "about": (inspect.getdoc(f) or "").splitlines()[0]} for n, f in PARTITIONS.items()]
    entries: list[dict[str, Any]] = [{"name": n, "about": describe(kind, n)} for n in names(kind)]
    if kind == "algorithms":
        for entry in entries:
            found = algorithm_class(entry["name"])
            entry["server_needs"] = "single updates" if looks_at_single_uploads(found) else "their sum"
            entry["fields"] = {f.name: f.default for f in dataclasses.fields(found)}
    return entries


def data_command(arguments: argparse.Namespace) -> None:
    from undrift.data import load as datasets

    root = datasets.data_root()
    if arguments.action == "list":
        for name, state in datasets.available(root):
            print(f"{name:15} {state}")
    elif arguments.action == "prepare":
        print(f"written to {datasets.prepare(arguments.name, root, arguments.out)}")
    elif arguments.action == "show":
        from undrift.report.pictures import partition_picture, partition_text

        dealt = (arguments.partition, arguments.clients, arguments.seed, arguments.own_test)
        counts, held_out = datasets.class_counts(datasets.load_dataset(arguments.name), *dealt)
        for row in [*partition_text(counts), *(partition_text(held_out)[1:] if arguments.own_test else [])]:
            print("  ".join(f"{cell:24}" for cell in row).rstrip())
        title = f"{arguments.name}, {arguments.partition}, {arguments.clients} clients"
        if arguments.own_test:
            print("The second row is what clients hold out, to be tested on.")
            title += "; orange: held out by the client"
        out = arguments.out or Path(f"{arguments.name}-{arguments.partition.replace(':', '-')}.png")
        partition_picture(counts, out, title, held_out)
        print(f"written to {out}")
    else:
        raise UnknownName("data action", arguments.action, ("list", "prepare", "show"))


def predict_command(arguments: argparse.Namespace) -> None:
    from undrift.personal.supermodel import SuperModel, predict_folder, tune

    if arguments.tune_gamma:
        print(tune(arguments.super))
    if arguments.pictures is None and arguments.out is None and arguments.tune_gamma:
        return
    if arguments.pictures is None or arguments.out is None:
        raise BadSetting("predict needs --in FOLDER with pictures and --out FOLDER for what is made of them")
    model = SuperModel.load(arguments.super)
    site = None if arguments.site is None else model.number_of(arguments.site)
    count = predict_folder(model, arguments.pictures, arguments.out, arguments.gamma, site)
    print(f"{count} pictures; written to {arguments.out}")


def figures_command(arguments: argparse.Namespace) -> None:
    from undrift.personal.figures import look

    for folder in arguments.folders:
        print(f"written to {look(folder)}; undrift report shows it", flush=True)
    if importlib.util.find_spec("sklearn") is None:
        print(
            "without a map of the selector's features, for which scikit-learn is needed: pip install 'undrift[figures]'"
        )


def cite_command(arguments: argparse.Namespace) -> None:
    from undrift.core.papers import papers_of

    print("\n".join(papers_of(arguments.name)))


def progress_bar() -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[accuracy]}"), redirect_stdout=False,
    )  # fmt: skip


def default_processes(device: str) -> int:
    import torch

    from undrift.jobs.sweep import cores

    return 1 if device != "cpu" and torch.cuda.is_available() else cores()


COMMANDS = {
    "run": run_command,
    "deploy": deploy_command,
    "dataparallel": dataparallel_command,
    "dp": dataparallel_command,
    "pipe": pipe_command,
    "sweep": sweep_command,
    "report": report_command,
    "list": list_command,
    "data": data_command,
    "predict": predict_command,
    "figures": figures_command,
    "cite": cite_command,
}
