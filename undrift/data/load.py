"""Load data sets by name, list them, write one as NAME.npz, and count each client's classes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadData, BadSetting, MissingData, UndriftError, UnknownName, closest
from undrift.core.files import data_folder, replacing
from undrift.core.names import attribute, call_with_options, module_of, names, with_options
from undrift.data._formats import read_arrays
from undrift.data._sites import leave_out
from undrift.data._sources import check, read_npz
from undrift.data._user_file import read_user_file
from undrift.data.dataset import Dataset
from undrift.data.federation import hold_out
from undrift.data.from_user import dataset_from
from undrift.data.partition import Holdings, deal

NAME = r"[a-z][a-z0-9_-]*"  # the name of a user's data set


def data_root() -> Path | None:
    """The folder that UNDRIFT_DATA names; where it names none, that of `undrift data add`, if anything was added."""
    if os.environ.get("UNDRIFT_DATA"):
        root = Path(os.environ["UNDRIFT_DATA"])
        if not root.is_dir():
            raise MissingData(f"UNDRIFT_DATA is {root}, which is not a folder; set it to the folder with the data sets")
        return root
    return data_folder() if data_folder().is_dir() else None


def load_dataset(name: str) -> Dataset:
    """The data set registered under a name, `imagefolder:PATH`, or what `package.module:function` returns."""
    kind, colon, rest = name.partition(":")
    if kind == "imagefolder":
        pictures: Dataset = module_of("datasets", kind).load(data_root(), rest)
        return pictures
    if colon and kind != "hf":
        function = attribute(name)
        try:
            data = function()
        except Exception as error:  # anything that the user's function raises
            raise BadData(f"{name} failed: {type(error).__name__}: {error}") from error
        return dataset_from(data)
    check_dataset(name)
    if (asked := name.partition("(")[0].strip()) in added_names():
        if name != asked:
            raise BadSetting(f"{asked} takes no options")
        return read_added(name)
    load, site = module_of("datasets", name).load, with_options(name)[1].get("without")
    if site is not None and type(site) is not int:
        raise BadSetting(f"without takes a site's number, such as without=1, not {site!r}")
    spec = name if site is None else re.sub(r"\bwithout\s*=[^,)]*,?", "", name)
    loaded: Dataset = call_with_options(load, (data_root(),), spec)
    return loaded if site is None else leave_out(loaded, site)


def added_names() -> list[str]:
    """The names of the data sets that the user has added."""
    root = data_root()
    files = [] if root is None else root.glob("*.npz")
    return sorted({file.stem for file in files if re.fullmatch(NAME, file.stem)} - {*names("datasets")})


def check_dataset(name: str) -> None:
    """Raise UnknownName for a data set that is neither registered nor added."""
    known, asked = [*names("datasets"), *added_names()], name.partition("(")[0].strip()
    if ":" not in name and asked not in known:
        if Path(asked).suffix:
            raise BadSetting(
                f"{asked} is a file, and --dataset takes a name; 'undrift data add NAME FILE.npz' gives it one"
            )
        if asked.startswith((".", "/", "~")) or Path(asked).is_dir():
            raise BadSetting(f"{asked} is a folder; pictures in folders are --dataset imagefolder:{asked}")
        if "/" in asked:
            raise not_by_its_address(asked, known)
        raise UnknownName("dataset", asked, known)
    if name.startswith("hf:"):
        raise not_by_its_address(name, known)


def not_by_its_address(name: str, known: Collection[str]) -> BadSetting:
    """The error for a data set of Hugging Face that is given by its address there."""
    best = closest(re.split("[:/]", name)[-1], known)
    hint = "'undrift list datasets' shows them, and --dataset package.module:function reads any other"
    return BadSetting(f"{name}: data sets have short names here; {f'did you mean {best!r}?' if best else hint}")


def add(name: str, file: Path) -> Path:
    """Check the arrays of an .npz file and copy it, so that the data set has a name from now on."""
    if not re.fullmatch(NAME, name):
        raise BadSetting(
            f"a data set's name has small letters, digits, - and _, and begins with a letter, not {name!r}"
        )
    if name in names("datasets"):
        source = getattr(module_of("datasets", name), "SOURCE", None)
        if source is None:
            raise BadSetting(f"{name} is the name of a data set that is not read from {name}.npz; choose another name")
        check(read_npz(file), source, str(file))
    else:
        read_added(name, file)
    root = data_root() or data_folder()
    target = root / f"{name}.npz"
    if target.exists():
        raise BadSetting(f"{target} is there already; choose another name, or remove it")
    root.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        shutil.copyfile(file, temporary)
    return target


def read_added(name: str, file: Path | None = None) -> Dataset:
    """A data set of the user's: x_train, y_train, x_test and y_test, or x, y and split, with class labels."""
    file = file or (data_root() or data_folder()) / f"{name}.npz"
    arrays = read_arrays(file)
    if {"x", "y"} <= arrays.keys() and "split" not in arrays and "x_test" not in arrays:
        raise BadData(
            f"{file}: holds no test samples; add split [n] with train or test for each sample, or x_test, y_test"
        )
    parts = [read_user_file(file, masks=False, part=part) for part in ("train", "test")]
    return replace(dataset_from(tuple(array for part in parts for array in part)), name=name)


def available(root: Path | None) -> list[tuple[str, str]]:
    """Every registered data set, and whether it can be read now."""

    def state(name: str) -> str:
        if name == "imagefolder":
            return "any folder in ImageNet's layout: imagefolder:PATH"
        try:
            data = read_added(name) if name in added_names() else module_of("datasets", name).load(root)
        except MissingData:
            return "not found"
        except UndriftError as error:
            return str(error)
        classes = f", {data.classes} classes" if data.classes > 1 else ""
        return f"{len(data.y_train)} training and {len(data.y_test)} test samples{classes}"

    return [(name, state(name)) for name in [*names("datasets"), *added_names()]]


def prepare(name: str, root: Path | None, out: Path | None, source: Path | None = None) -> Path:
    """Read a data set, from `source` if it is made of a file, and write it as NAME.npz, which loads fastest."""
    module = module_of("datasets", name)
    make = getattr(module, "prepare", None)  # for a data set that is stored in a form of its own
    if (make is None) != (source is None):
        raise BadSetting(
            f"{name} is read from where it lies, without --from"
            if source
            else f"say what {name} is made of: --from FILE"
        )
    if make is None:
        data = module.load(root)
        if not isinstance(data.x_train, np.ndarray):
            raise BadSetting(f"{name} is read from its files on demand; there is nothing to prepare")
        arrays = dict(x_train=data.x_train, y_train=data.y_train, x_test=np.asarray(data.x_test), y_test=data.y_test)
    else:
        arrays = make(source)
    if out is None and root is None:
        raise BadSetting("say where to write with --out FILE.npz, or set UNDRIFT_DATA")
    path = out or Path(root or ".") / f"{name}.npz"
    if path.exists():
        raise BadSetting(f"{path} exists already; remove it or give another --out")
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(temporary, path)
    return path


def class_counts(
    data: Dataset, spec: str, clients: int, seed: int, own_test: float = 0.0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[clients, classes] samples of each class that each client trains on, and those held out to test it."""
    if data.y_train.ndim != 1 or not data.classes or data.y_train.dtype.kind not in "iu":
        raise BadData("only data with one class label a sample can be shown by class")
    labels = data.y_train.astype(np.int64)
    holdings = deal(spec, labels, clients, seed, data.sites)

    def count(part: Holdings) -> NDArray[np.int64]:
        cell = np.repeat(np.arange(clients), part.sizes) * data.classes + labels[part.members]
        return np.bincount(cell, minlength=clients * data.classes).reshape(clients, data.classes)

    trained, tested = hold_out(holdings, own_test)
    return count(trained), count(tested)
