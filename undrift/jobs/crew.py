"""Processes that do tasks, each one at a time. If one dies, the others go on, and another takes its place."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import torch

from undrift.core import stopping
from undrift.core.errors import UndriftError

T = TypeVar("T")
PAUSE = 0.2  # seconds between two looks for a signal


class Died(NamedTuple):
    """In place of a result: the process died."""

    code: int | None  # -9 after kill -9


class Member:
    """One process, and the task that it does."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, size))
        self.process.start()
        theirs.close()  # so that reading ends when the process does
        self.task: Any = None


class Crew:
    """At most `size` processes, which share the cores. Use it as `with Crew(size) as crew`."""

    def __init__(self, size: int) -> None:
        self.size, self.members = size, list[Member]()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        for member in self.members:
            if member.task is not None:
                member.process.kill()
            member.pipe.close()  # one without a task ends by itself
        for member in self.members:
            member.process.join()

    def do(
        self, function: Callable[..., Any], waiting: deque[T], hear: Callable[[Any], None] = lambda news: None
    ) -> Iterator[tuple[T, Any]]:
        """Yield each task with what function(task, tell) returned, or Died. `hear` is given all that it tells.

        `waiting` may be added to meanwhile. An error for the user is raised here too. A signal that asks this process to stop is
        passed on, and Stopped is raised when all have stopped.
        """
        stopped = None
        while waiting or self.busy():
            if stopping.stop_signal() and stopped is None:
                stopped = stopping.notice()
                waiting.clear()
                for member in self.members:
                    member.process.terminate()
            while waiting and (free := self.free()) is not None:
                free.task = waiting.popleft()
                with contextlib.suppress(BrokenPipeError):  # it has died, as will be noticed
                    free.pipe.send((function, free.task))
            ready = wait([member.pipe for member in self.busy()], PAUSE)
            for member in [member for member in self.busy() if member.pipe in ready]:
                try:
                    done, content = member.pipe.recv()
                except (EOFError, OSError):
                    member.process.join()
                    member.pipe.close()
                    self.members.remove(member)
                    done, content = True, Died(member.process.exitcode)
                if not done:
                    hear(content)
                    continue
                task, member.task = member.task, None
                if isinstance(content, UndriftError):
                    raise content
                if stopped is None or not isinstance(content, Died):
                    yield task, content
        if stopped is not None:
            raise stopped

    def busy(self) -> list[Member]:
        return [member for member in self.members if member.task is not None]

    def free(self) -> Member | None:
        """A process without a task, if there is or can be one more."""
        for member in self.members:
            if member.task is None:
                return member
        if len(self.members) == self.size:
            return None
        self.members.append(Member(self.size))
        return self.members[-1]


def _work(pipe: Connection, size: int) -> None:
    """The life of a process: do what comes through the pipe."""
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores() // size)))  # OMP_NUM_THREADS may want fewer
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent, even if that is killed
    for each in stopping.SIGNALS:
        if each != signal.SIGTERM:
            signal.signal(each, signal.SIG_IGN)  # the parent passes on what a terminal sends to all
    with contextlib.suppress(stopping.Stopped, EOFError, BrokenPipeError), stopping.heed_signals(lambda text: None):
        while True:
            function, task = pipe.recv()
            try:
                result = function(task, lambda news: pipe.send((False, news)))
            except UndriftError as error:
                result = error
            pipe.send((True, result))


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_size(device: str) -> int:
    """How many processes do runs if nothing is said: one for each core, but one on a GPU."""
    return 1 if device != "cpu" and torch.cuda.is_available() else cores()
