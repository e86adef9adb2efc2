"""`undrift reproduce` and `results`: papers' tables, run again, and a site of what came out."""

from __future__ import annotations

import argparse
from pathlib import Path

from undrift.cli.command import arg, command, flag, path
from undrift.cli.console import say
from undrift.cli.flags import DEVICE, MINUTES, check_minutes, pack_flag
from undrift.core.errors import BadSetting
from undrift.jobs.plain_values import words

SCALE = "small: tiny runs on data that come with the package, to try it out [full]"
SITE = "the folder for index.html and a page for each paper [runs/results-site]"


@command(
    "reproduce",
    "run what a paper's table or figure needs, and compare with the published numbers",
    arg("suite", "a table or figure, such as gradma-table1; --list shows all", nargs="?"),
    arg("--list", "list the tables and figures", action="store_true"),
    path(
        "--out", "the folder for results, pages and unfinished runs [runs/reproduced]", default=Path("runs/reproduced")
    ),
    arg("--columns", "only these columns, separated by commas", type=words, default=(), metavar="NAMES"),
    arg("--methods", "only these rows, separated by commas", type=words, default=(), metavar="NAMES"),
    flag("--seeds", 0, "how many seeds in every cell [as in the paper]"),
    flag("--tune", "none", "search the paper's grid for settings, or take those of a file [none]", "grid|none|FILE"),
    flag("--scale", "full", SCALE, "full|small"),
    MINUTES,
    arg("--plan", "print what would be run, and end", action="store_true"),
    DEVICE,
    pack_flag("cells"),
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
    check_minutes(arguments.minutes)
    asked = Asked(
        arguments.suite, arguments.out, arguments.columns, arguments.methods, arguments.seeds, arguments.tune,
        arguments.scale, arguments.minutes, arguments.pack, arguments.device, arguments.plan,
    )  # fmt: skip
    return 1 if reproduce(asked, say) else 0


@command(
    "results",
    "write a site of what undrift reproduce has found: a page for each paper",
    path("folders", "folders that undrift reproduce wrote", nargs="+"),
    path("--out", SITE, default=Path("runs/results-site")),
)
def results_command(arguments: argparse.Namespace) -> None:
    from undrift.report.results_site import write_site

    files = write_site(arguments.folders, arguments.out)
    print(f"{len(files)} pages; begin with {files[0]}")
