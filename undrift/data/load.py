"""Data sets by name: loading one, which are there, one as NAME.npz, and who gets what under a partition."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadData, BadSetting, MissingData, UndriftError
from undrift.core.names import attribute, call_with_options, module_of, names, with_options
from undrift.data._sites import without
from undrift.data.dataset import Dataset
from undrift.data.federation import hold_out_own
from undrift.data.from_user import dataset_from
from undrift.data.partition import Dealt, deal


def data_root() -> Path | None:
    """The folder that UNDRIFT_DATA names."""
    root = Path(os.environ["UNDRIFT_DATA"]) if os.environ.get("UNDRIFT_DATA") else None
    if root is not None and not root.is_dir():
        raise MissingData(
            f"UNDRIFT_DATA is {root}, which is no folder; point it at the folder that holds the data sets"
        )
    return root


def load_dataset(name: str) -> Dataset:
    """The data set registered under a name, `imagefolder:PATH`, or what `package.module:function` returns."""
    kind, colon, rest = name.partition(":")
    if kind == "imagefolder":
        loaded: Dataset = module_of("datasets", kind).load(data_root(), rest)
        return loaded
    if colon:
        make = attribute(name)
        try:
            data = make()
        except Exception as error:  # whatever the user's function raises
            raise BadData(f"{name} failed: {type(error).__name__}: {error}") from error
        return dataset_from(data)
    load, left_out = module_of("datasets", name).load, with_options(name)[1].get("without")
    if left_out is None:
        found: Dataset = call_with_options(load, (data_root(),), name)
        return found
    if type(left_out) is not int:
        raise BadSetting(f"without takes a site's number, such as without=1, not {left_out!r}")
    return without(call_with_options(load, (data_root(),), re.sub(r"\bwithout\s*=[^,)]*,?", "", name)), left_out)


def available(root: Path | None) -> list[tuple[str, str]]:
    """Every registered data set, and whether it can be read now."""
    found = []
    for name in names("datasets"):
        if name == "imagefolder":
            found.append((name, "any folder in ImageNet's layout: imagefolder:PATH"))
            continue
        try:
            data = module_of("datasets", name).load(root)
            found.append(
                (name, f"{len(data.y_train)} training and {len(data.y_test)} test samples, {data.classes} classes")
            )
        except MissingData:
            found.append((name, "not there"))
        except UndriftError as error:
            found.append((name, str(error)))
    return found


def prepare(name: str, root: Path | None, out: Path | None) -> Path:
    """Read a data set from wherever it is and write it as NAME.npz, from which it loads fastest."""
    data = module_of("datasets", name).load(root)
    if not isinstance(data.x_train, np.ndarray):
        raise BadSetting(f"{name} is read from its files and never held whole; there is nothing to prepare")
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
    """[clients, classes] how many samples of each class each client trains on, and how many it holds out to be tested on."""
    if data.y_train.ndim != 1 or not data.classes:
        raise BadData("only data with one class label a sample can be shown by class")
    labels = data.y_train.astype(np.int64)
    dealt = deal(spec, labels, clients, seed, data.sites)

    def counted(part: Dealt) -> NDArray[np.int64]:
        cell = np.repeat(np.arange(clients), part.sizes) * data.classes + labels[part.members]
        return np.bincount(cell, minlength=clients * data.classes).reshape(clients, data.classes)

    trained, tested = hold_out_own(dealt, own_test)
    return counted(trained), counted(tested)
