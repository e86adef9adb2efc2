"""The folder that a command writes to where --out does not say."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from undrift.core import ranks
from undrift.core.numbered import new_folder, newest_folder


@contextlib.contextmanager
def choose_folder(arguments: argparse.Namespace, name: str) -> Iterator[Callable[[], None]]:
    """Let arguments.out be a new folder in runs/, or the last one of that name if it is resumed, where --out is not given.

    What is yielded says so, and is to be called when the work begins.
    """
    if arguments.out is not None:
        yield lambda: None
        return
    base = Path("runs") / name
    with contextlib.ExitStack() as stack:
        folder = None
        if ranks.rank() == 0:
            resume = getattr(arguments, "resume", False)
            folder = newest_folder(base) if resume else stack.enter_context(new_folder(base))
        arguments.out = chosen = ranks.first_rank_says(folder)
        yield lambda: print(f"no --out was given, so this goes to {chosen}", flush=True) if ranks.speaks() else None
