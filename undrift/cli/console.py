"""Lines, tables and the progress of long commands, on a terminal or in a log."""

from __future__ import annotations

import sys
import time
from typing import Any

EVERY = 5.0  # seconds between lines of progress without a terminal


def say(text: str) -> None:
    print(text, flush=True)


def plain_console(width: int | None = None) -> Any:
    """A console that prints names as they are: [red] and :smile: in them mean nothing. `width` is that of a log."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, markup=False, emoji=False)


class ProgressDisplay:
    """Shows how far a command is: by a bar on a terminal, and by a line every few seconds in a log."""

    def __init__(self, what: str, rounds: int | None = None) -> None:
        self.bar = progress_bar()
        self.on_terminal = self.bar.console.is_terminal
        self.task = self.bar.add_task(what, total=rounds, note="")
        self.printed = time.monotonic()  # when the last line was
        self.first = (0.0, 0)  # when the first rounds were there, and how many; the start before them is no pace

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar.live.is_started:
            self.bar.stop()

    def start(self) -> None:
        """Show the bar; again, this does nothing."""
        if self.on_terminal:
            self.bar.start()

    def show(self, done: int, rounds: int, before: int, note: str, line: str) -> None:
        """Show that so many rounds are done, `before` of them by an earlier command: the bar with a note, or the line."""
        if self.on_terminal:
            self.bar.update(self.task, completed=done, total=rounds, note=note)
            return
        now, own = time.monotonic(), done - before
        if not self.first[1]:
            self.first = now, own
        if now - self.printed < EVERY:
            return
        self.printed = now
        if own > self.first[1]:
            from undrift.jobs.overview import in_words

            pace = (now - self.first[0]) / (own - self.first[1])
            line += f", {in_words(pace * (rounds - done))} left"
        say(line)


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
        TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False), console=plain_console(),
        redirect_stdout=False,
    )  # fmt: skip
