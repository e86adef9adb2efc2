"""`undrift ls`, `watch` and `verify`: what folders of runs hold."""

from __future__ import annotations

import argparse

from undrift.cli.command import arg, command, flag, path
from undrift.cli.console import plain_console, say

FOLDERS = path("folders", "folders of runs, or folders that hold some", nargs="+")


@command("ls", "list runs: how far they are, their best score, the time left", FOLDERS)
def ls_command(arguments: argparse.Namespace) -> None:
    from rich.table import Table

    from undrift.jobs.overview import Line, overview

    table = Table(*Line._fields)
    for line in overview(arguments.folders):
        table.add_row(*line)
    plain_console(width=160).print(table)


@command(
    "watch",
    "show runs in a browser as they grow, on this machine only and to whoever has the address",
    path("folders", "folders of runs; they may still be empty", nargs="+"),
    flag("--port", 8766, "the port on this machine; 0: any that is free [8766]", "PORT"),
)
def watch_command(arguments: argparse.Namespace) -> None:
    from undrift.jobs.defaults import default_settings
    from undrift.jobs.watch import serve

    serve(arguments.folders, arguments.port, say, default_settings)


@command(
    "verify",
    "say whether the files of runs are whole, and from which round a run can go on",
    FOLDERS,
    arg("--back", "go back to the last checkpoint that is whole, if the last one is damaged", action="store_true"),
)
def verify_command(arguments: argparse.Namespace) -> int:
    from undrift.jobs.verify import verify
    from undrift.report.load import find

    damaged = False
    for folder in find(arguments.folders):
        damage, advice = verify(folder, arguments.back)
        damaged = damaged or bool(damage)
        for line in damage:
            print(line)
        print(f"{folder} is {'damaged' if damage else 'whole'}; {advice}")
    return 2 if damaged else 0
