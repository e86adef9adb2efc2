"""Fashion-MNIST clothes, 28 x 28 grey, 60,000 + 10,000 samples, 10 classes."""

from __future__ import annotations

from pathlib import Path

from undrift.data._sources import IDX_FILES_TEXT, Source, fetch, read_idx_folder
from undrift.data.dataset import Dataset

DEBIAN_PACKAGE = Path("/usr/share/datasets/fashion-mnist")

SOURCE = Source(
    name="fashion-mnist",
    classes=10,
    channels=1,
    folders=("fashion-mnist", "fashion-mnist/raw", "FashionMNIST/raw", DEBIAN_PACKAGE),
    usual_files=f"{IDX_FILES_TEXT}, in fashion-mnist/, or Debian's package dataset-fashion-mnist",
    read_folder=read_idx_folder,
    hugging_face="zalando-datasets/fashion_mnist",
)


def load(root: Path | None) -> Dataset:
    return Dataset("fashion-mnist", *fetch(SOURCE, root), classes=10, mean=(0.28604,), std=(0.35302,))
