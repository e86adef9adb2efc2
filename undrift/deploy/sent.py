"""A client's log of what it has sent, in plain words, for the people whose samples it trains on."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from undrift.core.files import make_private
from undrift.core.names import printable
from undrift.deploy.messages import Fact, Letter, decode
from undrift.deploy.secure import KEYS, SHARES, UNMASK
from undrift.deploy.versions import PREFIX

LOG = "sent.log"
WHICH = ("run", "client", "round", "exchange")  # which letter is answered: the server knows that already


def write_sent(folder: Path, letter: Letter, answer: Letter) -> None:
    """Add a line to the log in the folder of the client's states in this run."""
    add_line(folder, f"round {letter.fact('round', int) + 1}: {describe(letter, answer)}")


def write_report(folder: Path, report: Mapping[str, Fact]) -> None:
    """Add a line to the log in the folder of all the client's states: what it says of itself when it joins a run."""
    told = ", ".join(f"{name} {value}" for name, value in report.items() if not name.startswith(PREFIX))
    compared = "; and its version of undrift, a digest of the algorithm's file and the run's settings"
    add_line(folder, f"joined: sent {told}{compared if any(name.startswith(PREFIX) for name in report) else ''}")


def add_line(folder: Path, text: str) -> None:
    make_private(folder)
    handle = os.open(folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(printable(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}") + "\n")


def describe(letter: Letter, answer: Letter) -> str:
    """What an answer says to the server."""
    exchange, about = letter.fact("exchange", str), letter.facts.get("clients", 0)
    if exchange.endswith(KEYS):
        return "sent two public keys, made for this sum, and a hash of the run's settings; nothing about samples"
    if exchange.endswith(SHARES):
        return f"sent shares of the secrets of its masks, sealed for each of {about} clients; nothing about samples"
    if exchange.endswith(UNMASK):
        return f"opened shares, so that masks can be taken off the sum of {about} clients: {clients_of(letter)}"
    numbers = sum(math.prod(array.shape) for array in answer.arrays.values())
    if "numbers" in answer.arrays:
        return (
            f"sent {numbers} numbers under masks ({answer.nbytes} bytes), which can be read only as a sum with those of "
            f"the {about} clients {clients_of(letter)}"
        )
    names = ", ".join(f"{name} {list(array.shape)}" for name, array in answer.arrays.items() if math.prod(array.shape))
    told = ", ".join(f"{name} {value}" for name, value in answer.facts.items() if name not in WHICH)
    return f"sent {numbers} numbers ({answer.nbytes} bytes), open to the server: {names or 'none'}; and {told or 'nothing else'}"


def clients_of(letter: Letter) -> str:
    """The numbers of the clients that a letter names, which are their places in the order of the names."""
    ids = decode("ids", letter.arrays["ids"], torch.empty(letter.fact("clients", int), dtype=torch.int64))
    return ", ".join(map(str, ids.tolist()))
