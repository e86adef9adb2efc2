"""Readers for the file formats of published image data sets."""

from __future__ import annotations

import gzip
import importlib
import math
import pickle
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadData, MissingData

if TYPE_CHECKING:
    from PIL.Image import Image


def all_present(folder: Path, names: Sequence[str]) -> bool:
    """Whether the folder holds these files; BadData if it holds only some of them."""
    missing = [name for name in names if not (folder / name).exists()]
    if missing and len(missing) < len(names):
        raise BadData(f"{folder}: incomplete, {', '.join(missing)} missing; expected {', '.join(names)}")
    return not missing


def read_text(path: Path) -> str:
    """A file in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"{path}: cannot be read as text ({error})") from error


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file by name: numbers or text, one entry for each sample, in this machine's byte order."""
    if not path.exists():
        raise BadData(f"there is no file {path}")
    if not zipfile.is_zipfile(path):
        raise BadData(
            f"{path} is no .npz file; write one with numpy.savez({path.stem + '.npz'!r}, x_train=..., y_train=...)"
        )
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except Exception as error:  # numpy and zipfile raise many kinds, and MemoryError for a damaged shape
        raise BadData(
            f"{path}: cannot be read as an .npz file of plain arrays ({type(error).__name__}: {error})"
        ) from error
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise BadData(f"{path}: {key} is no array")
        if not array.ndim or array.dtype.kind not in "biufUS" or array.dtype == np.longdouble:
            what = f"{array.dtype} {list(array.shape)}"
            raise BadData(f"{path}: {key} is {what}; expected an array of numbers or texts, one for each sample")
    return {key: array.astype(array.dtype.newbyteorder("="), copy=False) for key, array in arrays.items()}


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, MNIST's format, plain or packed with gzip (.gz)."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise BadData(f"{path}: cannot be read ({error})") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise BadData(f"{path}: not an idx file of unsigned bytes, which begins with 00 00 08 in hexadecimal")
    dimensions = content[3]
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise BadData(f"{path}: the idx header is cut short")
    shape = np.frombuffer(content, dtype=">u4", count=dimensions, offset=4).tolist()
    size, expected = len(content) - header, math.prod(shape)
    if size != expected:
        raise BadData(f"{path}: expected {expected} bytes for shape {shape}, found {size}")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy()


class _ArrayUnpickler(pickle.Unpickler):
    """Reads dicts, lists, text and numpy arrays; any other object could run code, so it is refused."""

    _allowed = {
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: np.ndarray((0,), np.uint8),
        ("numpy._core.multiarray", "_reconstruct"): lambda *_: np.ndarray((0,), np.uint8),
        ("numpy", "ndarray"): None,  # an argument of _reconstruct, which ignores it here
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): lambda text, encoding: str.encode(text, encoding),  # how Python 3 writes bytes
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which arrays do not need")
        return self._allowed[module_name, global_name]


def read_array_pickle(path: Path) -> dict[bytes, Any]:
    """Read a pickled dict of arrays and lists with bytes as keys, such as CIFAR's, without running its code."""
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise BadData(f"{path}: refused, expected a pickle of plain arrays ({error})") from error
    if not isinstance(content, dict):
        raise BadData(f"{path}: expected a pickled dict, found {type(content).__name__}")
    return content


def read_cifar(paths: Sequence[Path], label_key: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images and labels of CIFAR's Python files."""
    images, labels = [], []
    for path in paths:
        content = read_array_pickle(path)
        try:
            rows = np.asarray(content[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
            labels.append(np.asarray(content[label_key], dtype=np.int64))
        except Exception as error:  # a damaged pickle can hold arrays of any kind
            expected = f"data [n, 3072] and {label_key.decode()} [n]"
            raise BadData(f"{path}: expected {expected} ({type(error).__name__}: {error})") from error
        images.append(rows.transpose(0, 2, 3, 1))
    return np.concatenate(images), np.concatenate(labels)


def read_svhn(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images and labels of one of SVHN's cropped-digit .mat files."""
    try:
        matlab = importlib.import_module("scipy.io")
    except ImportError as error:
        raise MissingData(f"{path}: reading .mat files needs scipy; pip install 'undrift[svhn]'") from error
    try:
        content = matlab.loadmat(path)
        images = np.ascontiguousarray(np.transpose(content["X"], (3, 0, 1, 2)))
        labels = np.asarray(content["y"]).reshape(-1).astype(np.int64)
    except Exception as error:  # scipy raises many kinds for a damaged file
        expected = "a .mat file with X [32, 32, 3, n] and y [n, 1]"
        raise BadData(f"{path}: expected {expected} ({type(error).__name__}: {error})") from error
    labels[labels == 10] = 0  # the files call the digit 0 ten
    return images, labels


def open_picture(path: str | Path, *modes: str) -> Image:
    """A decoded picture, in the first of the modes if it has none of them; in RGB if none is given."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingData(f"{path}: reading pictures needs Pillow; pip install pillow") from error
    modes = modes or ("RGB",)
    try:
        with Image.open(path) as picture:
            picture.load()
            check_picture(path, picture)
            decoded = picture.copy() if picture.mode in modes else picture.convert(modes[0])
    except BadData:
        raise
    except Exception as error:  # Pillow raises many kinds for a damaged file
        raise BadData(f"{path}: cannot be decoded as a picture ({type(error).__name__}: {error})") from error
    if not min(decoded.size):
        raise BadData(f"{path}: the picture has {decoded.width} x {decoded.height} pixels; expected at least one")
    return decoded


def check_picture(path: str | Path, picture: Image) -> None:
    """Refuse what eight bits cannot hold, which Pillow would make white or black, and files of several pictures."""
    if picture.mode.startswith(("I", "F")):
        extremes: Any = picture.getextrema()  # extremes of one band
        low, high = extremes
        if picture.mode == "F" or not 0 <= low <= high <= 255:
            raise BadData(
                f"{path}: the picture has values from {low:g} to {high:g}; save it with 8 bits, scaled to 0 .. 255"
            )
    if (count := getattr(picture, "n_frames", 1)) > 1:
        raise BadData(f"{path}: the file holds {count} pictures; save each in a file of its own")


def stack_pictures(pictures: Iterable[Image], count: int, channels: int) -> NDArray[np.uint8]:
    """Pictures of one size as one array, filled in place: a list of arrays would double the memory."""
    mode = "L" if channels == 1 else "RGB"
    stacked: NDArray[np.uint8] = np.empty((0, 0, 0, channels), dtype=np.uint8)
    for position, picture in enumerate(pictures):
        height, width = picture.height, picture.width
        if position == 0:
            stacked = np.empty((count, height, width, channels), dtype=np.uint8)
        if stacked.shape[1:3] != (height, width):
            first = f"{stacked.shape[1]} x {stacked.shape[2]}"
            raise BadData(f"picture {position} is {height} x {width}; expected {first} as the first one")
        stacked[position] = np.asarray(picture.convert(mode)).reshape(height, width, channels)
    return stacked


def read_pictures(paths: Sequence[Path]) -> NDArray[np.uint8]:
    """Colour pictures of one size, decoded on all cores."""
    with ThreadPoolExecutor() as threads:
        return stack_pictures(threads.map(open_picture, paths), len(paths), channels=3)
