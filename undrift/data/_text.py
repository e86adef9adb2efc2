"""Text as characters: one alphabet for every data set, and each writer's lines cut into windows for training and testing."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadSetting
from undrift.data.dataset import Dataset

CLASSES = 96  # 0 is the end of a line, 1 .. 95 are the printable characters of ASCII
NONE = -100  # the label of a place after the end of a text
TESTED = 0.2  # the last share of a writer's lines

Windows = tuple[NDArray[np.uint8], NDArray[np.int64]]


def encode(text: str) -> NDArray[np.uint8]:
    """Characters as numbers; accents are left out, and what is still unknown is a question mark.

    >>> encode("Aè\\n").tolist()
    [34, 70, 0]
    """
    letters = unicodedata.normalize("NFKD", text)
    plain = "".join(c for c in letters if not unicodedata.combining(c)).encode("ascii", "replace")
    codes = np.frombuffer(plain, np.uint8)
    known = (codes >= 32) & (codes < 127)
    return np.where(codes == 10, 0, np.where(known, codes - 31, ord("?") - 31)).astype(np.uint8)


def decode(codes: Sequence[int] | NDArray[np.integer]) -> str:
    """Numbers as characters.

    >>> decode(encode("To be,\\nor not"))
    'To be,\\nor not'
    """
    return "".join("\n" if code == 0 else chr(int(code) + 31) for code in codes)


def windows(text: NDArray[np.uint8], length: int) -> Windows:
    """A text in windows [n, length] one behind the other, and the character after each of theirs; the last one is padded.

    >>> x, y = windows(encode("abcd"), 2)
    >>> x.tolist(), y.tolist()
    ([[66, 67], [68, 0]], [[67, 68], [69, -100]])
    """
    count = -(-max(len(text) - 1, 0) // length)
    x, y = np.zeros(count * length, np.uint8), np.full(count * length, NONE, np.int64)
    x[: len(text) - 1], y[: len(text) - 1] = text[:-1], text[1:]
    return x.reshape(count, length), y.reshape(count, length)


def dataset_of_writers(name: str, writers: Mapping[str, Sequence[str]], length: int, most: int) -> Dataset:
    """One site for each writer of lines, of whom the last fifth are tested; `most` writers with most text, 0: all."""
    if length < 2 or most < 0:
        raise BadSetting(f"{name} needs length >= 2 and a number of writers of at least 0, not {length} and {most}")
    found: list[tuple[int, str, Windows, Windows]] = []
    for writer, lines in writers.items():
        cut = len(lines) - max(1, round(TESTED * len(lines)))
        halves = [encode("".join(f"{line}\n" for line in part)) for part in (lines[:cut], lines[cut:])]
        train, test = (windows(text, length) for text in halves)
        if len(halves[0]) > length and len(test[1]):
            found.append((len(halves[0]), writer, train, test))
    if len(found) < max(most, 1):
        raise BadSetting(
            f"{name} has {len(found)} writers with more than {length} characters to train on, and not {max(most, 1)}"
        )
    kept = sorted(sorted(found, key=lambda entry: (-entry[0], entry[1]))[: most or None], key=lambda entry: entry[1])
    trained, tested = [train for *_, train, _ in kept], [test for *_, test in kept]
    x_train, y_train, sites = join(trained)
    x_test, y_test, test_sites = join(tested)
    return Dataset(
        name, x_train, y_train, x_test, y_test, CLASSES, sites=sites, test_sites=test_sites,
        site_names=tuple(writer for _, writer, *_ in kept),
    )  # fmt: skip


def join(of: Sequence[Windows]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """The windows of all writers, and the number of the writer of each."""
    x, y = np.concatenate([x for x, _ in of]), np.concatenate([y for _, y in of])
    return x, y, np.repeat(np.arange(len(of)), [len(y) for _, y in of])
