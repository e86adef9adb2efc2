"""The command line: `undrift run`, `deploy`, `sweep`, `report` and more. It reads arguments and prints; others do the work."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from safetensors import SafetensorError

from undrift.cli.parser import parse
from undrift.cli.signals import ON_RANKS, heed_signals
from undrift.core import ranks, stopping
from undrift.core.errors import BadSetting, LostRank, UndriftError, one_line_warnings
from undrift.core.names import printable


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one line on standard error and exit code 2."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        with ranks.join(), one_line_warnings():
            arguments = parse(words)
            if ranks.count() > 1 and arguments.command not in ON_RANKS:
                raise BadSetting(
                    f"torchrun is for undrift run, dataparallel and pipe; start 'undrift {arguments.command}' without it"
                )
            with heed_signals(arguments, words):
                return int(arguments.function(arguments) or 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UndriftError, OSError, MemoryError, SafetensorError) as error:
        lost = isinstance(error, LostRank)
        if ranks.speaks() or lost:
            print(f"undrift: {message_of(error)}", file=sys.stderr, flush=True)
        if not lost:  # rank 0 may be waiting for this one, and notices when it has ended
            ranks.wait_for_first_rank()
        return 2
    except stopping.Stopped as stopped:
        ranks.wait_for_first_rank()  # which writes the checkpoint
        return 128 + stopped.number
    except KeyboardInterrupt:
        if ranks.speaks():
            print("undrift: stopped", file=sys.stderr)
        return 130


def message_of(error: Exception) -> str:
    """What an error says in one line that is safe to print: names of files, and other libraries, may hold anything."""
    if isinstance(error, UndriftError) and error.ends_with_log:
        return str(error)
    text = " ".join(str(error).split())
    return printable(text if isinstance(error, UndriftError) else f"{type(error).__name__}: {text}")
