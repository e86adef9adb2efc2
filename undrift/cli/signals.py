"""Signals end a command that trains between two rounds, and it says how to go on."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from undrift.core import ranks, stopping

ON_RANKS = ("run", "dataparallel", "dp", "pipe")  # commands that torchrun may start
STOPPABLE = (*ON_RANKS, "sweep", "tune", "reproduce")  # commands that go on later
STOPPABLE_ACTIONS = ("local", "server", "node")  # actions of `undrift deploy`


def heed_signals(arguments: argparse.Namespace, words: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Stop a command that can go on at a signal, and say how to go on; `words` are its arguments."""
    if arguments.command not in STOPPABLE and getattr(arguments, "action", "") not in STOPPABLE_ACTIONS:
        return contextlib.nullcontext()

    def say(how: str) -> None:
        if ranks.speaks():  # not by print: standard error may belong to the progress bar
            show_cursor = "\x1b[?25h" if os.isatty(2) else ""
            again = shlex.join(command_to_go_on(arguments, words))
            os.write(2, f"{show_cursor}undrift: {how}; go on with: {again}\n".encode())

    return stopping.heed_signals(say, repeats=ranks.count() == 1)  # torchrun sends its ranks what they got already


def command_to_go_on(arguments: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """The command that goes on with what was begun."""
    again, out = ["undrift", *words], arguments.out
    if isinstance(out, Path) and not any(word.startswith("--out") for word in words):
        again += ["--out", str(out)]
    if isinstance(out, Path) and (out / "run.toml").exists() and not getattr(arguments, "resume", True):
        again.append("--resume")
    if ranks.count() > 1:
        alone = os.environ.get("LOCAL_WORLD_SIZE") == str(ranks.count())  # on one machine
        again = ["torchrun", *(("--nproc-per-node", str(ranks.count())) if alone else ("...",)), "-m", *again]
    return again
