"""Data sets: small files in each published format are read back exactly, bad ones refused in plain words."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import os
import pickle
import struct
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from undrift.core.errors import BadData, BadSetting, MissingData
from undrift.data import (
    _image_files,
    _sources,
    cifar10,
    cifar100,
    digits,
    fashion_mnist,
    imagefolder,
    mnist,
    svhn,
    tiny_imagenet,
)
from undrift.data._formats import open_picture, read_array_pickle, read_arrays, read_idx, read_pictures
from undrift.data._image_files import ImageFiles
from undrift.data._site_files import read_npz_site
from undrift.data._sites import check as check_site
from undrift.data._sources import Arrays
from undrift.data._user_file import read_user_file
from undrift.data.dataset import Dataset

NPZ_SETS = (mnist, fashion_mnist, cifar10, cifar100, svhn, tiny_imagenet)


@pytest.fixture(autouse=True)
def no_data_from_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an installed Debian package nor Hugging Face may help; the tests of those put them back."""
    folders = [folder for folder in fashion_mnist.SOURCE.folders if folder != fashion_mnist.DEBIAN_PACKAGE]
    monkeypatch.setattr(fashion_mnist, "SOURCE", replace(fashion_mnist.SOURCE, folders=tuple(folders)))
    monkeypatch.setattr(_sources, "hugging_face_loader", lambda identifier: None)


def random_arrays(channels: int, classes: int, side: int = 32, train: int = 20, test: int = 6) -> Arrays:
    random = np.random.default_rng(0)
    shape = (side, side, channels)
    return Arrays(
        random.integers(0, 256, (train, *shape), dtype=np.uint8),
        random.integers(0, classes, train),
        random.integers(0, 256, (test, *shape), dtype=np.uint8),
        random.integers(0, classes, test),
    )


def assert_holds(dataset: Dataset, expected: Arrays) -> None:
    for key, array in expected._asdict().items():
        held = getattr(dataset, key)
        np.testing.assert_array_equal(held, array)
        assert held.dtype == (np.uint8 if key.startswith("x") else np.int64)


# Digits, which comes with the package.


def test_digits_are_those_of_scikit_learn() -> None:
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    original = sklearn_datasets.load_digits()
    dataset = digits.load(None)
    test = np.arange(1797) % 5 == 4
    images = np.round(original.images * 255 / 16)[..., np.newaxis]
    assert_holds(dataset, Arrays(images[~test], original.target[~test], images[test], original.target[test]))


def test_digits_statistics_are_those_of_the_training_part() -> None:
    dataset = digits.load(None)
    pixels = np.asarray(dataset.x_train[np.arange(1438)]) / 255
    assert dataset.mean == pytest.approx((pixels.mean(),), abs=1e-5)
    assert dataset.std == pytest.approx((pixels.std(),), abs=1e-5)
    assert (dataset.classes, dataset.crop, dataset.flip) == (10, 0, False)


def test_digits_need_no_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert len(importlib.reload(digits).load(None).y_train) == 1438


# NAME.npz, for every data set that comes in files.


@pytest.mark.parametrize("module", NPZ_SETS)
def test_npz_is_read_back_and_comes_first(module: Any, tmp_path: Path) -> None:
    source = module.SOURCE
    arrays = random_arrays(source.channels, source.classes, side=8)
    np.savez(tmp_path / f"{source.name}.npz", **arrays._asdict())
    (tmp_path / source.name).mkdir()
    (tmp_path / source.name / "train-images-idx3-ubyte").write_bytes(b"would be refused")
    dataset = module.load(tmp_path)
    assert_holds(dataset, arrays)
    assert (dataset.name, dataset.classes) == (source.name, source.classes)
    assert len(dataset.mean) == len(dataset.std) == source.channels
    assert module.__name__ == "undrift.data." + source.name.replace("-", "_")


def test_augmentation_fits_the_data_set(tmp_path: Path) -> None:
    found = {}
    for module in NPZ_SETS:
        arrays = random_arrays(module.SOURCE.channels, 10, side=8)
        np.savez(tmp_path / f"{module.SOURCE.name}.npz", **arrays._asdict())
        dataset = module.load(tmp_path)
        found[dataset.name] = (dataset.crop, dataset.flip)
    plain = dict.fromkeys(("mnist", "fashion-mnist", "svhn"), (0, False))
    assert found == {**plain, "cifar10": (4, True), "cifar100": (4, True), "tiny-imagenet": (8, True)}


def test_npz_of_keras_has_no_channel_axis_and_labels_in_a_column(tmp_path: Path) -> None:
    arrays = random_arrays(1, 10, side=28)
    np.savez(
        tmp_path / "mnist.npz",
        x_train=arrays.x_train[..., 0],
        y_train=arrays.y_train[:, np.newaxis].astype(np.uint8),
        x_test=arrays.x_test[..., 0],
        y_test=arrays.y_test,
    )
    assert_holds(mnist.load(tmp_path), arrays)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"y_test": None}, "y_test missing; expected x_train, y_train, x_test, y_test, found x_train"),
        ({"y_train": np.zeros(19, np.int64)}, "20 images in x_train and 19 labels in y_train"),
        ({"y_test": np.full(6, 10)}, r"labels in y_test within 0\.\.9, found 10\.\.10"),
        ({"y_test": np.full(6, -1)}, r"labels in y_test within 0\.\.9, found -1\.\.-1"),
        ({"y_train": np.zeros(20)}, "y_train as whole numbers"),
        ({"x_train": np.zeros((20, 28, 28, 1), np.float32)}, r"uint8 images \(0\.\.255\).*found float32"),
        ({"x_train": np.zeros((20, 784), np.uint8)}, r"\[n, height, width\] or .*found uint8 \[20, 784\]"),
        ({"x_train": np.zeros((20, 28, 28, 3), np.uint8)}, r"with 1 channel\(s\), found 3"),
        ({"x_test": np.zeros((6, 27, 28, 1), np.uint8)}, r"images of one size.*\[27, 28, 1\]"),
        ({"x_train": np.zeros((0, 28, 28), np.uint8), "y_train": np.zeros(0, np.int64)}, "at least one"),
        ({"y_train": np.array([{}] * 20)}, "cannot be read as an .npz file"),
    ],
)
def test_npz_that_cannot_be_right_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    content = {**random_arrays(1, 10, side=28)._asdict(), **changes}
    np.savez(tmp_path / "mnist.npz", **{key: array for key, array in content.items() if array is not None})
    with pytest.raises(BadData, match=says) as caught:
        mnist.load(tmp_path)
    assert str(tmp_path / "mnist.npz") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04 cut short"])
def test_npz_that_is_not_one_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "mnist.npz").write_bytes(content)
    with pytest.raises(BadData, match="is no .npz file; write one with numpy.savez"):
        mnist.load(tmp_path)


# idx files: MNIST and Fashion-MNIST.


HEADERS = [
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627776, 6600, 1), }",  # 6 PiB
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (20, 32, 32, ",  # tokenize.TokenError
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (-20, 32, 32), }",
    b"{'descr': 'zz', 'fortran_order': False, 'shape': (20,), }",
    b"{'descr': '<M8[s]', 'fortran_order': False, 'shape': (0,), }",
    b"((((((((((",
    b"",
]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("packed", [True, False])
def test_damaged_headers_are_refused(header: bytes, packed: bool, tmp_path: Path) -> None:
    padded = header + b" " * (118 - len(header)) + b"\n"
    array = b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + bytes(64)
    with (tmp_path / "mnist.npz").open("wb") as file:
        if packed:
            with zipfile.ZipFile(file, "w") as archive:
                for name in Arrays._fields:
                    archive.writestr(f"{name}.npy", array)
        else:
            file.write(array)
    for read in (read_arrays, lambda path: read_user_file(path, False), lambda path: read_npz_site(path, 8, 2)):
        with pytest.raises(BadData, match=r"mnist\.npz"):
            read(tmp_path / "mnist.npz")


def test_arrays_are_read_in_the_byte_order_of_this_machine(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(4, dtype=">f4"), y=np.arange(4, dtype=">i8"))
    x, y = read_user_file(tmp_path / "a.npz", False)
    assert torch.from_numpy(x).tolist() == torch.from_numpy(y).tolist() == [0, 1, 2, 3]


def test_a_picture_without_pixels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = random_arrays(1, 10)._replace(x_train=np.zeros((20, 0, 0), np.uint8), x_test=np.zeros((6, 0, 0), np.uint8))
    np.savez(tmp_path / "mnist.npz", **arrays._asdict())
    with pytest.raises(BadData, match="no pixels"):
        mnist.load(tmp_path)
    np.savez(tmp_path / "site.npz", x=np.zeros((8, 0, 0, 3), np.uint8), y=np.zeros((8, 0, 0), np.uint8))
    with pytest.raises(BadData, match="pixels"):
        check_site(read_npz_site(tmp_path / "site.npz", 8, 2), 2)
    np.savez(tmp_path / "own.npz", x=np.zeros((8, 0, 0, 3), np.uint8), y=np.zeros(8, np.int64))
    with pytest.raises(BadData, match="inputs are empty"):
        read_user_file(tmp_path / "own.npz", False)
    monkeypatch.setattr("PIL.Image.open", lambda path: Image.new("RGB", (0, 4)))
    with pytest.raises(BadData, match="0 x 4 pixels"):
        open_picture(tmp_path / "p.png")


def test_pictures_that_eight_bits_cannot_hold_are_refused(tmp_path: Path) -> None:
    """Pillow would make 16 bits white, and numbers from 0 to 1 black; and of several pictures it reads the first."""
    deep, shares = (
        np.arange(64, dtype=np.uint16).reshape(8, 8) * 900,
        np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8),
    )
    Image.fromarray(deep).save(tmp_path / "deep.png")
    Image.fromarray(shares).save(tmp_path / "shares.tiff")
    pages = [Image.fromarray(np.full((8, 8), n, np.uint8)) for n in range(3)]
    pages[0].save(tmp_path / "pages.tiff", save_all=True, append_images=pages[1:])
    for name, said in (
        ("deep.png", "values from 0 to 56700; save it with 8 bits"),
        ("shares.tiff", "values from 0 to 1; save it with 8 bits"),
        ("pages.tiff", "holds 3 pictures"),
    ):
        with pytest.raises(BadData, match=f"{name}: .*{said}"):
            open_picture(tmp_path / name)
    Image.fromarray(deep // 900).save(tmp_path / "mask.png")  # labels in 16 bits fit
    assert np.array_equal(open_picture(tmp_path / "mask.png", "L"), deep // 900)


def idx_bytes(array: NDArray[Any]) -> bytes:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx_files(folder: Path, arrays: Arrays, packed: bool) -> None:
    folder.mkdir(parents=True)
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    for name, array in zip(names, arrays, strict=True):
        content = idx_bytes(array[..., 0] if array.ndim == 4 else array)
        if packed:
            (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (folder / f"{name}-ubyte").write_bytes(content)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("module", "folder"),
    [
        (mnist, "mnist"),
        (mnist, "mnist/raw"),
        (mnist, "MNIST/raw"),
        (fashion_mnist, "fashion-mnist"),
        (fashion_mnist, "fashion-mnist/raw"),
        (fashion_mnist, "FashionMNIST/raw"),
    ],
)
def test_idx_files_are_read_back(module: Any, folder: str, packed: bool, tmp_path: Path) -> None:
    arrays = random_arrays(1, 10, side=28)
    write_idx_files(tmp_path / folder, arrays, packed)
    assert_holds(module.load(tmp_path), arrays)


@pytest.mark.parametrize("root", [None, Path("/nowhere")])
def test_fashion_mnist_of_the_debian_package_needs_no_setting(
    root: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = random_arrays(1, 10, side=28)
    write_idx_files(tmp_path / "fashion-mnist", arrays, packed=True)
    folders = (*fashion_mnist.SOURCE.folders, tmp_path / "fashion-mnist")
    monkeypatch.setattr(fashion_mnist, "SOURCE", replace(fashion_mnist.SOURCE, folders=folders))
    assert_holds(fashion_mnist.load(root), arrays)
    assert str(fashion_mnist.DEBIAN_PACKAGE) == "/usr/share/datasets/fashion-mnist"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a", b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00\x00\x00\x00", "idx file of unsigned bytes"),
        ("a", b"", "idx file of unsigned bytes"),
        ("a", b"\x00\x00\x08\x03\x00\x00", "header is cut short"),
        ("a", idx_bytes(np.zeros((3, 2)))[:-1], r"expected 6 bytes for shape \[3, 2\], found 5"),
        ("a", idx_bytes(np.zeros((3, 2))) + b"\x00", "found 7"),
        ("a.gz", idx_bytes(np.zeros((3, 2))), "cannot be read"),
        ("a.gz", gzip.compress(idx_bytes(np.zeros((3, 2))), mtime=0)[:-9], "cannot be read"),
    ],
)
def test_damaged_idx_files_are_refused(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData, match=says):
        read_idx(tmp_path / name)


def test_incomplete_folder_says_what_is_missing(tmp_path: Path) -> None:
    write_idx_files(tmp_path / "mnist", random_arrays(1, 10, side=28), packed=True)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(BadData, match="incomplete, t10k-labels-idx1-ubyte missing"):
        mnist.load(tmp_path)


# CIFAR's pickles.


def cifar_rows(images: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), 3072)


def write_pickle(path: Path, content: dict[bytes, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.parametrize("folder", ["cifar-10-batches-py", "cifar10/cifar-10-batches-py"])
def test_cifar10_pickles_are_read_back(folder: str, tmp_path: Path) -> None:
    arrays = random_arrays(3, 10)
    for number in range(5):
        rows = slice(4 * number, 4 * number + 4)
        content = {
            b"batch_label": f"training batch {number + 1} of 5".encode(),
            b"labels": arrays.y_train[rows].tolist(),
            b"data": cifar_rows(arrays.x_train[rows]),
            b"filenames": [b"some.png"] * 4,
        }
        write_pickle(tmp_path / folder / f"data_batch_{number + 1}", content)
    test = {b"labels": arrays.y_test.tolist(), b"data": cifar_rows(arrays.x_test)}
    write_pickle(tmp_path / folder / "test_batch", test)
    assert_holds(cifar10.load(tmp_path), arrays)


@pytest.mark.parametrize("folder", ["cifar-100-python", "cifar100/cifar-100-python"])
def test_cifar100_pickles_are_read_back_with_fine_labels(folder: str, tmp_path: Path) -> None:
    arrays = random_arrays(3, 100)
    halves = {"train": (arrays.x_train, arrays.y_train), "test": (arrays.x_test, arrays.y_test)}
    for name, (images, labels) in halves.items():
        coarse = (labels // 5).tolist()
        content = {b"fine_labels": labels.tolist(), b"coarse_labels": coarse, b"data": cifar_rows(images)}
        write_pickle(tmp_path / folder / name, content)
    assert_holds(cifar100.load(tmp_path), arrays)


def python2_pickle(rows: NDArray[np.uint8], labels: list[int]) -> bytes:
    """Byte by byte what Python 2 wrote for {'data': rows, 'labels': labels}, as in the published files."""

    def text(content: bytes) -> bytes:
        return b"U" + bytes([len(content)]) + content

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + text(b"|") + b"NNN" + number(-1) * 2 + b"K\x00tb"
    raw = b"T" + struct.pack("<i", rows.size) + rows.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    array += b"(K\x01" + number(len(rows)) + number(3072) + b"\x86" + dtype + b"\x89" + raw + b"tb"
    listed = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def test_pickles_written_by_python_2_are_read(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (2, 3072), dtype=np.uint8)
    (tmp_path / "batch").write_bytes(python2_pickle(rows, [3, 7]))
    content = read_array_pickle(tmp_path / "batch")
    np.testing.assert_array_equal(content[b"data"], rows)
    assert content[b"labels"] == [3, 7]


@pytest.mark.parametrize("module_name", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_both_spellings_of_numpy_s_module_are_read(module_name: bytes, tmp_path: Path) -> None:
    written = pickle.dumps({b"data": np.arange(5)}, protocol=2)
    for spelling in (b"numpy._core.multiarray", b"numpy.core.multiarray"):
        written = written.replace(spelling, module_name)
    (tmp_path / "batch").write_bytes(written)
    np.testing.assert_array_equal(read_array_pickle(tmp_path / "batch")[b"data"], np.arange(5))


class RunsACommand:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_pickle_that_runs_commands_is_refused_before_it_does(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    malicious = pickle.dumps({b"data": RunsACommand(f"touch {proof}")}, protocol=2)
    pickle.loads(malicious)
    assert proof.exists(), "the pickle of this test does no harm, so it proves nothing"
    proof.unlink()
    (tmp_path / "batch").write_bytes(malicious)
    with pytest.raises(BadData, match=r"refused.*system"):
        read_array_pickle(tmp_path / "batch")
    assert not proof.exists()


@pytest.mark.parametrize(
    "written",
    [
        b"cbuiltins\neval\n(U\x011tR.",
        b"cnumpy\nload\n(U\x01xtR.",
        b"cnumpy.core.multiarray\nfrombuffer\n.",
        b"cnumpy\nndarray\n(K\x05tR.",  # would make an array of whatever was in memory
        b"c_codecs\ndecode\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"",
        b"garbage",
        pickle.dumps([1, 2]),
    ],
)
def test_pickles_of_anything_else_are_refused(written: bytes, tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(written)
    with pytest.raises(BadData, match="expected a pickle"):
        read_array_pickle(tmp_path / "batch")


@pytest.mark.parametrize(
    "content",
    [
        {b"data": np.zeros((2, 3072), np.uint8)},
        {b"labels": [0, 1]},
        {b"data": np.zeros((2, 100), np.uint8), b"labels": [0, 1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [b"cat", b"dog"]},
    ],
)
def test_cifar_pickles_without_their_arrays_are_refused(content: dict[bytes, Any], tmp_path: Path) -> None:
    for name in (*cifar10.TRAIN_FILES, "test_batch"):
        write_pickle(tmp_path / "cifar-10-batches-py" / name, content)
    with pytest.raises(BadData, match=r"data_batch_1: expected data \[n, 3072\] and labels \[n\]"):
        cifar10.load(tmp_path)


# SVHN's .mat files.


@pytest.mark.parametrize("folder", [".", "svhn"])
def test_svhn_mat_files_are_read_back_with_ten_as_zero(folder: str, tmp_path: Path) -> None:
    matlab = pytest.importorskip("scipy.io")
    arrays = random_arrays(3, 10)
    arrays.y_train[0] = 0
    (tmp_path / folder).mkdir(exist_ok=True)
    halves = {"train": (arrays.x_train, arrays.y_train), "test": (arrays.x_test, arrays.y_test)}
    for name, (images, labels) in halves.items():
        written = np.where(labels == 0, 10, labels).astype(np.uint8)[:, np.newaxis]
        content = {"X": images.transpose(1, 2, 3, 0), "y": written}
        matlab.savemat(tmp_path / folder / f"{name}_32x32.mat", content, do_compression=True)
    assert_holds(svhn.load(tmp_path), arrays)


def test_svhn_says_what_to_install_or_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy.io")
    for name in ("train_32x32.mat", "test_32x32.mat"):
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(BadData, match=r"train_32x32.mat: expected a .mat file with X \[32, 32, 3, n\]"):
        svhn.load(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(MissingData, match=r"pip install 'undrift\[svhn\]'"):
        svhn.load(tmp_path)


# Pictures in folders: Tiny-ImageNet and imagefolder.


def save_picture(path: Path, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Write the picture and return it as RGB as the file holds it (JPEG loses a little)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format="PNG" if path.suffix.lower() == ".png" else "JPEG")
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def write_tiny_imagenet(folder: Path) -> Arrays:
    random = np.random.default_rng(0)
    wnids = ["n03", "n01", "n02"]  # not sorted, as in the published file
    (folder / "val").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    train_images, train_labels, test_images, test_labels, annotations = [], [], [], [], []
    for label, wnid in enumerate(sorted(wnids)):
        for number in range(2):
            shape = (64, 64) if number else (64, 64, 3)  # some of the pictures are grey
            path = folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG"
            train_images.append(save_picture(path, random.integers(0, 256, shape, dtype=np.uint8)))
            train_labels.append(label)
    for number, wnid in enumerate(["n02", "n03", "n01", "n02"]):
        path = folder / "val" / "images" / f"val_{number}.JPEG"
        test_images.append(save_picture(path, random.integers(0, 256, (64, 64, 3), dtype=np.uint8)))
        test_labels.append(sorted(wnids).index(wnid))
        annotations.append(f"val_{number}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(annotations))
    return Arrays(np.stack(train_images), np.array(train_labels), np.stack(test_images), np.array(test_labels))


@pytest.mark.parametrize("folder", ["tiny-imagenet-200", "tiny-imagenet/tiny-imagenet-200"])
def test_tiny_imagenet_folder_is_read_back(folder: str, tmp_path: Path) -> None:
    arrays = write_tiny_imagenet(tmp_path / folder)
    assert_holds(tiny_imagenet.load(tmp_path), arrays)


def test_tiny_imagenet_with_damage_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet-200"
    write_tiny_imagenet(folder)
    damaged = folder / "train" / "n01" / "images" / "n01_0.JPEG"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:200])
    with pytest.raises(BadData, match="n01_0.JPEG: cannot be decoded"):
        tiny_imagenet.load(tmp_path)
    save_picture(damaged, np.zeros((32, 64, 3), np.uint8))
    with pytest.raises(BadData, match="expected 32 x 64 as the first one"):
        tiny_imagenet.load(tmp_path)
    damaged.write_bytes(whole)
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\t0\t0\t1\t1\n")
    with pytest.raises(BadData, match="an id of wnids.txt, found 'val_0.JPEG"):
        tiny_imagenet.load(tmp_path)


def write_imagefolder(folder: Path, side: int = 256) -> None:
    random = np.random.default_rng(0)
    for half, count in (("train", 3), ("val", 2)):
        for name in ("zebra", "ant"):
            for number in range(count):
                suffix = ("png", "JPEG", "jpg")[number]
                pixels = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
                save_picture(folder / half / name / f"{number}.{suffix}", pixels)
    (folder / "train" / "ant" / "notes.txt").write_text("not a picture")
    (folder / "train" / ".hidden").mkdir()


def test_imagefolder_lists_sorted_classes_and_decodes_what_is_asked_for(tmp_path: Path) -> None:
    write_imagefolder(tmp_path / "mine")
    dataset = imagefolder.load(None, str(tmp_path / "mine"))
    assert (dataset.classes, dataset.crop, dataset.flip) == (2, 0, True)
    assert dataset.x_train.shape == (6, 224, 224, 3) and len(dataset.x_test) == 4
    np.testing.assert_array_equal(dataset.y_train, [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(dataset.y_test, [0, 0, 1, 1])
    # Pictures of 256 x 256 need no resizing, so that their centre comes back as it was written.
    names = ["zebra/0.png", "ant/1.JPEG", "zebra/0.png"]
    expected = read_pictures([tmp_path / "mine" / "train" / name for name in names])[:, 16:240, 16:240]
    np.testing.assert_array_equal(dataset.x_train[np.array([3, 1, 3])], expected)
    assert dataset.x_train[np.array([], dtype=np.int64)].shape == (0, 224, 224, 3)


def test_imagefolder_is_also_looked_for_under_the_data_folder(tmp_path: Path) -> None:
    write_imagefolder(tmp_path / "mine", side=8)
    assert len(imagefolder.load(tmp_path, "mine").x_train) == 6


@pytest.mark.parametrize("shape", [(512, 700), (700, 512), (300, 200), (20, 31), (1, 90)])
def test_pictures_of_any_size_are_scaled_by_the_short_side_and_cut_at_the_centre(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    # A ramp along the longer side stays a ramp: the cut shows its middle, spanning 224/256 of the short side.
    ramp = np.linspace(0, 255, max(shape))
    pixels = np.broadcast_to(ramp if shape[1] > shape[0] else ramp[:, np.newaxis], shape).astype(np.uint8)
    save_picture(tmp_path / "a.png", pixels)
    decoded = ImageFiles([str(tmp_path / "a.png")])[np.array([0])][0].astype(float)
    assert decoded.shape == (224, 224, 3)
    along = decoded.mean(axis=(0, 2)) if shape[1] > shape[0] else decoded.mean(axis=(1, 2))
    assert along.mean() == pytest.approx(127, abs=2)
    assert along[-1] - along[0] == pytest.approx(255 * min(shape) / max(shape) * 224 / 256, rel=0.05, abs=2)


def test_image_files_of_another_size(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    save_picture(tmp_path / "a.png", pixels)
    files = ImageFiles([str(tmp_path / "a.png")] * 2, size=56)
    assert files.shape == (2, 56, 56, 3)
    np.testing.assert_array_equal(files[np.array([1])][0], pixels[4:60, 4:60])


def test_prefetch_decodes_in_the_background_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[str, str]] = []
    started = threading.Event()

    def slow_decode(file: str, size: int) -> NDArray[np.uint8]:
        decoded.append((file, threading.current_thread().name))
        started.set()
        time.sleep(0.02)
        return np.full((size, size, 3), int(file), dtype=np.uint8)

    monkeypatch.setattr(_image_files, "decode", slow_decode)
    files = ImageFiles([str(number) for number in range(10)], size=4)
    batch = np.array([2, 7, 5])
    files.prefetch(batch)
    assert started.wait(5), "nothing was decoded before it was asked for"
    files.prefetch(batch)  # asked for twice, decoded once
    np.testing.assert_array_equal(files[batch.copy()][:, 0, 0, 0], batch)
    assert sorted(file for file, _ in decoded) == ["2", "5", "7"]
    assert all(thread.startswith("undrift-decode") for _, thread in decoded)
    np.testing.assert_array_equal(files[np.array([7, 2])][:, 0, 0, 0], [7, 2])  # other indices: decoded anew
    assert len(decoded) == 5


def test_batches_nobody_comes_for_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_image_files, "decode", lambda file, size: np.zeros((size, size, 3), np.uint8))
    files = ImageFiles(["a"] * 100, size=4)
    for number in range(100):
        files.prefetch(np.array([number]))
    assert len(files._prefetched) == _image_files.BATCHES_AHEAD
    assert files[np.array([0])].shape == (1, 4, 4, 3)  # given up, so decoded now


def test_threads_are_kept_between_calls() -> None:
    assert _image_files.decoding_threads() is _image_files.decoding_threads()


def test_imagefolder_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="imagefolder:PATH"):
        imagefolder.load(tmp_path)
    with pytest.raises(MissingData, match="train: no such folder"):
        imagefolder.load(tmp_path, "nowhere")
    write_imagefolder(tmp_path / "mine", side=8)
    damaged = tmp_path / "mine" / "val" / "ant" / "0.png"
    damaged.write_bytes(b"not a picture")
    dataset = imagefolder.load(tmp_path, "mine")
    with pytest.raises(BadData, match="0.png: cannot be decoded"):
        dataset.x_test[np.array([0])]
    (tmp_path / "mine" / "train" / "cat").mkdir()
    with pytest.raises(BadData, match="only one has cat"):
        imagefolder.load(tmp_path, "mine")
    for half in ("train", "val"):
        (tmp_path / "empty" / half / "ant").mkdir(parents=True)
    with pytest.raises(BadData, match="no pictures"):
        imagefolder.load(tmp_path, "empty")


# Hugging Face.


class Column(list[Any]):
    """What a column of a Hugging Face data set looks like from here."""


def stand_in_for_load_dataset(
    arrays: Arrays, test_split: str, image: str, label: str, asked: list[tuple[str, str | None]]
) -> Any:
    def load_dataset(identifier: str, config: str | None) -> dict[str, Any]:
        asked.append((identifier, config))
        splits = {}
        for split, images, labels in (
            ("train", arrays.x_train, arrays.y_train),
            (test_split, arrays.x_test, arrays.y_test),
        ):
            columns = {
                image: Column(Image.fromarray(pixels.squeeze()) for pixels in images),
                label: Column(labels.tolist()),
                "coarse_label": Column([0] * len(labels)),
            }
            splits[split] = FakeSplit(columns)
        return splits

    return load_dataset


class FakeSplit(dict[str, Column]):
    @property
    def column_names(self) -> list[str]:
        return list(self)

    def __len__(self) -> int:
        return len(self["coarse_label"])


@pytest.mark.parametrize(
    ("module", "asks_for", "test_split", "image", "label"),
    [
        (mnist, ("ylecun/mnist", None), "test", "image", "label"),
        (fashion_mnist, ("zalando-datasets/fashion_mnist", None), "test", "image", "label"),
        (cifar10, ("uoft-cs/cifar10", None), "test", "img", "label"),
        (cifar100, ("uoft-cs/cifar100", None), "test", "img", "fine_label"),
        (svhn, ("ufldl-stanford/svhn", "cropped_digits"), "test", "image", "label"),
        (tiny_imagenet, ("zh-plus/tiny-imagenet", None), "valid", "image", "label"),
    ],
)
def test_hugging_face_is_asked_last_with_each_set_s_own_names(
    module: Any,
    asks_for: tuple[str, str | None],
    test_split: str,
    image: str,
    label: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrays = random_arrays(module.SOURCE.channels, module.SOURCE.classes)
    asked: list[tuple[str, str | None]] = []
    loader = stand_in_for_load_dataset(arrays, test_split, image, label, asked)
    monkeypatch.setattr(_sources, "hugging_face_loader", lambda identifier: loader)
    assert_holds(module.load(tmp_path), arrays)
    assert asked == [asks_for]


def test_hugging_face_with_other_columns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = stand_in_for_load_dataset(random_arrays(1, 10), "test", "photograph", "label", [])
    monkeypatch.setattr(_sources, "hugging_face_loader", lambda identifier: loader)
    with pytest.raises(BadData, match="expected one of image, img, found photograph"):
        mnist.load(None)


def test_hugging_face_reads_a_genuine_parquet_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.undo()  # the real loader
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arrays = random_arrays(3, 100)
    folder = tmp_path / "uoft-cs" / "cifar100" / "data"
    folder.mkdir(parents=True)
    whole_number = datasets.Value("int64")
    features = datasets.Features({"img": datasets.Image(), "fine_label": whole_number, "coarse_label": whole_number})
    for split, images, labels in (
        ("train", arrays.x_train, arrays.y_train),
        ("test", arrays.x_test, arrays.y_test),
    ):
        pictures = [Image.fromarray(pixels) for pixels in images]
        columns = {"img": pictures, "fine_label": labels.tolist(), "coarse_label": [0] * len(labels)}
        table = datasets.Dataset.from_dict(columns, features=features)
        table.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = replace(cifar100.SOURCE, hugging_face=str(folder.parent))
    monkeypatch.setattr(cifar100, "SOURCE", source)
    assert_holds(cifar100.load(None), arrays)


# Nothing found.


@pytest.mark.parametrize("module", NPZ_SETS)
@pytest.mark.parametrize("root_is_set", [False, True])
def test_missing_data_names_three_ways_in_one_line(module: Any, root_is_set: bool, tmp_path: Path) -> None:
    with pytest.raises(MissingData) as caught:
        module.load(tmp_path if root_is_set else None)
    message = str(caught.value)
    usual = {
        "mnist": "train-images-idx3-ubyte",
        "fashion-mnist": "train-images-idx3-ubyte",
        "cifar10": "cifar-10-batches-py",
        "cifar100": "cifar-100-python",
        "svhn": "train_32x32.mat",
        "tiny-imagenet": "tiny-imagenet-200",
    }[module.SOURCE.name]
    for part in (f"{module.SOURCE.name}.npz", usual, "UNDRIFT_DATA", "pip install 'undrift[hf]'"):
        assert part in message
    assert (str(tmp_path) in message) == root_is_set
    assert ("it is not set" in message) == (not root_is_set)
    assert "\n" not in message


def test_missing_folder_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"\(no such folder\)"):
        mnist.load(tmp_path / "nowhere")


def test_failure_of_hugging_face_is_told_in_the_same_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(identifier: str, config: str | None) -> None:
        raise ConnectionError("Couldn't reach the Hub\nsecond line")

    monkeypatch.setattr(_sources, "hugging_face_loader", lambda identifier: unreachable)
    with pytest.raises(MissingData) as caught:
        mnist.load(None)
    assert str(caught.value).endswith("failed with ConnectionError: Couldn't reach the Hub second line")
    assert "mnist.npz" in str(caught.value) and "\n" not in str(caught.value)


def test_without_an_answer_hugging_face_is_used_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real packages: nothing listens at the address, so the caches are asked and the answer comes at once."""
    pytest.importorskip("datasets")
    monkeypatch.undo()
    hub, config = (importlib.import_module(name) for name in ("huggingface_hub.constants", "datasets.config"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    assert _sources.hugging_face_loader("ylecun/mnist") is not None
    assert hub.HF_HUB_OFFLINE
    assert config.HF_HUB_OFFLINE
    with pytest.raises(MissingData, match="Hugging Face failed"):
        mnist.load(None)


def test_without_the_package_hugging_face_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _sources.hugging_face_loader("ylecun/mnist") is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace())  # a stray folder of that name
    assert _sources.hugging_face_loader("ylecun/mnist") is None
