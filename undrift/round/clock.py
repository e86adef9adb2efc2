"""How long clients take for an answer on a virtual clock: drawn, or as a trace of measured seconds says.

A trace is a text file: a line `client,seconds` and then a line for each answer of a client; clients count from 0. In round t a
client takes the seconds of its line t, and after the last one of the first again. A file of `write_trace` has a checksum.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from undrift.core.errors import BadData, BadSetting
from undrift.core.files import replacing, writing
from undrift.core.streams import Purpose, fold, normal, stream, words

Ids = NDArray[np.int64]
Seconds = NDArray[np.float64]

LOGNORMAL, HEADER, SEAL = "lognormal:", "client,seconds", "# undrift trace, "
WIDEST = 5.0  # the widest spread: of ten thousand clients the slowest would then take 10^8 times as long as the fastest


class Traffic(NamedTuple):
    """What a client's answer costs its link."""

    bytes: int  # down and up
    exchanges: int  # a message down and one up each


class Clock(Protocol):
    """Says how long clients take."""

    def seconds(self, ids: Ids, version: int, steps: Ids, traffic: Traffic) -> Seconds:
        """The seconds that clients `ids` [n] take for an answer of so many steps [n] from the model of that round."""


@dataclass(frozen=True)
class Drawn:
    """Each client has a speed and a link for the whole run: e^(spread z) times the median's seconds, z from N(0, 1)."""

    step_seconds: float  # how long a local step takes the median client
    speed: Seconds  # [N] what these are multiplied by
    link: Seconds  # [N] likewise the seconds that a byte takes
    bandwidth: float  # Mbit/s of the median client; 0: sending takes no time
    latency: float  # seconds of each message

    @classmethod
    def of(
        cls,
        spreads: tuple[float, float],
        clients: int,
        seed: int,
        step_seconds: float,
        bandwidth: float,
        latency: float,
    ) -> Drawn:
        key = fold(stream(seed, Purpose.SPEED), torch.arange(clients))
        speed, link = (np.exp(spreads * normal(words(key, 2)).numpy())).T
        return cls(step_seconds, speed, link, bandwidth, latency)

    def seconds(self, ids: Ids, version: int, steps: Ids, traffic: Traffic) -> Seconds:
        sending = 8 * traffic.bytes / (self.bandwidth * 1e6) if self.bandwidth else 0.0
        waiting = 2 * traffic.exchanges * self.latency
        found: Seconds = steps * self.step_seconds * self.speed[ids] + waiting + sending * self.link[ids]
        return found


@dataclass(frozen=True)
class Traced:
    """Each client takes the seconds of its own trace in turn, whatever it computes and sends."""

    trace: Sequence[Seconds]  # what each client takes

    def seconds(self, ids: Ids, version: int, steps: Ids, traffic: Traffic) -> Seconds:
        return np.array([self.trace[i][version % len(self.trace[i])] for i in ids.tolist()])


def parse_spreads(text: str) -> tuple[float, float] | None:
    """The spreads of speeds and links in a clock that is drawn; None for one that is read.

    >>> parse_spreads("lognormal:0.5"), parse_spreads("lognormal:0.5,0.2"), parse_spreads("phones.csv")
    ((0.5, 0.0), (0.5, 0.2), None)
    """
    if not text.startswith(LOGNORMAL):
        return None
    try:
        found = [float(part) for part in text.removeprefix(LOGNORMAL).split(",")]
    except ValueError:
        found = []
    if len(found) not in (1, 2) or not all(0 <= spread <= WIDEST for spread in found):
        raise BadSetting(
            f"clock takes lognormal:SPEEDS or lognormal:SPEEDS,LINKS with spreads from 0 to {WIDEST:g}, or a trace, not {text!r}"
        )
    return found[0], found[1] if len(found) == 2 else 0.0


def read_trace(path: Path, clients: int) -> Traced:
    """The trace in a file, which must have lines for all of so many clients."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise BadSetting(
            f"cannot read the trace {path}: {error.strerror}; clock takes lognormal:0.5 or a trace"
        ) from error
    except UnicodeDecodeError as error:
        raise BadData(f"{path} is no trace: it is not text") from error
    lines, first = text.split("\n"), 1
    if text.startswith(SEAL):
        content = text.partition("\n")[2]
        if lines[0] != seal(content):
            raise BadData(
                f"the trace {path} is damaged: its checksum is wrong; without its first line it is read as it is"
            )
        lines, first = lines[1:], 2
    if lines[0].strip() != HEADER:
        raise BadData(f"{path} is no trace: line {first} must be {HEADER!r}, not {lines[0][:40]!r}")
    if lines.pop():
        raise BadData(f"the trace {path} is damaged: its last line has no end")
    found: list[list[float]] = [[] for _ in range(clients)]
    for number, line in enumerate(lines[1:], first + 1):
        client, seconds = entry(line)
        if not (0 <= client < clients and 0 < seconds < math.inf):
            raise BadData(
                f"the trace {path} is damaged in line {number}: {line[:40]!r} is no client from 0 to {clients - 1} "
                "and a number of seconds above 0"
            )
        found[client].append(seconds)
    missing = [client for client, each in enumerate(found) if not each]
    if missing:
        raise BadData(f"the trace {path} has no line for client {missing[0]}; each of {clients} clients needs one")
    return Traced([np.array(each) for each in found])


def entry(line: str) -> tuple[int, float]:
    """A line's client and seconds; (-1, NaN) where there are none."""
    client, comma, seconds = line.partition(",")
    try:
        return (int(client), float(seconds)) if comma and client.isdecimal() else (-1, math.nan)
    except ValueError:
        return -1, math.nan


def write_trace(path: Path, rows: Sequence[tuple[int, float]]) -> None:
    """Write a trace of these clients and seconds."""
    content = "\n".join([HEADER, *(f"{client},{seconds!r}" for client, seconds in rows), ""])
    with writing(path), replacing(path) as temporary:
        temporary.write_text(f"{seal(content)}\n{content}")


def seal(content: str) -> str:
    return f"{SEAL}check {zlib.crc32(content.encode()):08x}"
