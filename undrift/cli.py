"""The command line: `undrift run`, `deploy`, `dataparallel`, `pipe`, `sweep`, `report` and more. It holds no logic."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError

from undrift import __version__
from undrift.algorithms.checks import looks_at_single_uploads
from undrift.core import ranks, stopping
from undrift.core.errors import (
    MEANT,
    BadSetting,
    LostRank,
    UndriftError,
    UnknownName,
    closest,
    one_line_warnings,
    plain,
)
from undrift.core.names import algorithms_of, check_text, describe, names, outline_of, printable
from undrift.core.numbered import new_folder, newest_folder
from undrift.core.outline import outline
from undrift.core.run_files import SWEEP
from undrift.core.seals import write_sealed
from undrift.dataparallel import parallel_config as parallel
from undrift.deploy import settings as deployment
from undrift.jobs import config as federated
from undrift.jobs import shipped
from undrift.jobs.shipped import sweep_file
from undrift.pipeline import pipe_config as pipeline

KINDS = ("algorithms", "methods", "datasets", "models", "partitions", "trackers")
ON_RANKS = ("run", "dataparallel", "dp", "pipe")  # commands that torchrun may start
DEVICES = {
    "gpu": "cuda",
    "gpus": "cuda",
    "ngpus": "cuda",
    "cuda": "cuda",
    "usecuda": "cuda",
    "cpu": "cpu",
    "nocuda": "cpu",
}  # as flags
EVERY = 5.0  # seconds between lines of progress without a terminal
Fields = Mapping[str, dataclasses.Field[Any]]
Argument = tuple[str, dict[str, Any]]  # what `add_argument` takes, and under "heading" where --help lists it
# Commands by name: function, help, arguments and other names. `command` fills it in the order in which --help lists them.
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int | None], str, Sequence[Argument], Sequence[str]]] = {}


BEGIN = """to begin with:
  undrift doctor                                   is everything there?
  undrift sweep demo                               four methods on handwritten digits, and a report: two minutes
  undrift run --algorithm scaffold --lr 0.05       one run, in a folder of its own below runs/
  undrift report runs/* --out report.html          what the runs came to, as one page
  undrift COMMAND --help                           the flags of a command"""


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a mistake with one line, and a typo with the nearest name; --help has headings."""

    def error(self, message: str) -> NoReturn:
        raise BadSetting(f"{message}; try '{self.prog} --help'")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        for argument in given:
            check_text("an argument", argument)
        if self._subparsers and given and not given[0].startswith("-") and given[0] not in self._commands():
            if given[0] == "help":
                raise BadSetting(f"write '{self.prog} --help', or '{self.prog} COMMAND --help'")
            raise UnknownName("command", given[0], self._commands())
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            old = unknown[0].split("=")[0].removeprefix("--").replace("-", "_")
            if old in deployment.RENAMED:
                raise BadSetting(f"--{old} is called --{deployment.RENAMED[old]} now".replace("_", "-"))
            raise self._unknown(arguments.command, unknown[0])
        return arguments

    def _unknown(self, command: str, word: str) -> UndriftError:
        """The error for an argument that a command does not take: what was meant, or where it belongs."""
        flag, flags = word.split("=")[0], self._flags(command)
        if not word.startswith("-") and "=" in word:
            return like_hydra(word, flags)
        best, field = closest(flag, flags), flag.lstrip("-").replace("-", "_")
        lacks = f"'{self.prog} {command}' has no {flag}"
        if best and (plain(best) == plain(flag) or plain(flag) in MEANT):
            return BadSetting(f"{lacks}; did you mean '{best}'?")
        if flag == "--config" and "--resume" in flags:
            return BadSetting(f"{lacks}; give the file alone: '{self.prog} {command} FILE.toml'")
        if command in ("sweep", "tune") and flag in (*self._flags("run"), "--seeds"):
            return BadSetting(
                f"{lacks}: its settings stand in the file; '{self.prog} suites copy demo' gives one to change"
            )
        if "--track" in flags and field in names("trackers"):
            return BadSetting(f"{lacks}; give --track {field}")
        if "--device" in flags and plain(flag) in DEVICES:
            return BadSetting(f"{lacks}; give --device {DEVICES[plain(flag)]}")
        if "--algorithm" in flags and any(field in entry["fields"] for entry in list_kind("algorithms")):
            skew = federated.SKEW if field == "alpha" else ""
            return BadSetting(f"{field} is a field of algorithms: give --set {field}=VALUE{skew}")
        others = [name for name in COMMANDS if flag in self._flags(name)]
        meant = f"; did you mean '{best}'?" if best else ""
        if word.startswith("-") and others:
            commands = ", ".join(f"'{self.prog} {name}'" for name in others)
            return BadSetting(f"{lacks}{meant or ';'} {flag if meant else 'it'} is an argument of {commands}")
        if best:
            return BadSetting(f"{lacks}{meant}")
        what = lacks if word.startswith("-") else f"'{self.prog} {command}' does not take {word!r}"
        return BadSetting(f"{what}; try '{self.prog} {command} --help'")

    def _flags(self, command: str) -> list[str]:
        return [o for a in self._subparser(command)._actions for o in a.option_strings]

    def _subparser(self, command: str) -> argparse.ArgumentParser:
        return self._commands()[command]

    def _commands(self) -> Mapping[str, argparse.ArgumentParser]:
        (action,) = (a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        commands: Mapping[str, argparse.ArgumentParser] = action.choices
        return commands


def like_hydra(word: str, flags: Sequence[str]) -> UndriftError:
    """The error for NAME=VALUE without dashes."""
    name, _, value = word.partition("=")
    field = name.lstrip("+~").rpartition(".")[2]
    flag = f"--{field.replace('_', '-')}"
    if flag not in flags and not any(field in entry["fields"] for entry in list_kind("algorithms")):
        flag = closest(flag, flags)
        if not flag:
            return BadSetting(f"settings are flags here, and none is called {field}; 'undrift run --help' lists them")
    right = f"{flag} {value}" if flag in flags else f"--set {field}={value}"
    return BadSetting(f"settings are flags here: write {right}, not {word}")


@functools.cache
def parser() -> Parser:
    top = Parser(
        prog="undrift",
        description="Federated and distributed training that does not drift.",
        epilog=BEGIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"undrift {__version__}")
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")
    for name, (function, about, arguments, aliases) in COMMANDS.items():
        description = f"{about[0].upper()}{about[1:]}."
        sub = commands.add_parser(name, help=about, description=description, aliases=aliases, allow_abbrev=False)
        sub.set_defaults(function=function)
        if len(arguments) > 15:  # a list of all flags in brackets helps nobody
            sub.usage = f"%(prog)s {usage_of(arguments)}"
        headings: dict[str, Any] = {"": sub}
        for argument, options in arguments:
            heading = str(options.get("heading", ""))
            if heading not in headings:
                headings[heading] = sub.add_argument_group(heading)
            headings[heading].add_argument(argument, **{n: v for n, v in options.items() if n != "heading"})
    return top


def usage_of(arguments: Sequence[Argument]) -> str:
    """The usage of a command with many flags."""
    places = [(name, o) for name, o in arguments if not name.startswith("-")]
    shown = [f"[{o['metavar']}]" if "nargs" in o else str(o["metavar"]) for _, o in places]
    return " ".join([*shown, "[--FLAG VALUE ...]"])


def command(name: str, about: str, *arguments: Argument, aliases: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Register a function as `undrift NAME`."""

    def register(function: Any) -> Any:
        COMMANDS[name] = function, about, arguments, aliases
        return function

    return register


def arg(name: str, **options: Any) -> Argument:
    return name, options


def path(name: str, metavar: str = "DIR", **options: Any) -> Argument:
    return name, {"type": Path, "metavar": metavar} | options


def words(text: str) -> tuple[str, ...]:
    """The parts of an argument with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, words(text)))


def make_flags(
    fields: Fields, types: Mapping[str, Any], choices: Mapping[str, tuple[str, ...]], heading: str = ""
) -> list[Argument]:
    """A flag for each setting; `heading` is that of settings without one."""
    flags = []
    for name, field in fields.items():
        options = flag_of(name, field, types[name], choices.get(name, ()))
        flags.append((f"--{name.replace('_', '-')}", options | {"heading": field.metadata["heading"] or heading}))
    return flags


def flag_of(name: str, field: dataclasses.Field[Any], kind: Any, choices: Sequence[str]) -> dict[str, Any]:
    """What `add_argument` takes for a setting. Its help ends with its default in brackets, unless it has brackets already."""
    about, usual = str(field.metadata["help"]), field.default
    options: dict[str, Any] = {"default": None, "help": about}
    if name == "set":
        return options | {"action": "append", "metavar": "FIELD=VALUE"}
    if kind is bool:  # a switch that is on by default gets a --no- form
        return options | {"action": argparse.BooleanOptionalAction if usual else "store_true"}
    if "[" not in about and usual != "":
        options["help"] = f"{about} [{usual:g}]" if kind is float else f"{about} [{usual}]"
    shown = "NAME" if name in ("algorithm", "dataset", "model") else METAVARS[kind]
    return options | {"type": kind, "metavar": "|".join(choices or (shown,))}


METAVARS = {int: "N", float: "X", str: "TEXT"}
RATE = arg(
    "--lr",
    type=float,
    metavar="RATE",
    heading=federated.WHAT,
    help="the learning rate of local steps, the same as --set lr=RATE",
)


def make_arguments(settings: Any) -> list[Argument]:
    """The arguments of a command that trains: a file of settings, a flag for each setting, and the run's folder."""
    name = "ALGORITHM" if "algorithm" in settings.FIELDS else "METHOD"
    where = f"the run's folder [a new one, runs/{name}-DATASET-seedN; the last one with --resume]"
    return [
        path(
            "config", "CONFIG.toml", nargs="?", help="a file of settings, such as a run's run.toml; flags override them"
        ),
        *make_flags(settings.FIELDS, settings.TYPES, settings.CHOICES),
        *([] if "lr" in settings.FIELDS else [RATE]),
        path("--out", heading=federated.RECORD, help=where),
        arg("--resume", action="store_true", heading=federated.RECORD, help="go on from the folder's last checkpoint"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one line on standard error and exit code 2."""
    try:
        with ranks.join(), one_line_warnings():
            arguments = parser().parse_args(argv)
            if ranks.count() > 1 and arguments.command not in ON_RANKS:
                raise BadSetting(
                    f"torchrun is for undrift run, dataparallel and pipe; start 'undrift {arguments.command}' without it"
                )
            words = sys.argv[1:] if argv is None else list(argv)
            with heed_signals(arguments, words) if stoppable(arguments) else contextlib.nullcontext():
                return int(arguments.function(arguments) or 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UndriftError, OSError, MemoryError, SafetensorError) as error:
        lost = isinstance(error, LostRank)
        if ranks.speaks() or lost:
            print(f"undrift: {message(error)}", file=sys.stderr, flush=True)
        if not lost:  # rank 0 may be waiting for this one, and notices when it has ended
            ranks.wait_for_first_rank()
        return 2
    except stopping.Stopped as stopped:
        ranks.wait_for_first_rank()  # which writes the checkpoint
        return 128 + stopped.number
    except KeyboardInterrupt:
        if ranks.speaks():
            print("undrift: stopped", file=sys.stderr)
        return 130


def stoppable(arguments: argparse.Namespace) -> bool:
    """Whether the command can be stopped and goes on later."""
    return arguments.command in (*ON_RANKS, "sweep", "tune", "reproduce") or getattr(arguments, "action", "") in (
        "local",
        "server",
        "node",
    )


def heed_signals(arguments: argparse.Namespace, words: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Stop the command at a signal, and say how to go on; `words` are its arguments."""

    def say(how: str) -> None:
        again, begun = ["undrift", *words], isinstance(arguments.out, Path) and (arguments.out / "run.toml").exists()
        if isinstance(arguments.out, Path) and not any(word.startswith("--out") for word in words):
            again += ["--out", str(arguments.out)]
        if begun and arguments.command != "sweep" and not arguments.resume:
            again.append("--resume")
        if ranks.count() > 1:
            alone = os.environ.get("LOCAL_WORLD_SIZE") == str(ranks.count())  # on one machine
            again = ["torchrun", *(("--nproc-per-node", str(ranks.count())) if alone else ("...",)), "-m", *again]
        if ranks.speaks():  # not by print: standard error may belong to the progress bar
            show_cursor = "\x1b[?25h" if os.isatty(2) else ""
            os.write(2, f"{show_cursor}undrift: {how}; go on with: {shlex.join(again)}\n".encode())

    return stopping.heeded(say, repeats=ranks.count() == 1)  # torchrun sends its ranks what they got already


def message(error: Exception) -> str:
    """What an error says in one line that is safe to print: names of files, and other libraries, may hold anything."""
    if isinstance(error, UndriftError) and error.ends_with_log:
        return str(error)
    text = " ".join(str(error).split())
    text = text if isinstance(error, UndriftError) else f"{type(error).__name__}: {text}"
    return printable(text)


@command(
    "run",
    "simulate federated training: one run",
    *make_arguments(federated),
    arg(
        "--local",
        metavar="NAME",
        heading=federated.WHAT,
        help="instead of --algorithm, with --server: the algorithm that clients run",
    ),
    arg(
        "--server",
        metavar="NAME",
        heading=federated.WHAT,
        help="instead of --algorithm, with --local: the algorithm that the server runs",
    ),
)
def run_command(arguments: argparse.Namespace) -> None:
    from undrift.jobs.run import run

    if arguments.local or arguments.server:
        if arguments.algorithm is not None:
            raise BadSetting("give --algorithm, or --local and --server, not both")
        arguments.algorithm = f"{arguments.local or 'fedavg'}+{arguments.server or 'fedavg'}"
    train(arguments, federated.FIELDS, run)


@command(
    "deploy",
    "train real clients over Flower: make keys, serve, take part, or run everything on this machine",
    arg(
        "action",
        metavar="init|local|keys|identity|admit|revoke|server|node|status|page|trace",
        help="init: write the app of a federation; local: try it out, all on this machine; keys, identity, admit, revoke: the "
        "server's keys and the clients'; server, node: serve, take part; status, page, trace: how a run goes, when answers came",
    ),
    path(
        "place",
        nargs="?",
        help="the folder: init: a new one; local: for the logs; identity, node: the client's; status, page, trace: the run's; "
        "else the server's",
    ),
    path("--config", "FILE.toml", help="settings; flags override them"),
    arg("--host", default="127.0.0.1", help="init, keys: the server's address [127.0.0.1]"),
    arg("--insecure", action="store_true", help="local: without TLS and node authentication"),
    path(
        "--data", "PATH", help="node: its file; local: a folder with NAME.npz for each client; both with --dataset own"
    ),
    arg(
        "--name",
        default="",
        help="identity, revoke: the client's name; admit: a name other than the one in the key's file",
    ),
    path("--key", "FILE", help="admit: the client's public key"),
    arg("--listen", default="0.0.0.0:8000", help="server: where clients may reach it [0.0.0.0:8000]"),
    arg("--server", default="", metavar="HOST:PORT", help="node: the server's address"),
    arg("--allow", default="", metavar="PACKAGE", help="node: installed packages whose code a run may name"),
    arg(
        "--sums",
        type=int,
        default=0,
        metavar="N",
        help="node: take part only where the server sees sums over N clients",
    ),
    path("--to", "FILE", help="trace: where to write how long the clients' answers took"),
    arg("--port", type=int, default=8765, help="page: the port on this machine [8765]"),
    arg("--renew", action="store_true", help="keys: make a new certificate of the same authority"),
    arg("--force", action="store_true", help="keys, identity: replace what is there"),
    *make_flags(deployment.FLAGS, deployment.TYPES, federated.CHOICES, "the server and its clients"),
    RATE,
)
def deploy_command(arguments: argparse.Namespace) -> None:
    from undrift.deploy.command import Options, deploy

    config, settings = read_settings(arguments, deployment.FLAGS)
    deployment.check_flags(settings)
    out = federated.typed({"out": (config | settings).get("out", deployment.DeployConfig.out)}, deployment.TYPES)["out"]
    arguments.out = Path(out)
    options = Options(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)})
    deploy(arguments.action, arguments.place, config | settings, options)


@command(
    "dataparallel", "train one model with compressed data-parallel workers", *make_arguments(parallel), aliases=["dp"]
)
def dataparallel_command(arguments: argparse.Namespace) -> None:
    from undrift.dataparallel.command import run_parallel

    train(arguments, parallel.FIELDS, run_parallel)


@command(
    "pipe",
    "train one model in blocks that work at the same time",
    *make_arguments(pipeline),
    arg("--schedule", type=int, metavar="N", help="print the timeline of N batches and end"),
)
def pipe_command(arguments: argparse.Namespace) -> None:
    from undrift.pipeline.resolve import timeline
    from undrift.pipeline.train import run_pipe

    if arguments.schedule is None:
        train(arguments, pipeline.FIELDS, functools.partial(run_pipe, say=print))
    else:
        config, settings = read_settings(arguments, pipeline.FIELDS)
        print(timeline(pipeline.from_mapping(pipeline.plain(config) | settings), arguments.schedule))


def read_settings(arguments: argparse.Namespace, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the settings of the file, with those of --set under `set`, and of the flags, which override them."""
    pairs = [pair.partition("=") for pair in arguments.set or []]
    for field, equals, value in pairs:
        if not equals:
            raise BadSetting(f"--set takes FIELD=VALUE, not {field!r}")
        if "," in value and "=" in value:
            raise BadSetting(f"give --set once for each field, not --set {field}={value}")
        if [each[0] for each in pairs].count(field) > 1:
            raise BadSetting(f"{field} is given twice with --set; give it once")
    if arguments.config is not None and not arguments.config.exists():
        file, flags = str(arguments.config), [f"--{name.replace('_', '-')}" for name in fields]
        if "=" in file:
            raise like_hydra(file, flags)
        if getattr(arguments, "resume", False):
            raise BadSetting(f"there is no file {file}; to go on with a run give its folder: --out DIR --resume")
        if file in names("algorithms") and "--algorithm" in flags:
            raise BadSetting(f"there is no file {file}; write --algorithm {file}")
    config = {} if arguments.config is None else federated.from_toml(arguments.config)
    settings = {n: v for n in fields if n != "set" and (v := getattr(arguments, n)) is not None}
    name = settings.get("algorithm", settings.get("method"))
    if name is not None and name != config.get("algorithm", config.get("method")):
        config.pop("set", None)  # the file's fields belong to another algorithm
    given = federated.table_of_fields(config.get("set", {}))
    if "lr" not in fields:  # an algorithm's field, and so frequent that it has a flag
        if "lr" in config:
            config = federated.lr_among_fields(config)
            given = federated.table_of_fields(config["set"])
        if getattr(arguments, "lr", None) is not None:
            given["lr"] = arguments.lr
    for field, _, value in pairs:
        if field in settings or (field == "lr" and getattr(arguments, "lr", None) is not None):
            raise BadSetting(f"--{field.replace('_', '-')} and --set {field} are the same setting; give one of them")
        given[field] = federated.parse_value(value)
    changed = arguments.set or getattr(arguments, "lr", None) is not None
    return (config | {"set": given} if changed else config), settings


def train(arguments: argparse.Namespace, fields: Fields, run: Callable[..., Any]) -> None:
    """Run what the file and the flags ask for, show its progress, and print its result."""
    config, settings = read_settings(arguments, fields)
    chosen = {n: f.default for n, f in fields.items()} | config | settings
    name = str(settings.get("method") or chosen.get("algorithm") or chosen.get("method"))
    folder = f"{name}-{chosen['dataset']}-seed{chosen['seed']}".replace("/", "_").replace(":", "_")
    with folder_of(arguments, printable(folder)) as say_where:
        train_in(arguments, name, functools.partial(run, config, **settings), say_where)


def train_in(arguments: argparse.Namespace, name: str, run: Callable[..., Any], say_where: Callable[[], None]) -> None:
    """Run in the folder that was chosen, show the progress, and print the result."""
    out = arguments.out
    if arguments.resume and (out / "run.toml").exists():  # the method is stored there and need not be given again
        stored = federated.read_toml(out / "run.toml")
        name = str(stored.get("algorithm", stored.get("method", name)))
    bar = progress_bar()
    task = bar.add_task(name, total=None, accuracy="")
    line, begun, score = log_lines(), 0, ""

    def show(record: dict[str, Any], rounds: int) -> None:
        nonlocal begun, score
        if not begun:  # only now: a mistake in the settings needs neither folder nor bar
            begun = record["round"]
            say_where()
        if record["accuracy"] is not None:
            score = f"accuracy {record['accuracy']:.4f}"
        if not bar.console.is_terminal:
            text = f"{name}: round {record['round']} of {rounds}{score and f', {score}'}"
            line(text, record["round"], rounds, begun - 1)
            return
        bar.start()
        bar.update(task, completed=record["round"], total=rounds, accuracy=score)

    try:
        result = run(out=out, resume=arguments.resume, progress=show)
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
    end = f"stopped by {result.stopped}"
    if result.stopped == "diverged":
        end = f"diverged, so the model is that of round {result.model_round}; {result.config.advice()}"
    print(f"{len(result.records)} rounds, {text}; {end}; written to {out}")
    if "samples" in result.about:
        print(f"on {described(result.about)}")
    for remark in result.config.remarks():
        print(f"note: {remark}")


@contextlib.contextmanager
def folder_of(arguments: argparse.Namespace, name: str) -> Iterator[Callable[[], None]]:
    """Choose the folder where --out does not: a new one in runs/, or the last one of that name if it is resumed.

    What is yielded says so, and is to be called when the work begins.
    """
    if arguments.out is not None:
        yield lambda: None
        return
    base = Path("runs") / name
    with contextlib.ExitStack() as stack:
        folder = None
        if ranks.rank() == 0:
            resume = getattr(arguments, "resume", False)
            folder = newest_folder(base) if resume else stack.enter_context(new_folder(base))
        arguments.out = chosen = ranks.first_rank_says(folder)
        yield lambda: print(f"no --out was given, so this goes to {chosen}", flush=True) if ranks.speaks() else None


@command(
    "sweep",
    "run each algorithm with each setting and seed of a file, and report them",
    path("file", "FILE.toml", help="a sweep's file, or the name of one that comes with the package, such as demo"),
    path("--out", help="the folder for the runs and the report [a new one, runs/NAME]"),
    arg(
        "--processes", type=int, default=0, metavar="N", help="how many runs at a time [one on each core; one on a GPU]"
    ),
    arg("--pack", action=argparse.BooleanOptionalAction, help="run jobs of equal shapes as one program [on a GPU]"),
    arg("--track", metavar="TRACK", help=str(federated.FIELDS["track"].metadata["help"])),
)
def sweep_command(arguments: argparse.Namespace) -> int:
    from undrift.jobs.sweep import plan

    file = sweep_file(arguments.file)
    jobs, sweep = plan(file, arguments.track)
    if arguments.processes < 0:
        raise BadSetting(f"processes must be at least 1, not {arguments.processes}")
    with folder_of(arguments, file.stem) as say_where:
        say_where()
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "sweep.toml").write_bytes(file.read_bytes())
        return sweep_all(arguments, jobs, sweep)


def sweep_all(arguments: argparse.Namespace, jobs: list[Any], sweep: Mapping[str, Any]) -> int:
    """Run the jobs of a sweep that are not finished, and report all."""
    from undrift.jobs.sweep import run_all

    processes = arguments.processes or default_processes(jobs[0].config.device)
    planned = {"runs": {job.name: job.config.rounds for job in jobs}, "failed": {}}
    write_sealed(arguments.out / SWEEP, planned)
    bar = progress_bar()
    with bar if bar.console.is_terminal else contextlib.nullcontext():
        asked = sum(j.config.rounds for j in jobs)
        whole = bar.add_task(f"{len(jobs)} runs", total=asked, accuracy="")
        rounds_done: dict[str, int] = {}
        before: dict[str, int] = {}  # rounds of earlier commands
        line = log_lines()

        def show(name: str, done: int, rounds: int) -> None:
            rounds_done[name] = done
            before.setdefault(name, done - 1)
            finished, now = sum(rounds_done.get(j.name) == j.config.rounds for j in jobs), sum(rounds_done.values())
            bar.update(whole, completed=now, accuracy=f"{finished} of {len(jobs)} done, now {name}")
            if not bar.console.is_terminal:
                text = f"{finished} of {len(jobs)} runs done, round {now} of {asked}, now {name}"
                line(text, now, asked, sum(before.values()))

        failed = run_all(jobs, arguments.out, processes, show, bar.console.print, arguments.pack)
    write_sealed(arguments.out / SWEEP, planned | {"failed": failed})
    for name, message in failed.items():
        print(f"undrift: {name} failed: {message}", file=sys.stderr)
    if not any((arguments.out / job.name / "run.toml").exists() for job in jobs):
        return 1  # there is nothing to report
    write_report([arguments.out], arguments.out / "report.html", sweep.get("target"))
    return 1 if failed else 0


@command(
    "tune",
    "pick each algorithm's settings from a sweep's grid, on validation samples, by successive halving",
    path("file", "FILE.toml", help="a sweep's file, or the name of one that comes with the package"),
    path("--out", help="the folder for tuned.toml, ALGORITHM.toml and the trials [a new one, runs/tuned-NAME]"),
    arg(
        "--rungs",
        type=numbers,
        default=(0.1, 0.25, 1.0),
        metavar="SHARES",
        help="shares of the rounds after which the worse settings drop out [0.1,0.25,1]",
    ),
    arg("--keep", type=int, default=4, metavar="N", help="one in N settings goes on to the next rung [4]"),
    arg(
        "--validation",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of the training samples that is held out to compare on [0.1]",
    ),
    arg("--minutes", type=float, default=0.0, metavar="X", help="stop after so many minutes; the same command goes on"),
    arg("--device", default="", metavar="auto|cpu|cuda", help="where to compute, in place of what the file says"),
    arg("--pack", action=argparse.BooleanOptionalAction, help="run trials of equal shapes as one program [on a GPU]"),
)
def tune_command(arguments: argparse.Namespace) -> int:
    from undrift.jobs.tune import tune

    options = {name: getattr(arguments, name) for name in ("rungs", "keep", "validation")}
    file, limit = sweep_file(arguments.file), seconds_of(arguments.minutes)
    with folder_of(arguments, f"tuned-{file.stem}") as say_where, stopping.within(limit) as left:
        say_once = functools.cache(say_where)  # when the work begins

        def tell(text: str) -> None:
            say_once()
            say(text)

        try:
            tune(file, arguments.out, tell, arguments.pack, arguments.device, **options)
        except stopping.Stopped:
            if left() > 0:
                raise
            say(f"stopped after {arguments.minutes:g} minutes; the same command goes on with --out {arguments.out}")
            return 0
    say(f"written to {arguments.out / 'tuned.toml'}")
    return 0


@command(
    "reproduce",
    "run what a paper's table or figure needs, and compare with the published numbers",
    arg("suite", nargs="?", help="a table or figure, such as gradma-table1; --list shows all"),
    arg("--list", action="store_true", help="list the tables and figures"),
    path(
        "--out",
        default=Path("runs/reproduced"),
        help="the folder for results, pages and unfinished runs [runs/reproduced]",
    ),
    arg("--columns", type=words, default=(), metavar="NAMES", help="only these columns, separated by commas"),
    arg("--methods", type=words, default=(), metavar="NAMES", help="only these rows, separated by commas"),
    arg("--seeds", type=int, default=0, metavar="N", help="how many seeds in every cell [as in the paper]"),
    arg(
        "--tune",
        default="none",
        metavar="grid|none|FILE",
        help="search the paper's grid for settings, or take those of a file [none]",
    ),
    arg(
        "--scale",
        default="full",
        metavar="full|small",
        help="small: tiny runs on data that come with the package, to try it out [full]",
    ),
    arg("--minutes", type=float, default=0.0, metavar="X", help="stop after so many minutes; the same command goes on"),
    arg("--plan", action="store_true", help="print what would be run, and end"),
    arg("--device", default="", metavar="auto|cpu|cuda", help="where to compute, in place of what the file says"),
    arg("--pack", action=argparse.BooleanOptionalAction, help="run cells of equal shapes as one program [on a GPU]"),
)
def reproduce_command(arguments: argparse.Namespace) -> int:
    if arguments.list:
        from undrift.jobs.suite import list_suites

        for line in list_suites():
            print(line)
        return 0
    from undrift.jobs.cells import Asked
    from undrift.jobs.reproduce import reproduce

    if arguments.suite is None:
        raise BadSetting("say which suite to reproduce; undrift reproduce --list shows all")
    minutes = seconds_of(arguments.minutes) and arguments.minutes
    asked = Asked(
        arguments.suite, arguments.out, arguments.columns, arguments.methods, arguments.seeds, arguments.tune,
        arguments.scale, minutes, arguments.pack, arguments.device, arguments.plan,
    )  # fmt: skip
    return 1 if reproduce(asked, say) else 0


@command(
    "results",
    "write a site of what undrift reproduce has found: a page for each paper",
    path("folders", nargs="+", help="folders that undrift reproduce wrote"),
    path(
        "--out",
        default=Path("runs/results-site"),
        help="the folder for index.html and a page for each paper [runs/results-site]",
    ),
)
def results_command(arguments: argparse.Namespace) -> None:
    from undrift.report.results_site import write_site

    files = write_site(arguments.folders, arguments.out)
    print(f"{len(files)} pages; begin with {files[0]}")


def say(text: str) -> None:
    print(text, flush=True)


def seconds_of(minutes: float) -> float:
    """The seconds that --minutes allows; 0 minutes are no limit."""
    if not 0 <= minutes < float("inf"):
        raise BadSetting(f"minutes must be at least 0, not {minutes:g}")
    return 60 * minutes or float("inf")


@command(
    "report",
    "write tables and curves of runs as one HTML page",
    path("folders", nargs="+", help="folders of runs, or folders that hold some"),
    path("--out", "FILE.html", required=True, help="the page to write"),
    arg(
        "--target",
        type=float,
        metavar="ACCURACY",
        help="also say how many rounds and bytes each method took to this accuracy",
    ),
)
def report_command(arguments: argparse.Namespace) -> None:
    from undrift.report.load import sweep_target

    if arguments.out.suffix not in (".html", ".htm"):
        raise BadSetting(f"the report is an HTML page; give --out a name that ends in .html, not {arguments.out}")
    target = arguments.target if arguments.target is not None else sweep_target(arguments.folders)
    write_report(arguments.folders, arguments.out, target)


def write_report(folders: list[Path], out: Path, target: float | None) -> None:
    """Write the page, and print its tables."""
    from rich.table import Table

    from undrift.report import load as runs
    from undrift.report import page, scores, summary, text
    from undrift.report.document import title_of

    loaded = page.write(folders, out, target, default_settings)
    console = plain_console(None if sys.stdout.isatty() else 120)
    tasks = runs.by_task(runs.group_runs(loaded))
    for groups in tasks:
        header, *rows = text.table(scores.rank(groups), target, brief=True)
        if len(tasks) > 1:
            console.print(title_of(groups), highlight=False)
        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print(summary.verdict(groups), highlight=False)
    print(f"written to {out}")


def default_settings(command: str, algorithm: str) -> dict[str, Any]:
    """What a command's settings and an algorithm's fields are if nothing is said. A class of the user's is not imported."""
    from undrift.jobs.registry import algorithm_class

    configs: dict[str, type[federated.JobConfig]] = {"dp": parallel.ParallelConfig, "pipe": pipeline.PipeConfig}
    usual = dataclasses.asdict(configs.get(command, federated.RunConfig)())
    if command == "run" and ":" not in algorithm:
        with contextlib.suppress(UndriftError):  # a method of another version
            usual |= {field.name: field.default for field in dataclasses.fields(algorithm_class(algorithm))}
    return usual


@command(
    "ls",
    "list runs: how far they are, their best score, the time left",
    path("folders", nargs="+", help="folders of runs, or folders that hold some"),
)
def ls_command(arguments: argparse.Namespace) -> None:
    from rich.table import Table

    from undrift.jobs.overview import Line, overview

    table = Table(*Line._fields)
    for line in overview(arguments.folders):
        table.add_row(*line)
    plain_console(None if sys.stdout.isatty() else 160).print(table)


@command(
    "watch",
    "show runs in a browser as they grow, on this machine only and to whoever has the address",
    path("folders", nargs="+", help="folders of runs; they may still be empty"),
    arg("--port", type=int, default=8766, help="the port on this machine; 0: any that is free [8766]"),
)
def watch_command(arguments: argparse.Namespace) -> None:
    from undrift.jobs.watch import serve

    serve(arguments.folders, arguments.port, say, default_settings)


@command(
    "verify",
    "say whether the files of runs are whole, and from which round a run can go on",
    path("folders", nargs="+", help="folders of runs, or folders that hold some"),
    arg("--back", action="store_true", help="go back to the last checkpoint that is whole, if the last one is damaged"),
)
def verify_command(arguments: argparse.Namespace) -> int:
    from undrift.jobs.verify import verify
    from undrift.report.load import find

    damaged = 0
    for folder in find(arguments.folders):
        damage, advice = verify(folder, arguments.back)
        damaged += bool(damage)
        for line in damage:
            print(line)
        print(f"{folder} is {'damaged' if damage else 'whole'}; {advice}")
    return 2 if damaged else 0


@command(
    "list",
    "list the algorithms, methods, data sets, models, partitions or trackers",
    arg("kind", metavar="|".join(KINDS), help="what to list"),
    arg("--json", action="store_true", help="as JSON, with the fields of each algorithm"),
)
def list_command(arguments: argparse.Namespace) -> None:
    entries = list_kind(arguments.kind)
    if arguments.json:
        print(json.dumps(entries, indent=1))
        return
    width = max(len(entry["name"]) for entry in entries)
    for entry in entries:
        needs = f"  (the server needs {entry['server_needs']})" if "server_needs" in entry else ""
        print(f"{entry['name']:{width}}  {entry['about']}{needs}")


def list_kind(kind: str) -> list[dict[str, Any]]:
    """The entries that `undrift list KIND --json` prints."""
    if kind not in KINDS:
        raise UnknownName("kind of list", kind, KINDS)
    if kind in ("methods", "partitions"):
        methods, rules = outline("undrift.dataparallel.methods"), outline("undrift.data.partition")
        documented: Mapping[str, Any] = methods.FILES if kind == "methods" else rules.PARTITIONS
        return [{"name": n, "about": (inspect.getdoc(o) or "").splitlines()[0]} for n, o in documented.items()]
    entries: list[dict[str, Any]] = [{"name": n, "about": describe(kind, n)} for n in names(kind)]
    for entry in entries if kind == "algorithms" else ():
        (alg,) = algorithms_of(outline_of(kind, entry["name"]))
        entry["server_needs"] = "single updates" if looks_at_single_uploads(alg) else "the sum of the updates"
        entry["fields"] = {f.name: f.default for f in dataclasses.fields(alg)}
    return entries


@command(
    "data",
    "list the data sets, add one of your own, prepare one, or show a partition",
    arg("action", metavar="list|add|prepare|show", help="show: which client gets which classes"),
    arg("name", nargs="?", default="digits", help="of a data set [digits]"),
    path(
        "file",
        "FILE.npz",
        nargs="?",
        help="add: a file with x_train, y_train, x_test and y_test, or with x, y and split",
    ),
    arg(
        "--partition",
        default="dirichlet:0.1",
        metavar="TEXT",
        help="show: how the samples are dealt out [dirichlet:0.1]",
    ),
    arg("--clients", type=int, default=100, metavar="N", help="show: among how many clients [100]"),
    arg("--seed", type=int, default=0, metavar="N", help="show: seed of the partition [0]"),
    arg("--own-test", type=float, default=0.0, metavar="X", help="show: the share that clients hold out [0]"),
    path("--from", "FILE", dest="source", help="prepare: the archive that shakespeare is made of"),
    path("--out", "FILE", help="prepare: where NAME.npz goes; show: a .png or .svg picture"),
)
def data_command(arguments: argparse.Namespace) -> None:
    from undrift.data import load as datasets

    root = datasets.data_root()
    if arguments.action == "list":
        entries = datasets.available(root)
        width = max(len(name) for name, _ in entries)
        for name, state in entries:
            print(f"{name:{width}}  {state}")
    elif arguments.action == "add":
        if arguments.file is None:
            raise BadSetting("say what to add: undrift data add NAME FILE.npz")
        print(f"written to {datasets.add(arguments.name, arguments.file)}; use it with --dataset {arguments.name}")
    elif arguments.action == "prepare":
        print(f"written to {datasets.prepare(arguments.name, root, arguments.out, arguments.source)}")
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
        raise UnknownName("data action", arguments.action, ("list", "add", "prepare", "show"))


@command(
    "figures",
    "draw pictures of personal models for the report: the selector's map, loss surfaces, outlines",
    path("folders", nargs="+", help="finished runs of a personal method"),
)
def figures_command(arguments: argparse.Namespace) -> None:
    from undrift.personal.figures import look

    for folder in arguments.folders:
        print(f"written to {look(folder)}; undrift report shows it", flush=True)
    if importlib.util.find_spec("sklearn") is None:
        print("the map of the selector's features is left out: it needs scikit-learn; pip install 'undrift[figures]'")


@command(
    "predict",
    "label or segment a folder of pictures with the models of a personal run",
    path("--super", required=True, help="the folder of a finished personal run"),
    path("--in", "FOLDER", dest="pictures", help="the pictures"),
    path("--out", "FOLDER", help="for masks, overlays and predictions.csv"),
    arg("--gamma", type=float, metavar="GAMMA", help="the selector's threshold, in place of the stored one"),
    arg("--site", metavar="SITE", help="use this site's model for all: its name or number, 0 for the server's"),
    arg("--tune-gamma", action="store_true", help="first tune it on the run's validation samples, and store it"),
)
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


@command(
    "suites",
    "list, print or copy the sweeps, papers' tables and examples that come with the package",
    arg("action", metavar="list|show|copy", help="what to do"),
    arg("name", nargs="?", help="show, copy: which, such as demo"),
    path("folder", nargs="?", default=Path("."), help="copy: where to [.]"),
)
def suites_command(arguments: argparse.Namespace) -> None:
    if arguments.action == "list":
        print_suites()
        return
    if arguments.action not in ("show", "copy"):
        raise UnknownName("suites action", arguments.action, ("list", "show", "copy"))
    if arguments.name is None:
        raise BadSetting(f"say which: undrift suites {arguments.action} NAME; undrift suites list shows all")
    if arguments.action == "copy":
        for file in shipped.copy(arguments.name, arguments.folder):
            print(f"written to {file}")
        return
    files = shipped.find(arguments.name).files
    for file in files:
        if len(files) > 1:
            print(f"# {file.name}")
        print(file.read_text(encoding="utf-8"))


def print_suites() -> None:
    heads = {
        "sweep": "sweeps: undrift sweep NAME",
        "reproduce": "papers' tables and figures: undrift reproduce NAME",
        "example": "examples: undrift suites copy NAME",
    }
    entries = shipped.shipped()
    width = max(len(entry.name) for entry in entries)
    for kind, head in heads.items():
        print(head)
        for entry in entries:
            if kind == entry.kind:
                print(f"  {entry.name:{width}}  {entry.about}")


@command(
    "doctor", "say what is installed, what this machine has and which data it finds, and test it for a few seconds"
)
def doctor_command(arguments: argparse.Namespace) -> int:
    from undrift.jobs.doctor import examine

    return 0 if examine(say) else 1


@command(
    "cite",
    "print the BibTeX entry of an algorithm's or a method's paper",
    arg("name", help="such as scaffold, dsp or fedmim+gradma-s"),
)
def cite_command(arguments: argparse.Namespace) -> None:
    from undrift.core.papers import papers_of

    print("\n".join(papers_of(arguments.name)))


def described(about: dict[str, Any]) -> str:
    """What a run was trained on, and how its clients were run."""
    shape, classes = "x".join(map(str, about["inputs"])), about["classes"]
    text = (
        f"{about['samples']} samples of {about['clients']} clients, tested on {about['test_samples']}; inputs {shape}"
    )
    text += f", {classes} classes" if classes else ", no class labels"
    return text + (f"; execution {about['execution']}" if "execution" in about else "")


def log_lines() -> Callable[[str, int, int, int], None]:
    """Print how far a command is every few seconds, where no terminal can show a bar; `before` rounds are of an earlier one."""
    from undrift.jobs.overview import in_words

    last, first = (
        time.monotonic(),
        (0.0, 0),
    )  # when the first rounds were there, and how many; the start before them is no pace

    def show(text: str, done: int, rounds: int, before: int) -> None:
        nonlocal last, first
        now, own = time.monotonic(), done - before
        first = first if first[1] else (now, own)
        if now - last >= EVERY:
            pace = (now - first[0]) / (own - first[1]) if own > first[1] else None
            print(text if pace is None else f"{text}, {in_words(pace * (rounds - done))} left", flush=True)
            last = now

    return show


def plain_console(width: int | None = None) -> Any:
    """A console that prints names as they are: [red] and :smile: in them mean nothing."""
    from rich.console import Console

    return Console(width=width, markup=False, emoji=False)


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
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[accuracy]}", markup=False), console=plain_console(),
        redirect_stdout=False,
    )  # fmt: skip


def default_processes(device: str) -> int:
    import torch

    from undrift.jobs.crew import cores

    return 1 if device != "cpu" and torch.cuda.is_available() else cores()
