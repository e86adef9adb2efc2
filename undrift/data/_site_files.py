"""Read pictures and masks of sites: one .npz or one folder per site.

SITE.npz holds x (uint8 [n, H, W, C]) and y (masks [n, H, W]), optionally groups [n] and split [n] (train, val, test).
Or it holds x_train, y_train, x_test, y_test, which are joined, with id_train and id_test as groups.

SITE/ holds images/NAME.* and masks/NAME.*, optionally samples.csv with the columns name, group, split.

Ids that end in OD or OS, the right and the left eye, are grouped without that ending.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadData, BadSetting, MissingData
from undrift.data._formats import open_picture, read_arrays, read_text
from undrift.data._image_files import SUFFIXES
from undrift.data._sites import Site

LARGEST = 4096  # side of a picture


def read_sites(root: Path | None, name: str, size: int, structures: int) -> list[Site]:
    """The sites in the folder NAME of the data folder, in the order of their names."""
    if not 1 <= size <= LARGEST:
        raise BadSetting(f"the size of {name} must be 1 to {LARGEST} pixels, not {size}")
    folder = None if root is None else root / name
    if folder is None or not folder.is_dir():
        raise MissingData(
            f"{name} was not found; set UNDRIFT_DATA to a folder with a folder {name}/ in it that holds one .npz file or one "
            "folder with images/ and masks/ for each site, or use the drawn pictures of 'synthetic-sites'"
        )
    places = sorted(p for p in folder.iterdir() if p.suffix == ".npz" or (p.is_dir() and not p.name.startswith(".")))
    return [
        read_npz_site(p, size, structures) if p.suffix == ".npz" else read_folder_site(p, size, structures)
        for p in places
    ]


def read_npz_site(path: Path, size: int, structures: int) -> Site:
    arrays = read_arrays(path)
    if "x" in arrays and "y" in arrays:
        images, masks, groups = arrays["x"], arrays["y"], arrays.get("groups")
    elif all(key in arrays for key in ("x_train", "y_train", "x_test", "y_test")):
        images, masks = (join(arrays, k, path) for k in "xy")
        groups = join(arrays, "id", path) if "id_train" in arrays and "id_test" in arrays else None
    else:
        raise BadData(
            f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}; expected x and y, or x_train, y_train, x_test, y_test"
        )
    if images.ndim == 3:
        images = images[..., None]
    if masks.dtype.kind in "bi" and masks.size and masks.min() >= 0 and masks.max() < 256:
        masks = masks.astype(np.uint8)
    fit = images.dtype == masks.dtype == np.uint8 and images.ndim == 4 and masks.ndim == 3
    if fit and images.size and masks.size:  # others are refused later
        if images.shape[1:3] != (size, size):
            planes = np.moveaxis(images, -1, 0)
            images = np.stack([np.stack([resize(one, size, sharp=False) for one in plane]) for plane in planes], -1)
        if masks.shape[1:] != (size, size):
            masks = np.stack([resize(one, size, sharp=True) for one in masks])
        if masks.max(initial=0) == 255:  # grey levels
            masks = from_grey(masks, structures)
    split = arrays["split"].astype(str) if "split" in arrays else None
    return Site(path.stem, images, masks, None if groups is None else patients(groups), split)


def join(arrays: Mapping[str, NDArray[Any]], what: str, path: Path) -> NDArray[Any]:
    """The arrays of both halves as one."""
    train, test = arrays[f"{what}_train"], arrays[f"{what}_test"]
    if train.shape[1:] != test.shape[1:]:
        raise BadData(
            f"{path}: {what}_train is {list(train.shape)} but {what}_test is {list(test.shape)}; give both one form"
        )
    return np.concatenate([train, test])


def read_folder_site(folder: Path, size: int, structures: int) -> Site:
    images, masks = (pictures_in(folder / part) for part in ("images", "masks"))
    lone = sorted(images.keys() ^ masks.keys())
    if not images or lone:
        what = f"{lone[0]} has no picture or no mask" if lone else "there are no pictures"
        raise BadData(f"{what} in {folder}; expected images/NAME.png and masks/NAME.png for every NAME")
    x = np.stack([pixels(path, size, "RGB") for path in images.values()])
    y = np.stack([pixels(masks[name], size, "L") for name in images])
    if y.max(initial=0) > structures:  # grey levels up to 255 instead of 0, 1, 2
        y = from_grey(y, structures)
    table = samples_table(folder / "samples.csv", list(images))
    groups = [table[name].get("group") or name for name in images]
    split = [table[name].get("split", "") for name in images]
    empty = [name for name, part in zip(images, split, strict=True) if not part]
    if 0 < len(empty) < len(split):
        raise BadData(f"{folder / 'samples.csv'} has no split for {empty[0]}, but for others; give all, or none")
    return Site(folder.name, x, y, patients(np.array(groups)), np.array(split) if all(split) else None)


def pictures_in(folder: Path) -> dict[str, Path]:
    """The pictures in a folder by their names without endings."""
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*")):
        if file.suffix.lower() not in SUFFIXES:
            continue
        if file.stem in found:
            raise BadData(
                f"{folder} has both {found[file.stem].name} and {file.name}; give each picture a name of its own"
            )
        found[file.stem] = file
    return found


def pixels(path: Path, size: int, mode: str) -> NDArray[np.uint8]:
    """A picture [size, size, 3] or a mask [size, size], resized without mixing its values."""
    modes = ("L", "P") if mode == "L" else (mode,)  # keep the numbers of a mask with a palette
    return resize(np.asarray(open_picture(path, *modes), dtype=np.uint8), size, sharp=mode == "L")


def resize(picture: NDArray[np.uint8], size: int, sharp: bool) -> NDArray[np.uint8]:
    """Resize a picture [H, W] or [H, W, 3]; `sharp` makes no new values."""
    from PIL import Image

    if picture.shape[:2] == (size, size):
        return picture
    how = Image.Resampling.NEAREST if sharp else Image.Resampling.BOX
    return np.asarray(Image.fromarray(picture).resize((size, size), how), dtype=np.uint8)


def from_grey(grey: NDArray[np.uint8], structures: int) -> NDArray[np.uint8]:
    """Scale grey levels up to 255 to 0 .. structures."""
    return np.rint(grey / 255.0 * structures).astype(np.uint8)


def samples_table(path: Path, names: list[str]) -> dict[str, dict[str, str]]:
    """The rows of samples.csv by name; empty rows if there is no such file."""
    if not path.exists():
        return {name: {} for name in names}
    try:
        listed = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
    except csv.Error as error:
        raise BadData(f"{path} is not a table in CSV: {error}") from error
    rows = {row.get("name", ""): row for row in listed}
    if len(rows) < len(listed):
        twice = next(name for name, count in Counter(row.get("name", "") for row in listed).items() if count > 1)
        raise BadData(f"{path} has several rows for {twice!r}; give one of each picture")
    missing = [name for name in names if name not in rows]
    if missing:
        raise BadData(f"{path} has no row for {missing[0]}; give name, group and split of each picture")
    return rows


def patients(ids: NDArray[np.generic]) -> NDArray[np.generic]:
    """Ids without the eye.

    >>> patients(np.array(["RET002OD", "RET002OS", "RET004OD"])).tolist()
    ['RET002', 'RET002', 'RET004']
    """
    if ids.dtype.kind != "U":
        return ids
    return np.array([i[:-2] if i[-2:] in ("OD", "OS") else i for i in ids.tolist()])
