"""A data set in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Samples(Protocol):
    """Inputs that can be taken by index: a numpy array, or image files that are read on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: NDArray[np.int64], /) -> NDArray[np.generic]: ...


@dataclass(frozen=True)
class Dataset:
    """Training and test samples. Images are uint8 [n, height, width, channels]; anything else is float32 [n, ...]."""

    name: str
    x_train: Samples
    y_train: NDArray[np.generic]
    x_test: Samples
    y_test: NDArray[np.generic]
    classes: int
    mean: tuple[float, ...] = ()  # per channel on the 0..1 scale; () leaves the inputs as they are
    std: tuple[float, ...] = ()
    crop: int = 0  # random crop after padding by this many pixels, in training
    flip: bool = False  # random left-right flip, in training
    sites: NDArray[np.int64] | None = None  # the natural client of each training sample
    test_sites: NDArray[np.int64] | None = None  # the natural client of each test sample
    site_names: tuple[str, ...] = ()
    validation: NDArray[np.int64] | None = None  # training rows held out for validation
    # Test samples of the site that is left out, or others that are no client's.
    unseen: tuple[Samples, NDArray[np.generic]] | None = None
    structures: tuple[str, ...] = ()  # structures in masks [n, H, W], outermost first
    task: str = ""  # for targets that are neither labels nor masks: binary, or survival (`oracle/tasks.py`)
