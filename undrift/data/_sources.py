"""Find a data set as our .npz, as its usual files, or on Hugging Face, in that order, and check it."""

from __future__ import annotations

import importlib
import importlib.util
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadData, MissingData
from undrift.data._formats import all_present, read_arrays, read_idx, stack_pictures

IDX_FILES = [f"{half}-{kind}-ubyte" for half in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
IDX_FILES_TEXT = f"{', '.join(IDX_FILES)}, or the same with .gz"


class Arrays(NamedTuple):
    """The four arrays of a data set, in the order of `Dataset`."""

    x_train: NDArray[Any]
    y_train: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]


@dataclass(frozen=True)
class Source:
    """Where a data set can come from, and what is expected of it."""

    name: str
    classes: int
    channels: int
    folders: tuple[str | Path, ...]  # where the usual files may be; relative to $UNDRIFT_DATA
    usual_files: str  # for the message when nothing was found
    read_folder: Callable[[Path], Arrays | None]  # None if the folder has none of the usual files
    hugging_face: str
    hugging_face_config: str | None = None


def fetch(source: Source, root: Path | None) -> Arrays:
    """Read the data set from the first place that has it."""
    if root is not None and (root / f"{source.name}.npz").is_file():
        archive = root / f"{source.name}.npz"
        return check(read_npz(archive), source, str(archive))
    for entry in source.folders:
        folder = Path(entry) if root is None else root / entry  # root / absolute path is the absolute path
        arrays = source.read_folder(folder) if folder.is_absolute() or root is not None else None
        if arrays is not None:
            return check(arrays, source, str(folder))
    cause = ""
    try:
        loader = hugging_face_loader(source.hugging_face)
        if loader is not None:
            return check(read_hugging_face(loader, source), source, f"Hugging Face {source.hugging_face}")
    except BadData:
        raise
    except Exception as error:  # from the network, the cache or the package: same advice
        cause = f"; Hugging Face failed with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    raise MissingData(advice(source, root) + cause)


def advice(source: Source, root: Path | None) -> str:
    """One line with the ways to get the data set."""
    if root is None:
        place = "; set UNDRIFT_DATA to a folder (it is not set) and put"
    else:
        missing = "" if root.is_dir() else " (no such folder)"
        place = f" in {root}{missing}; set UNDRIFT_DATA to another folder, or put"
    return (
        f"data set {source.name!r} was not found{place} {source.name}.npz there, "
        f"or its usual files ({source.usual_files}), "
        f"or pip install 'undrift[hf]' to fetch {source.hugging_face} from Hugging Face"
    )


def check(arrays: Arrays, source: Source, place: str) -> Arrays:
    """Check the arrays and return them as uint8 [n, height, width, channels] and int64 [n]."""
    x_train, y_train = check_half(arrays.x_train, arrays.y_train, "train", source, place)
    x_test, y_test = check_half(arrays.x_test, arrays.y_test, "test", source, place)
    train, test = list(x_train.shape[1:]), list(x_test.shape[1:])
    if train != test:
        raise BadData(f"{place}: expected images of one size, found {train} for training and {test} for testing")
    return Arrays(x_train, y_train, x_test, y_test)


def check_half(
    images: NDArray[Any], labels: NDArray[Any], half: str, source: Source, place: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise BadData(
            f"{place}: expected x_{half} as uint8 images (0..255) of shape [n, height, width] or "
            f"[n, height, width, channels], found {images.dtype} {list(images.shape)}"
        )
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if not images[:1].size and len(images):
        raise BadData(f"{place}: the images of x_{half} have no pixels, their shape is {list(images.shape)}")
    if images.shape[3] != source.channels:
        raise BadData(f"{place}: expected x_{half} with {source.channels} channel(s), found {images.shape[3]}")
    if labels.ndim == 2 and labels.shape[1] == 1:  # as Keras and .mat files have them
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise BadData(f"{place}: expected y_{half} as whole numbers [n], found {labels.dtype} {list(labels.shape)}")
    if len(images) != len(labels) or len(images) == 0:
        raise BadData(
            f"{place}: expected as many images as labels and at least one, found {len(images)} images in "
            f"x_{half} and {len(labels)} labels in y_{half}"
        )
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= source.classes:
        limits = f"0..{source.classes - 1}"
        raise BadData(f"{place}: expected labels in y_{half} within {limits}, found {lowest}..{highest}")
    return images, labels.astype(np.int64)


def read_npz(path: Path) -> Arrays:
    """The four arrays of a .npz file."""
    arrays = read_arrays(path)
    missing = [key for key in Arrays._fields if key not in arrays]
    if missing:
        held = ", ".join(arrays) or "nothing"
        raise BadData(f"{path}: {', '.join(missing)} missing; expected {', '.join(Arrays._fields)}, found {held}")
    return Arrays(*(arrays[key] for key in Arrays._fields))


def read_idx_folder(folder: Path) -> Arrays | None:
    """The four idx files that MNIST and its relatives come in, each plain or packed with gzip."""
    names = [f"{name}.gz" if (folder / f"{name}.gz").exists() else name for name in IDX_FILES]
    return Arrays(*(read_idx(folder / name) for name in names)) if all_present(folder, names) else None


def hugging_face_loader(identifier: str) -> Callable[..., Any] | None:
    """`datasets.load_dataset`, or None where that package is not installed."""
    if importlib.util.find_spec("datasets") is None:
        return None
    module = importlib.import_module("datasets")
    loader: Callable[..., Any] | None = getattr(module, "load_dataset", None)  # a stray folder has none
    if loader is not None and not Path(identifier).exists():
        hub = importlib.import_module("huggingface_hub.constants")
        if not hub.HF_HUB_OFFLINE and not answers(hub.ENDPOINT):
            # Without a network, retries would take long. The cache still works offline.
            for settings in (hub, importlib.import_module("datasets.config")):
                vars(settings)["HF_HUB_OFFLINE"] = True
    return loader


def answers(address: str) -> bool:
    """Whether a server answers within five seconds."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        return True  # an error is an answer too
    except (OSError, ValueError):
        return False
    return True


def read_hugging_face(loader: Callable[..., Any], source: Source) -> Arrays:
    """The train and test splits (validation if there is no test) of a Hugging Face image data set."""
    identifier = source.hugging_face
    splits = loader(identifier, source.hugging_face_config)
    test = first_of(("test", "valid", "validation", "val"), splits, identifier)
    halves: list[NDArray[Any]] = []
    for split in (splits[first_of(("train",), splits, identifier)], splits[test]):
        pictures = split[first_of(("image", "img"), split.column_names, identifier)]
        labels = split[first_of(("fine_label", "label"), split.column_names, identifier)]
        halves += [stack_pictures(pictures, len(split), source.channels), np.asarray(labels[:])]
    return Arrays(*halves)


def first_of(wanted: tuple[str, ...], held: Iterable[str], identifier: str) -> str:
    names = list(held)
    if not set(wanted) & set(names):
        raise BadData(f"Hugging Face {identifier}: expected one of {', '.join(wanted)}, found {', '.join(names)}")
    return next(name for name in wanted if name in names)
