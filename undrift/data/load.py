"""Load data sets by name, list them, write one as NAME.npz, and count each client's classes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadData, BadSetting, MissingData, UndriftError
from undrift.core.names import attribute, call_with_options, module_of, names, with_options
from undrift.data._sites import leave_out
from undrift.data.dataset import Dataset
from undrift.data.federation import hold_out
from undrift.data.from_user import dataset_from
from undrift.data.partition import Holdings, deal


def data_root() -> Path | None:
    """The folder that UNDRIFT_DATA names."""
    root = Path(os.environ["UNDRIFT_DATA"]) if os.environ.get("UNDRIFT_DATA") else None
    if root is not None and not root.is_dir():
        raise MissingData(f"UNDRIFT_DATA is {root}, which is not a folder; set it to the folder with the data sets")
    return root


def load_dataset(name: str) -> Dataset:
    """The data set registered under a name, `imagefolder:PATH`, or what `package.module:function` returns."""
    kind, colon, rest = name.partition(":")
    if kind == "imagefolder":
        pictures: Dataset = module_of("datasets", kind).load(data_root(), rest)
        return pictures
    if colon:
        function = attribute(name)
        try:
            data = function()
        except Exception as error:  # anything that the user's function raises
            raise BadData(f"{name} failed: {type(error).__name__}: {error}") from error
        return dataset_from(data)
    load, site = module_of("datasets", name).load, with_options(name)[1].get("without")
    if site is not None and type(site) is not int:
        raise BadSetting(f"without takes a site's number, such as without=1, not {site!r}")
    spec = name if site is None else re.sub(r"\bwithout\s*=[^,)]*,?", "", name)
    loaded: Dataset = call_with_options(load, (data_root(),), spec)
    return loaded if site is None else leave_out(loaded, site)


def available(root: Path | None) -> list[tuple[str, str]]:
    """Every registered data set, and whether it can be read now."""

    def state(name: str) -> str:
        if name == "imagefolder":
            return "any folder in ImageNet's layout: imagefolder:PATH"
        try:
            data = module_of("datasets", name).load(root)
        except MissingData:
            return "not there"
        except UndriftError as error:
            return str(error)
        return f"{len(data.y_train)} training and {len(data.y_test)} test samples, {data.classes} classes"

    return [(name, state(name)) for name in names("datasets")]


def prepare(name: str, root: Path | None, out: Path | None) -> Path:
    """Read a data set and write it as NAME.npz, which loads fastest."""
    data = module_of("datasets", name).load(root)
    if not isinstance(data.x_train, np.ndarray):
        raise BadSetting(f"{name} is read from its files on demand; there is nothing to prepare")
    if out is None and root is None:
        raise BadSetting("say where to write with --out FILE.npz, or set UNDRIFT_DATA")
    path = out or Path(root or ".") / f"{name}.npz"
    if path.exists():
        raise BadSetting(f"{path} exists already; remove it or give another --out")
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        np.savez(file, x_train=data.x_train, y_train=data.y_train, x_test=np.asarray(data.x_test), y_test=data.y_test)
    os.replace(temporary, path)
    return path


def class_counts(
    data: Dataset, spec: str, clients: int, seed: int, own_test: float = 0.0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[clients, classes] samples of each class that each client trains on, and those held out to test it."""
    if data.y_train.ndim != 1 or not data.classes:
        raise BadData("only data with one class label a sample can be shown by class")
    labels = data.y_train.astype(np.int64)
    holdings = deal(spec, labels, clients, seed, data.sites)

    def count(part: Holdings) -> NDArray[np.int64]:
        cell = np.repeat(np.arange(clients), part.sizes) * data.classes + labels[part.members]
        return np.bincount(cell, minlength=clients * data.classes).reshape(clients, data.classes)

    trained, tested = hold_out(holdings, own_test)
    return count(trained), count(tested)
