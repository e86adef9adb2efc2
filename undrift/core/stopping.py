"""Signals that ask a run to stop: SIGTERM, SIGHUP and SIGINT (Ctrl-C).

A loop looks at `asked` between rounds, writes its checkpoint and raises `Stopped`. The process ends at once at a second
signal, or where no loop has taken notice after GRACE seconds. A thread listens, because Python's own handlers do not run
while the main thread waits for another process.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name))
GRACE = 10.0  # seconds to finish a round
ECHO = 1.0  # seconds within which signals are one: a terminal sends it to a process, and so may the process's parent

_asked = 0  # the signal that came
_end_of_time = math.inf  # by time.monotonic(), as `within` sets it
_noticed = threading.Event()


class Stopped(KeyboardInterrupt):
    """The end of a run that a signal asked for, after its checkpoint."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


def stop_signal() -> int:
    """The signal that asks this process to stop, or 0. The end of `within` counts as SIGTERM."""
    return _asked or (int(signal.SIGTERM) if time.monotonic() >= _end_of_time else 0)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[Callable[[], float]]:
    """Ask loops in this block to stop when so many seconds have passed; yields a function that counts those left."""
    global _end_of_time
    before, end = _end_of_time, time.monotonic() + seconds
    _end_of_time = min(before, end)
    try:
        yield lambda: end - time.monotonic()
    finally:
        _end_of_time = before


def notice() -> Stopped:
    """The exception to raise once all is written; from now on only a second signal ends the process at once."""
    _noticed.set()
    return Stopped(_asked or signal.SIGTERM)  # another rank may have got the signal


@contextlib.contextmanager
def heed_signals(last_words: Callable[[str], None], repeats: bool = True) -> Iterator[None]:
    """Heed signals within this block, but not those that the process was told to ignore, as by nohup.

    `last_words` tells the user how the run ended and how to go on. Without `repeats` a second signal changes nothing.
    """
    global _asked
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    _asked = 0
    _noticed.clear()
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    heard = [each for each in SIGNALS if signal.getsignal(each) not in (signal.SIG_IGN, None)]
    wakeup = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    before = {each: signal.signal(each, lambda number, frame: None) for each in heard}
    listener = threading.Thread(target=_listen, args=(ear, heard, last_words, repeats), daemon=True)
    listener.start()
    try:
        yield
    except Stopped as stopped:
        last_words(str(stopped))
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(wakeup)
        mouth.close()
        listener.join()
        ear.close()
        _asked = 0


def _listen(ear: socket.socket, heard: Sequence[int], last_words: Callable[[str], None], repeats: bool) -> None:
    """Wait for signals until the block ends; end the process when its time is up."""
    global _asked
    began = 0.0
    while True:
        try:
            numbers = ear.recv(64)
        except TimeoutError:
            if not _noticed.is_set():
                _end(last_words)
            ear.settimeout(None)
            continue
        if not numbers:
            return
        for number in numbers:
            if number in heard and not _asked:
                _asked, began = number, time.monotonic()
            elif number in heard and repeats and time.monotonic() > began + ECHO:
                _end(last_words)
        if _asked and not _noticed.is_set():
            ear.settimeout(max(0.01, began + GRACE - time.monotonic()))


def _end(last_words: Callable[[str], None]) -> None:
    """End the process at once, as kill -9 would: the last checkpoint stands."""
    last_words(f"ended at once by {signal.Signals(_asked).name}")
    os._exit(128 + _asked)
