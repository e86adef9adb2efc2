"""All commands, and the parser of their arguments."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from undrift import __version__
from undrift.cli import data, deploy, lists, personal, report, reproduce, runs, sweep, train, tune
from undrift.cli.command import Argument, Command
from undrift.cli.mistakes import unknown_argument
from undrift.core.errors import BadSetting, UnknownName
from undrift.core.names import check_text

COMMANDS: tuple[Command, ...] = (  # in the order in which --help lists them
    train.run_command, deploy.deploy_command, train.dataparallel_command, train.pipe_command, sweep.sweep_command,
    tune.tune_command, reproduce.reproduce_command, reproduce.results_command, report.report_command, runs.ls_command,
    runs.watch_command, runs.verify_command, lists.list_command, data.data_command, personal.figures_command,
    personal.predict_command, lists.suites_command, lists.doctor_command, lists.cite_command,
)  # fmt: skip
BEGIN = """to begin with:
  undrift doctor                                   is everything there?
  undrift sweep demo                               four methods on handwritten digits, and a report: two minutes
  undrift run --algorithm scaffold --lr 0.05       one run, in a folder of its own below runs/
  undrift report runs/* --out report.html          what the runs came to, as one page
  undrift COMMAND --help                           the flags of a command"""
MANY = 15  # arguments: a list of all of them in brackets helps nobody


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a mistake with one line."""

    def error(self, message: str) -> NoReturn:
        raise BadSetting(f"{message}; try '{self.prog} --help'")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line; a mistake is an error that says what was probably meant."""
    for word in words:
        check_text("an argument", word)
    parsers = command_parsers()
    if words and not words[0].startswith("-") and words[0] not in parsers:
        if words[0] == "help":
            raise BadSetting("write 'undrift --help', or 'undrift COMMAND --help'")
        raise UnknownName("command", words[0], parsers)
    arguments, unknown = build_parser().parse_known_args(words)
    if unknown:
        raise unknown_argument(arguments.command, unknown[0], parsers)
    return arguments


def command_parsers() -> Mapping[str, argparse.ArgumentParser]:
    """The parser of each command, also under the command's other names."""
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    parsers: Mapping[str, argparse.ArgumentParser] = action.choices
    return parsers


@functools.cache
def build_parser() -> Parser:
    top = Parser(
        prog="undrift",
        description="Federated and distributed training that does not drift.",
        epilog=BEGIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"undrift {__version__}")
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")
    for name, about, arguments, aliases, function in COMMANDS:
        description = f"{about[0].upper()}{about[1:]}."
        parser = commands.add_parser(name, help=about, description=description, aliases=aliases, allow_abbrev=False)
        parser.set_defaults(function=function)
        if len(arguments) > MANY:
            parser.usage = f"%(prog)s {short_usage(arguments)}"
        headings: dict[str, Any] = {"": parser}
        for argument in arguments:
            if argument.heading not in headings:
                headings[argument.heading] = parser.add_argument_group(argument.heading)
            headings[argument.heading].add_argument(argument.name, **argument.options)
    return top


def short_usage(arguments: Sequence[Argument]) -> str:
    """The usage of a command with many flags."""
    words = [options for name, options, _ in arguments if not name.startswith("-")]
    return " ".join(
        [*(f"[{o['metavar']}]" if "nargs" in o else str(o["metavar"]) for o in words), "[--FLAG VALUE ...]"]
    )
