"""`undrift tune`: the settings with which a sweep's algorithms do best."""

from __future__ import annotations

import argparse
import functools

from undrift.cli.command import arg, command, flag, path
from undrift.cli.console import say
from undrift.cli.flags import DEVICE, MINUTES, check_minutes, pack_flag
from undrift.cli.folders import choose_folder
from undrift.core import stopping
from undrift.jobs.plain_values import words
from undrift.jobs.shipped import sweep_file

RUNGS = "shares of the rounds after which the worse settings drop out [0.1,0.25,1]"


def numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, words(text)))


@command(
    "tune",
    "pick each algorithm's settings from a sweep's grid, on validation samples, by successive halving",
    path("file", "a sweep's file, or the name of one that comes with the package", "FILE.toml"),
    path("--out", "the folder for tuned.toml, ALGORITHM.toml and the trials [a new one, runs/tuned-NAME]"),
    arg("--rungs", RUNGS, type=numbers, default=(0.1, 0.25, 1.0), metavar="SHARES"),
    flag("--keep", 4, "one in N settings goes on to the next rung [4]"),
    flag("--validation", 0.1, "share of the training samples that is held out to compare on [0.1]", "SHARE"),
    MINUTES,
    DEVICE,
    pack_flag("trials"),
)
def tune_command(arguments: argparse.Namespace) -> None:
    from undrift.jobs.tune import tune

    file, minutes = sweep_file(arguments.file), arguments.minutes
    check_minutes(minutes)
    options = {name: getattr(arguments, name) for name in ("rungs", "keep", "validation")}
    with choose_folder(arguments, f"tuned-{file.stem}") as say_where:
        say_once = functools.cache(say_where)  # when the work begins

        def tell(text: str) -> None:
            say_once()
            say(text)

        with stopping.within(60 * minutes or float("inf")) as left:
            try:
                tune(file, arguments.out, tell, arguments.pack, arguments.device, **options)
                say(f"written to {arguments.out / 'tuned.toml'}")
            except stopping.Stopped:
                if left() > 0:
                    raise
                say(f"stopped after {minutes:g} minutes; the same command goes on with --out {arguments.out}")
