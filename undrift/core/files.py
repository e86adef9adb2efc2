"""Durable writes: data that survives a power failure, and errors in one line where it cannot be written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from safetensors import SafetensorError

from undrift.core.errors import CannotWrite


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it, if they are not there."""
    if not path.is_dir():
        make_folder(path.parent, mode)
        path.mkdir(mode, exist_ok=True)
        sync(path.parent)


def make_private(path: Path) -> None:
    """Make a folder that only its owner can enter, and those above it, if they are not there."""
    make_folder(path, 0o700)


def cache_folder() -> Path:
    """The user's folder for what can be made again; it may be missing."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "undrift"


def data_folder() -> Path:
    """The user's folder for data sets that were added, where UNDRIFT_DATA names no other; it may be missing."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "undrift"


@contextlib.contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Let one process, or thread, at a time into this block; the file `lock` is there for nothing else, and stays."""
    import fcntl  # not on Windows

    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file to be written, which then replaces `path`."""
    temporary = path.with_name(f".{path.name}")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except Exception:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # on a full disk it would only be in the way
        raise
    sync(path.parent)


def write_all(file: FileIO, content: bytes | memoryview) -> None:
    """Write to an unbuffered file, which may take a part only."""
    rest = memoryview(content).cast("B")
    while len(rest):
        rest = rest[file.write(rest) :]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what a full, read-only or missing disk raises into one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise CannotWrite(f"cannot write {path}: {why}; once that is mended, go on with --resume") from error
