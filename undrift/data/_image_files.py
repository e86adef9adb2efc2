"""Pictures that are read from disk when a batch needs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadData
from undrift.data._formats import open_picture

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"}
BATCHES_AHEAD = 8  # prefetched batches that may wait; older ones are dropped


@cache
def decoding_threads() -> ThreadPoolExecutor:
    """One thread pool for all pictures: starting threads for every batch takes time."""
    return ThreadPoolExecutor(thread_name_prefix="undrift-decode")


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=decoding_threads.cache_clear)  # threads do not survive a fork


class ImageFiles:
    """Picture files as `Samples`: uint8 [n, size, size, 3], decoded on indexing."""

    def __init__(self, files: Sequence[str], size: int = 224) -> None:
        self.files = files
        self.size = size
        self._prefetched: dict[bytes, list[Future[NDArray[np.uint8]]]] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.files), self.size, self.size, 3)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: NDArray[np.int64], /) -> NDArray[np.uint8]:
        futures = self._prefetched.pop(_key(index), None) or self._start(index)
        pixels = np.empty((len(futures), self.size, self.size, 3), dtype=np.uint8)
        for position, future in enumerate(futures):
            pixels[position] = future.result()
        return pixels

    def prefetch(self, index: NDArray[np.int64]) -> None:
        """Decode these in the background; indexing with the same indices waits for them."""
        if _key(index) in self._prefetched:
            return
        self._prefetched[_key(index)] = self._start(index)
        if len(self._prefetched) > BATCHES_AHEAD:
            for future in self._prefetched.pop(next(iter(self._prefetched))):
                future.cancel()

    def _start(self, index: NDArray[np.int64]) -> list[Future[NDArray[np.uint8]]]:
        chosen = [self.files[position] for position in np.asarray(index).tolist()]
        return [decoding_threads().submit(decode, file, self.size) for file in chosen]


def _key(index: NDArray[np.int64]) -> bytes:
    return np.asarray(index, dtype=np.int64).tobytes()


def decode(file: str, size: int) -> NDArray[np.uint8]:
    """ImageNet's test transform: resize the short side to size·256/224, then crop the centre."""
    picture = open_picture(file)
    short = round(size * 256 / 224)
    scale = short / min(picture.size)
    width, height = (max(short, round(side * scale)) for side in picture.size)
    left, top = (width - size) // 2, (height - size) // 2
    resized = picture.resize((width, height), resample=2)  # 2 is bilinear
    return np.asarray(resized.crop((left, top, left + size, top + size)), dtype=np.uint8)


def list_pictures(folder: Path) -> tuple[list[str], NDArray[np.int64], list[str]]:
    """Files, labels and sorted class names of a folder with one folder of pictures per class."""
    with os.scandir(folder) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        with os.scandir(folder / name) as entries:
            pictures = sorted(entry.path for entry in entries if Path(entry.name).suffix.lower() in SUFFIXES)
        files += pictures
        labels += [label] * len(pictures)
    if not files:
        raise BadData(f"{folder}: no pictures; expected <class>/*.jpg, .jpeg or .png")
    return files, np.array(labels, dtype=np.int64), classes
