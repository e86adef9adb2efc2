"""Your own pictures in ImageNet's layout: imagefolder:PATH with train/<class>/* and val/<class>/*."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from undrift.core.errors import BadData, BadSetting, MissingData
from undrift.data._image_files import ImageFiles, list_pictures
from undrift.data.dataset import Dataset


def load(root: Path | None, path: str = "") -> Dataset:
    """The pictures under PATH, or under $UNDRIFT_DATA/PATH, read on demand."""
    if not path:
        raise BadSetting("data set 'imagefolder' needs a folder with train/ and val/, as in imagefolder:PATH")
    folder = Path(path).expanduser()
    if root is not None and not folder.is_dir():
        folder = root / path
    for half in ("train", "val"):
        if not (folder / half).is_dir():
            raise MissingData(f"{folder / half}: no such folder; expected {half}/<class>/* under {folder}")
    train_files, train_labels, train_classes = list_pictures(folder / "train")
    test_files, test_labels, test_classes = list_pictures(folder / "val")
    if train_classes != test_classes:
        differ = ", ".join(sorted(set(train_classes) ^ set(test_classes))[:5])
        raise BadData(f"{folder}: expected the same class folders in train and val; only one has {differ}")
    for name, count in zip(train_classes, np.bincount(train_labels, minlength=len(train_classes)), strict=True):
        if not count:
            raise BadData(
                f"{folder / 'train' / name}: no pictures; expected *.png, *.jpg and the like, or no such folders"
            )
    arrays = ImageFiles(train_files), train_labels, ImageFiles(test_files), test_labels
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return Dataset("imagefolder", *arrays, classes=len(train_classes), mean=mean, std=std, flip=True)
