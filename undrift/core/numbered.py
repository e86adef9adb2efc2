"""Numbered folders: a command without --out writes to runs/NAME, then runs/NAME-2, runs/NAME-3 and so on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(base: Path) -> Iterator[Path]:
    """Make the next folder of a series, which two commands at once cannot both get; what stays empty is removed."""
    number, made = max(numbers(base), default=0) + 1, not base.parent.exists()
    while True:
        folder = numbered_path(base, number)
        try:
            folder.mkdir(parents=True)
            break
        except OSError as error:
            if not isinstance(error, FileExistsError) or not base.parent.is_dir():
                break  # whoever writes there will say so
            number += 1
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
            if made:
                folder.parent.rmdir()


def newest_folder(base: Path) -> Path:
    """The last folder of a series."""
    return numbered_path(base, max(numbers(base), default=1))


def numbered_path(base: Path, number: int) -> Path:
    """
    >>> numbered_path(Path("runs/demo"), 1).name, numbered_path(Path("runs/demo"), 2).name
    ('demo', 'demo-2')
    """
    return base if number == 1 else base.with_name(f"{base.name}-{number}")


def numbers(base: Path) -> list[int]:
    """The numbers of a series' folders that are there."""
    if not base.parent.is_dir():
        return []
    ends = [p.name.removeprefix(f"{base.name}-") for p in base.parent.iterdir() if p.name.startswith(f"{base.name}-")]
    return [1] * base.exists() + [int(end) for end in ends if end.isdecimal() and end == str(int(end)) and end > "1"]
