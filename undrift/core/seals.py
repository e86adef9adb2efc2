"""Checksums that a run's text files carry, so that any changed byte is noticed by whoever reads them.

A JSON object ends with `"check"`, a TOML file with a comment. In a file of lines each checksum begins with the one of the line
before, and the first with the id of the run: a line belongs to its place and its run.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from undrift.core.errors import BadRunFolder
from undrift.core.files import replacing, write_all

BEFORE, AFTER = b', "check": "', b'"}'
END = len(BEFORE) + 8 + len(AFTER)


class Place(NamedTuple):
    """The end of a line in a file of sealed lines."""

    bytes: int
    check: str  # the seal of that line; for an empty file, the id of the run


def check(content: bytes, before: str = "") -> str:
    return f"{zlib.crc32(content, zlib.crc32(before.encode())):08x}"


def seal(facts: Mapping[str, Any], before: str = "", indent: int | None = None) -> bytes:
    """A JSON object, not an empty one, with its checksum at its end; `before` is a text that it follows.

    >>> seal({"round": 1})
    b'{"round": 1, "check": "2d338db2"}\\n'
    """
    content = json.dumps(facts, indent=indent).encode()[:-1].rstrip()
    return content + BEFORE + check(content, before).encode() + AFTER + b"\n"


def unseal(sealed: bytes, before: str = "") -> tuple[dict[str, Any], str]:
    """A sealed JSON object and its checksum; raises ValueError."""
    content, end = sealed[: -END - 1], sealed[-END - 1 :]
    found = check(content, before)
    if end != BEFORE + found.encode() + AFTER + b"\n":
        raise ValueError("its checksum is wrong or missing")
    return json.loads(content + b"}"), found


def read_sealed(path: Path) -> dict[str, Any]:
    """The content of a file that `seal` made."""
    try:
        return unseal(path.read_bytes())[0]
    except OSError as error:
        raise BadRunFolder(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadRunFolder(f"{path} is damaged: {error}") from error


def write_sealed(path: Path, facts: Mapping[str, Any]) -> None:
    """Put a sealed JSON object in place of a file."""
    with replacing(path) as file:
        file.write_bytes(seal(facts, indent=1))


def seal_toml(text: str, run: str) -> bytes:
    """A TOML file with the run's id and a checksum in a comment at its end."""
    content = text.encode()
    return content + f"# run {run}, check {check(content, run)}\n".encode()


def unseal_toml(sealed: bytes) -> tuple[str, str]:
    """The text of a sealed TOML file and the run's id; raises ValueError."""
    at = sealed.rfind(b"# run ")
    text, run = sealed[: max(at, 0)].decode(), sealed[at + 6 :].partition(b",")[0].decode()
    if at < 0 or seal_toml(text, run) != sealed:
        raise ValueError("its checksum is wrong or missing")
    return text, run


def append_lines(file: FileIO, end: Place, *records: Mapping[str, Any]) -> Place:
    """Add sealed lines to a file that ends at `end`; return its new end."""
    length, before = end
    for record in records:
        line = seal(record, before)
        write_all(file, line)
        length, before = length + len(line), check_of(line)
    return Place(length, before)


def last_place(path: Path) -> Place | None:
    """The end of a file of whole lines; None if there are none."""
    if not path.exists() or not path.stat().st_size:
        return None
    with path.open("rb") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - END - 1))
        return Place(length, check_of(file.read()))


def check_of(line: bytes) -> str:
    return line[-len(AFTER) - 9 : -len(AFTER) - 1].decode(errors="replace")


def read_lines(path: Path, run: str, place: Place | None = None, further: bool = True) -> Iterator[dict[str, Any]]:
    """The objects in a file of sealed lines of that run, which must reach `place`; those after it only if `further`."""
    return (record for _, record in read_placed_lines(path, run, place, further))


def read_placed_lines(
    path: Path, run: str, place: Place | None = None, further: bool = True
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The same, each with the byte at which its line begins.

    A last line without its end is what a kill leaves, and is skipped; anything else that does not fit is damage.
    """
    least, length, before, reached = place or Place(0, run), 0, run, False
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                if not reached and length >= least.bytes:
                    if (length, before) != least:
                        raise BadRunFolder(f"{path} does not fit the run's checkpoint")
                    reached = True
                if reached and not further:
                    return
                line = file.readline()
                if not line.endswith(b"\n"):
                    break
                try:
                    record, before = unseal(line, before)
                except (ValueError, RecursionError) as error:
                    tail = " (after the last checkpoint)" if reached else ""
                    raise BadRunFolder(f"{path} is damaged in line {number}: {error}{tail}") from error
                yield length, record
                length += len(line)
    except FileNotFoundError:
        reached = not least.bytes
    except OSError as error:
        raise BadRunFolder(f"cannot read {path}: {error.strerror}") from error
    if not reached:
        raise BadRunFolder(f"{path} is damaged: it is shorter than the run's checkpoint says")
