"""CIFAR-10 photographs, 32 x 32 colour, 50,000 + 10,000 samples, 10 classes."""

from __future__ import annotations

from pathlib import Path

from undrift.data._formats import all_present, read_cifar
from undrift.data._sources import Arrays, Source, fetch
from undrift.data.dataset import Dataset

TRAIN_FILES = [f"data_batch_{number}" for number in range(1, 6)]


def read_folder(folder: Path) -> Arrays | None:
    """The Python version's six files."""
    if not all_present(folder, [*TRAIN_FILES, "test_batch"]):
        return None
    train = read_cifar([folder / name for name in TRAIN_FILES], b"labels")
    return Arrays(*train, *read_cifar([folder / "test_batch"], b"labels"))


SOURCE = Source(
    name="cifar10",
    classes=10,
    channels=3,
    folders=("cifar-10-batches-py", "cifar10/cifar-10-batches-py", "cifar10"),
    usual_files="cifar-10-batches-py/ with data_batch_1 to data_batch_5 and test_batch",
    read_folder=read_folder,
    hugging_face="uoft-cs/cifar10",
)


def load(root: Path | None) -> Dataset:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    return Dataset("cifar10", *fetch(SOURCE, root), classes=10, mean=mean, std=std, crop=4, flip=True)
