"""Client apps run in forks of a process that has imported everything, and by themselves where there is none."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.patience import patient
from undrift.deploy.ask_fork import SOCKET
from undrift.deploy.join import fork_words, write_programs

USAGE = "unrecognized arguments: --nonsense"  # what Flower's program says to an argument that it does not know


def wait(true: Callable[[], object]) -> None:
    end = time.monotonic() + patient(60)
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs, and is not only kept for whoever should have waited for it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, subprocess.Popen[str]]]:
    """A folder whose path is too long for a socket, the process that forks there, and the shell that has started it."""
    folder = tmp_path_factory.mktemp("long" * 40) / "bin"
    write_programs(folder, "own")
    command = ["sh", "-c", '"$@" & echo $!; wait', "sh", *fork_words(folder, "own")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        wait(lambda: (folder / SOCKET).exists())
        yield folder, pid, shell
        shell.kill()


def ask(folder: Path, log: Path) -> int:
    """Run the program as a SuperNode does, and return its exit code."""
    with log.open("w") as said:
        program = str(folder / "flwr-clientapp")
        return subprocess.run([program, "--token", "0", "--nonsense"], stdout=said, stderr=said, check=False).returncode


def test_a_fork_takes_the_words_and_writes_where_the_program_would(
    forks: tuple[Path, int, subprocess.Popen[str]], tmp_path: Path
) -> None:
    folder, pid, _ = forks
    assert stat.S_IMODE((folder / SOCKET).stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    for log in (tmp_path / "first", tmp_path / "second"):
        assert ask(folder, log) == 0  # it has been taken over, and its own end is nobody's concern
        wait(lambda log=log: USAGE in log.read_text())  # type: ignore[misc]
    wait(lambda: not children(pid))  # nobody is left, not even as a zombie


def test_where_nobody_answers_the_program_runs_by_itself(tmp_path: Path) -> None:
    write_programs(tmp_path / "bin", "own")
    assert ask(tmp_path / "bin", tmp_path / "log") == 2 and USAGE in (tmp_path / "log").read_text()


def test_it_ends_with_the_process_that_has_started_it(forks: tuple[Path, int, subprocess.Popen[str]]) -> None:
    _, pid, shell = forks
    assert alive(pid)
    os.kill(shell.pid, signal.SIGKILL)
    wait(lambda: not alive(pid))
