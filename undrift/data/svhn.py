"""Street View House Numbers, cropped digits, 32 x 32 colour, 73,257 + 26,032 samples, 10 classes."""

from __future__ import annotations

from pathlib import Path

from undrift.data._formats import all_present, read_svhn
from undrift.data._sources import Arrays, Source, fetch
from undrift.data.dataset import Dataset


def read_folder(folder: Path) -> Arrays | None:
    """The two .mat files of format 2 (cropped digits)."""
    if not all_present(folder, ["train_32x32.mat", "test_32x32.mat"]):
        return None
    return Arrays(*read_svhn(folder / "train_32x32.mat"), *read_svhn(folder / "test_32x32.mat"))


SOURCE = Source(
    name="svhn",
    classes=10,
    channels=3,
    folders=("svhn", "."),
    usual_files="train_32x32.mat and test_32x32.mat, there or in svhn/",
    read_folder=read_folder,
    hugging_face="ufldl-stanford/svhn",
    hugging_face_config="cropped_digits",
)


def load(root: Path | None) -> Dataset:
    mean, std = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
    return Dataset("svhn", *fetch(SOURCE, root), classes=10, mean=mean, std=std)
