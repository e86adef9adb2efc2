"""`undrift report`: the page on runs, and its tables in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

from undrift.cli.command import arg, command, path
from undrift.cli.console import plain_console
from undrift.core.errors import BadSetting

TARGET = "also say how many rounds and bytes each method took to this accuracy"


@command(
    "report",
    "write tables and curves of runs as one HTML page",
    path("folders", "folders of runs, or folders that hold some", nargs="+"),
    path("--out", "the page to write", "FILE.html", required=True),
    arg("--target", TARGET, type=float, metavar="ACCURACY"),
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

    from undrift.jobs.defaults import default_settings
    from undrift.report import load as runs
    from undrift.report import page, scores, summary, text
    from undrift.report.document import title_of

    loaded = page.write(folders, out, target, default_settings)
    console = plain_console(width=120)
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
