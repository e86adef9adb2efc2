"""Trackio: on this machine, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says; look at it with `trackio show`."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import trackio

from undrift.jobs.tracking import PROJECT, Scores, Tracked


class Tracker:
    """The run in Trackio, under its name and id."""

    def __init__(self, run: Tracked) -> None:
        project, name = os.environ.get("TRACKIO_PROJECT", PROJECT), f"{run.name}-{run.id}"
        self.context = contextvars.Context()  # one for each run: packed runs are open at the same time
        self.run = self.context.run(
            trackio.init, project, name, group=run.group, config=dict(run.settings), resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        self.reached = int(getattr(self.run, "_initial_last_step", run.round) or 0)  # it has no public name

    def add(self, scores: Sequence[Scores]) -> None:
        for round, numbers in scores:
            self.run.log(numbers, step=round)

    def end(self, stopped: str, report: Path | None) -> None:
        if report is not None:
            self.context.run(self.run.log_artifact, str(report), "report", "report")
        finish: Callable[[], None] = self.run.finish
        self.context.run(finish)
