"""Pulls answers over Flower's grid, so that no client keeps the server from the answers of the others.

Flower announces an answer before its parts have come. It then waits up to two hours for them, takes as much as was sent, and
whatever is wrong with a part ends the server's app. Here each answer is pulled by a thread of its own. It waits for a part
without holding the others, and takes them all once they are there, one client's at a time, and no more than was to be expected.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

from undrift.deploy.messages import Refused

PARTS = 20_000  # most parts of an answer; Flower cuts arrays into parts of 5 MiB
SOON, LATE = 0.2, 5.0  # seconds between two looks for a part: at first, and at most
TURN = threading.Lock()  # held by the pull whose answer is in memory
LONGEST = 200  # most characters of what Flower says of an error
GRID, FUNCTION = "flwr.superlink.grid.http_grid", "pull_objects"  # Flower's, which takes the parts of a message
Parts = Mapping[str, bytes]
Fetch = Callable[[str], bytes]


class Pull(threading.Thread):
    """Pulls the answer to one message. Once it is `done` there may be replies; at the end of a `with` it is let go."""

    def __init__(self, grid: Grid, id: str, most: int, until: float) -> None:
        """`most` is how many bytes the answer may have; until when it may wait for its parts is by time.monotonic()."""
        super().__init__(daemon=True, name=f"pull {id}")
        self.grid, self.id, self.most, self.until = grid, id, most, until
        self.replies, self.error, self.refused = list[Message](), list[Exception](), ""
        self.done, self.over, self.takes = threading.Event(), threading.Event(), False
        self.start()

    def __enter__(self) -> list[Message]:
        """The replies that have come; raise Refused if what has come is none."""
        if self.error or self.refused:
            self.let_go()
        for error in self.error:
            self.grid.get_nodes()  # if the SuperLink itself does not answer, it is not this client's fault
            raise Refused(f"it is no message: {type(error).__name__}: {error}"[:LONGEST])
        if self.refused:
            raise Refused(self.refused)
        return self.replies

    def __exit__(self, *reason: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Forget the answer, or wait for it no longer."""
        self.replies = []
        self.over.set()

    def run(self) -> None:
        try:
            self.replies = list(self.grid.pull_messages([self.id]))
        except Exception as error:  # a part may hold anything, and Flower may fail at it in any way
            self.error = [error]
        self.done.set()
        self.over.wait()
        if self.takes:
            TURN.release()

    def parts(self, ids: list[str], fetch: Fetch) -> Parts:
        """The parts of a message. The last id is its own, and what is sent last."""
        if len(ids) > PARTS:
            raise self.refusal(ids[-1], f"it has {len(ids)} parts; at most {PARTS} are taken")
        awaited = ids[-1]
        while True:
            self.wait_for(awaited, fetch)
            TURN.acquire()
            self.takes = True
            found, size = dict[str, bytes](), 0
            try:
                for awaited in ids:
                    found[awaited] = fetch(awaited)
                    size += len(found[awaited])
                    if size > self.most:
                        raise self.refusal(awaited, f"it has {size} bytes or more; at most {self.most} were expected")
                return found
            except ObjectUnavailableError:
                self.takes = False
                TURN.release()

    def wait_for(self, id: str, fetch: Fetch) -> None:
        """Wait until a part is there."""
        pause = SOON
        while True:
            try:
                fetch(id)
                return
            except ObjectUnavailableError:
                if time.monotonic() > self.until or self.over.wait(pause):
                    raise ObjectPullError(id, "it did not come in time") from None
                pause = min(2 * pause, LATE)

    def refusal(self, id: str, why: str) -> ObjectPullError:
        self.refused = why
        return ObjectPullError(id, why)


def pull_for_each(flower: Callable[..., Parts]) -> Callable[..., Parts]:
    """Flower's function that takes the parts of a message, with that of the pull in whose thread it runs in its place."""

    def pull_objects(object_ids: list[str], pull_object_fn: Fetch, **named: Any) -> Parts:
        pull = threading.current_thread()
        if isinstance(pull, Pull):
            return pull.parts(object_ids, pull_object_fn)
        return flower(object_ids, pull_object_fn, **named)

    return pull_objects


def set_up() -> None:
    """Let pulls take the parts of their messages themselves."""
    grid: Any = importlib.import_module(GRID)
    flower = getattr(grid, FUNCTION, None)
    if not callable(flower):
        sys.exit(f"this Flower pulls answers in another way, without {FUNCTION}: one client could keep the server busy")
    if flower.__module__ != __name__:
        setattr(grid, FUNCTION, pull_for_each(flower))
