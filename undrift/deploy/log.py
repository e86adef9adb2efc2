"""The log of a server or a node: one line after the other."""

from __future__ import annotations

from undrift.core.names import printable

LONGEST = 2000  # most characters of a line


def say(line: str) -> None:
    """Print one line; what a client wrote can neither end it nor steer the terminal nor fill the disk."""
    print(printable(line[:LONGEST]), flush=True)
