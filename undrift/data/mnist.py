"""MNIST handwritten digits, 28 x 28 grey, 60,000 + 10,000 samples, 10 classes."""

from __future__ import annotations

from pathlib import Path

from undrift.data._sources import IDX_FILES_TEXT, Source, fetch, read_idx_folder
from undrift.data.dataset import Dataset

SOURCE = Source(
    name="mnist",
    classes=10,
    channels=1,
    folders=("mnist", "mnist/raw", "MNIST/raw"),
    usual_files=f"{IDX_FILES_TEXT}, in mnist/",
    read_folder=read_idx_folder,
    hugging_face="ylecun/mnist",
)


def load(root: Path | None) -> Dataset:
    return Dataset("mnist", *fetch(SOURCE, root), classes=10, mean=(0.1307,), std=(0.3081,))
