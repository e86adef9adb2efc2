"""Your own pictures in ImageNet's layout: imagefolder:PATH with train/<class>/* and val/<class>/*."""

from __future__ import annotations

from pathlib import Path

from undrift.core.errors import BadData, BadSetting, MissingData
from undrift.data._image_files import ImageFiles, list_pictures
from undrift.data.dataset import Dataset


def load(root: Path | None, path: str = "") -> Dataset:
    """The pictures under PATH, or under $UNDRIFT_DATA/PATH; they are read only when they are needed."""
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
    return Dataset(
        "imagefolder",
        x_train=ImageFiles(train_files),
        y_train=train_labels,
        x_test=ImageFiles(test_files),
        y_test=test_labels,
        classes=len(train_classes),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        flip=True,
    )
