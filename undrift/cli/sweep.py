"""`undrift sweep`: the runs of a file, and a report on them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from undrift.cli.command import arg, command, flag, path
from undrift.cli.console import ProgressDisplay
from undrift.cli.flags import pack_flag
from undrift.cli.folders import choose_folder
from undrift.cli.report import write_report
from undrift.core.errors import BadSetting
from undrift.jobs.config import FIELDS
from undrift.jobs.shipped import sweep_file


@command(
    "sweep",
    "run each algorithm with each setting and seed of a file, and report them",
    path("file", "a sweep's file, or the name of one that comes with the package, such as demo", "FILE.toml"),
    path("--out", "the folder for the runs and the report [a new one, runs/NAME]"),
    flag("--processes", 0, "how many runs at a time [one on each core; one on a GPU]"),
    pack_flag("jobs"),
    arg("--track", str(FIELDS["track"].metadata["help"]), metavar="TRACK"),
)
def sweep_command(arguments: argparse.Namespace) -> int:
    from undrift.jobs.sweep import plan

    file = sweep_file(arguments.file)
    jobs, sweep = plan(file, arguments.track)
    if arguments.processes < 0:
        raise BadSetting(f"processes must be at least 1, not {arguments.processes}")
    with choose_folder(arguments, file.stem) as say_where:
        say_where()
        failed = run_jobs(arguments, file, jobs)
        for name, message in failed.items():
            print(f"undrift: {name} failed: {message}", file=sys.stderr)
        if not any((arguments.out / job.name / "run.toml").exists() for job in jobs):
            return 1  # there is nothing to report
        write_report([arguments.out], arguments.out / "report.html", sweep.get("target"))
        return 1 if failed else 0


def run_jobs(arguments: argparse.Namespace, file: Path, jobs: list[Any]) -> dict[str, str]:
    """Run the jobs of a sweep that are not finished, and show the progress; return the messages of those that failed."""
    from undrift.jobs.crew import default_size
    from undrift.jobs.sweep import run_sweep

    asked = sum(job.config.rounds for job in jobs)
    done: dict[str, int] = {}  # rounds by job
    before: dict[str, int] = {}  # rounds of earlier commands

    def show(name: str, rounds_done: int, rounds: int) -> None:
        done[name] = rounds_done
        before.setdefault(name, rounds_done - 1)
        finished, now = sum(done.get(job.name) == job.config.rounds for job in jobs), sum(done.values())
        line = f"{finished} of {len(jobs)} runs done, round {now} of {asked}, now {name}"
        display.show(now, asked, sum(before.values()), f"{finished} of {len(jobs)} done, now {name}", line)

    with ProgressDisplay(f"{len(jobs)} runs", asked) as display:
        display.start()
        processes = arguments.processes or default_size(jobs[0].config.device)
        return run_sweep(file, jobs, arguments.out, processes, show, display.bar.console.print, arguments.pack)
