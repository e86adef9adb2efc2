"""Tiny-ImageNet photographs, 64 x 64 colour, 100,000 + 10,000 samples, 200 classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadData
from undrift.data._formats import all_present, read_pictures, read_text
from undrift.data._sources import Arrays, Source, fetch
from undrift.data.dataset import Dataset

ANNOTATIONS = "val/val_annotations.txt"  # file name, WordNet id and a bounding box a line


def read_folder(folder: Path) -> Arrays | None:
    """The folder tiny-imagenet-200. Labels follow the sorted WordNet ids, as on Hugging Face."""
    if not all_present(folder, ["wnids.txt", "train", ANNOTATIONS]):
        return None
    label_of = {wnid: label for label, wnid in enumerate(sorted(read_text(folder / "wnids.txt").split()))}
    train = []
    for wnid, label in label_of.items():
        train += [(path, label) for path in sorted((folder / "train" / wnid / "images").glob("*.JPEG"))]
    test = []
    for line in read_text(folder / ANNOTATIONS).splitlines():
        name, wnid = [*line.split(), "", ""][:2]
        if wnid not in label_of:
            raise BadData(f"{folder / ANNOTATIONS}: expected a file name and an id of wnids.txt, found {line!r}")
        test.append((folder / "val" / "images" / name, label_of[wnid]))
    halves: list[NDArray[Any]] = []
    for listed in (train, test):
        halves.append(read_pictures([path for path, _ in listed]))
        halves.append(np.array([label for _, label in listed], dtype=np.int64))
    return Arrays(*halves)


SOURCE = Source(
    name="tiny-imagenet",
    classes=200,
    channels=3,
    folders=("tiny-imagenet-200", "tiny-imagenet/tiny-imagenet-200", "tiny-imagenet"),
    usual_files="tiny-imagenet-200/ with wnids.txt, train/ and val/",
    read_folder=read_folder,
    hugging_face="zh-plus/tiny-imagenet",
)


def load(root: Path | None) -> Dataset:
    """The validation part is the test set."""
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    return Dataset("tiny-imagenet", *fetch(SOURCE, root), classes=200, mean=mean, std=std, crop=8, flip=True)
