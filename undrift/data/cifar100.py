"""CIFAR-100 photographs, 32 x 32 colour, 50,000 + 10,000 samples, 100 (fine) classes."""

from __future__ import annotations

from pathlib import Path

from undrift.data._formats import all_present, read_cifar
from undrift.data._sources import Arrays, Source, fetch
from undrift.data.dataset import Dataset


def read_folder(folder: Path) -> Arrays | None:
    """The Python version's two files."""
    if not all_present(folder, ["train", "test"]):
        return None
    train = read_cifar([folder / "train"], b"fine_labels")
    return Arrays(*train, *read_cifar([folder / "test"], b"fine_labels"))


SOURCE = Source(
    name="cifar100",
    classes=100,
    channels=3,
    folders=("cifar-100-python", "cifar100/cifar-100-python", "cifar100"),
    usual_files="cifar-100-python/ with train and test",
    read_folder=read_folder,
    hugging_face="uoft-cs/cifar100",
)


def load(root: Path | None) -> Dataset:
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return Dataset("cifar100", *fetch(SOURCE, root), classes=100, mean=mean, std=std, crop=4, flip=True)
