"""What a command is: its name, its arguments, and the function that carries it out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT"}
Function = Callable[[argparse.Namespace], int | None]  # returns the exit code, or None for 0


class Argument(NamedTuple):
    """A word that a command takes, or a flag."""

    name: str
    options: dict[str, Any]  # what `add_argument` takes
    heading: str = ""  # under which --help lists it


class Command(NamedTuple):
    """`undrift NAME`."""

    name: str
    about: str
    arguments: Sequence[Argument]
    aliases: Sequence[str]
    function: Function


def command(name: str, about: str, *arguments: Argument, aliases: Sequence[str] = ()) -> Callable[[Function], Command]:
    """Make a function a command."""
    return lambda function: Command(name, about, arguments, aliases, function)


def arg(name: str, about: str, heading: str = "", **options: Any) -> Argument:
    return Argument(name, {"help": about} | options, heading)


def flag(name: str, default: float | str, about: str, metavar: str = "") -> Argument:
    """A flag whose value is of the same kind as its default."""
    kind = type(default)
    return arg(name, about, type=kind, default=default, metavar=metavar or METAVARS[kind])


def path(name: str, about: str, metavar: str = "DIR", **options: Any) -> Argument:
    """An argument that names a file or a folder."""
    return arg(name, about, type=Path, metavar=metavar, **options)
