"""Random pictures of a given shape, for runs whose data are not at hand: noise(side=32, channels=3, classes=10)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from undrift.core.errors import BadSetting
from undrift.data.dataset import Dataset

STREAM = 0x401E


def load(
    root: Path | None, side: int = 32, channels: int = 3, classes: int = 10, train: int = 2000, test: int = 200
) -> Dataset:
    """There is nothing to learn in them."""
    if min(side, channels, classes, train, test) < 1:
        raise BadSetting(f"noise needs numbers of at least 1, not {side=}, {channels=}, {classes=}, {train=}, {test=}")
    random = np.random.Generator(np.random.PCG64([side, channels, classes, STREAM]))

    def draw(
        count: int,
    ) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
        return random.integers(0, 256, (count, side, side, channels), np.uint8), random.integers(0, classes, count)

    half = (0.5,) * channels
    return Dataset("noise", *draw(train), *draw(test), classes=classes, mean=half, std=half)
