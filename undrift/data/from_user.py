"""Turn the user's data into a `Dataset`.

Accepted are
- a `Dataset`,
- four arrays (x_train, y_train, x_test, y_test), as a tuple, a list or a mapping with these names,
- a tuple (train, test) of two parts. A part is a torch Dataset that yields (input, target), a list of (input, target)
  tuples, or one tuple (inputs, targets) of arrays,
- a tuple (clients, test), where `clients` lists one part per client; the partition `sites` then gives each client its
  samples.

What could be read in two ways is refused. uint8 images are [n, height, width] or [n, height, width, channels] and are
scaled to 0..1; floating-point inputs are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from undrift.core.errors import BadData
from undrift.data.dataset import Dataset

Arrays = tuple[NDArray[np.generic], NDArray[np.generic]]
ARRAYS = (np.ndarray, torch.Tensor)
NAMES = ("x_train", "y_train", "x_test", "y_test")
PART = (
    "give a torch Dataset of (input, target), a list of (input, target) tuples, or a tuple (inputs, targets) of arrays"
)


TEST = "give data=(x_train, y_train, x_test, y_test), (train, test) or ([one part per client], test)"


def dataset_from(data: Any) -> Dataset:
    """Any of the forms above as a `Dataset`.

    >>> dataset_from((np.zeros((4, 2)), [0, 1, 0, 1], np.zeros((2, 2)), [0, 1])).classes
    2
    """
    if isinstance(data, Dataset):
        for inputs, targets in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
            if len(inputs) != len(targets):
                raise BadData(f"{len(inputs)} inputs but {len(targets)} targets; give one target for each input")
        return data
    sites = None
    if lacks_test(data):
        raise BadData(f"{shown(data)} has no test samples; {TEST}")
    if isinstance(data, Mapping):
        missing = [name for name in NAMES if name not in data]
        if missing:
            raise BadData(f"data lacks {', '.join(missing)}; give {', '.join(NAMES)}")
        data = tuple(data[name] for name in NAMES)
    if isinstance(data, tuple | list) and len(data) == 4 and all(map(is_array, data)):
        train, test = pair(data[0], data[1]), pair(data[2], data[3])
    elif isinstance(data, tuple) and len(data) == 2:
        if has_several_inputs(data[0]):
            several = shown(data[0][0])
            raise BadData(f"the inputs of the training data are {several}; a model takes one tensor, so join them")
        if is_one_part(data[0]):
            train = read_part(data[0], "the training data")
        else:
            parts = [read_part(part, f"client {n}") for n, part in enumerate(data[0])]
            train, sites = join(parts), np.repeat(np.arange(len(parts)), [len(y) for _, y in parts])
        test = read_part(data[1], "the test data")
    else:
        raise BadData(
            "data must be (x_train, y_train, x_test, y_test), (train, test) or ([one part per client], test), "
            f"not {shown(data)}"
        )
    if not len(train[1]):
        raise BadData("there are no training samples")
    if len(test[1]):
        check_alike(train, test, "the training data", "the test data")
    classes, labels = 0, train[1]
    if labels.ndim == 1 and labels.dtype.kind in "ui":
        classes = int(max(labels.max(), test[1].max() if len(test[1]) else 0)) + 1
    return Dataset("own", train[0], labels, test[0], test[1], classes, sites=sites)


def lacks_test(data: Any) -> bool:
    """Whether these are training samples alone."""
    if isinstance(data, tuple):
        return len(data) == 2 and all(is_array(values) and not is_samples(values) for values in data)
    return isinstance(data, DataLoader | torch.utils.data.Dataset)


def is_samples(values: Any) -> bool:
    """Whether this is a list of (input, target)."""
    return isinstance(values, list) and all(map(is_sample, values))


def is_array(values: Any) -> bool:
    """Whether these are arrays' values: an array, or a list of numbers, of arrays or of such lists."""
    numbers = (bool, int, float, np.generic, *ARRAYS)
    return isinstance(values, ARRAYS) or (
        isinstance(values, list) and all(isinstance(value, numbers) or is_array(value) for value in values[:1])
    )


def is_sample(item: Any) -> bool:
    """Whether this is one (input, target) whose target is a number, and so not the (inputs, targets) of a client."""
    return isinstance(item, tuple) and len(item) == 2 and is_number(item[1])


def is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | np.generic) or (isinstance(value, ARRAYS) and value.ndim == 0)


def is_one_part(given: Any) -> bool:
    """Whether the training data are one part; otherwise they list one part per client."""
    if isinstance(given, list) and given:
        return all(map(is_sample, given))
    return not isinstance(given, tuple | list) or all(map(is_array, given))


def has_several_inputs(given: Any) -> bool:
    """Whether this is (inputs, targets) whose inputs are of several parts, such as ((ids, masks), targets)."""
    two = isinstance(given, tuple | list) and len(given) == 2
    return two and isinstance(given[0], tuple | Mapping) and is_array(given[1]) and not isinstance(given[1], list)


def read_part(part: Any, what: str) -> Arrays:
    """Inputs and targets of one part; `what` names it in an error."""
    if isinstance(part, tuple):
        if len(part) != 2 or not all(map(is_array, part)):
            raise BadData(f"{what} is {shown(part)}; {PART}")
        return pair(*part, what)
    if isinstance(part, DataLoader):
        raise BadData(f"{what} is a DataLoader; batches are drawn here, so give its samples: loader.dataset")
    if isinstance(part, Mapping):
        names = ", ".join(map(repr, list(part)[:4]))
        raise BadData(f"{what} is a mapping of {names}; give a tuple (inputs, targets) of its arrays")
    listed = isinstance(part, list) and all(isinstance(item, tuple) for item in part)
    readable = hasattr(part, "__getitem__") and hasattr(part, "__len__")
    if not listed and (not readable or isinstance(part, (str, bytes, list, Mapping, IterableDataset, *ARRAYS))):
        raise BadData(f"{what} is {shown(part)}; {PART}")
    if not len(part):
        raise BadData(f"{what} has no samples; give at least one, or leave a client without samples out")
    samples = [read_sample(part, i, what) for i in range(len(part))]
    if listed and all(y.ndim and x.ndim and len(x) == len(y) for x, y in samples):
        raise BadData(f"{what} is a list of (array, array): are these samples, or batches? {PART}")
    for i, sample in enumerate(samples):
        for name, first, values in zip(("input", "target"), samples[0], sample, strict=True):
            if values.shape != first.shape:
                raise BadData(f"{what}: {name} 0 has the shape {list(first.shape)}, {name} {i} {list(values.shape)}")
    return pair(np.stack([x for x, _ in samples]), np.stack([y for _, y in samples]), what)


def read_sample(part: Any, i: int, what: str) -> Arrays:
    """Input and target number i of a torch Dataset or of a list."""
    try:
        sample = part[i]
    except Exception as error:  # whatever the user's Dataset raises
        raise BadData(f"{what}: reading sample {i} failed: {type(error).__name__}: {error}") from error
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise BadData(f"{what}: sample {i} is {shown(sample)}, not (input, target)")
    for name, value in zip(("input", "target"), sample, strict=True):
        if isinstance(value, tuple | Mapping) or (
            isinstance(value, list) and any(isinstance(v, ARRAYS) for v in value)
        ):
            raise BadData(f"{what}: the {name} of sample {i} is {shown(value)}; a model takes one tensor, so join them")
    return as_array(sample[0]), as_array(sample[1])


def join(parts: list[Arrays]) -> Arrays:
    """The samples of all clients, one client after another."""
    for n, part in enumerate(parts):
        if not len(part[1]):
            raise BadData(f"client {n} has no samples; leave it out of the list")
        check_alike(parts[0], part, "client 0", f"client {n}")
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def check_alike(first: Arrays, other: Arrays, here: str, there: str) -> None:
    """Refuse parts whose samples have different shapes or kinds: uint8 pictures are scaled, floats are not."""
    for name, a, b in zip(("inputs", "targets"), first, other, strict=True):
        if a.shape[1:] != b.shape[1:] or a.dtype.kind != b.dtype.kind:
            one, two = (f"{list(v.shape[1:])} of {v.dtype}" for v in (a, b))
            raise BadData(f"the {name} of {here} are {one}, those of {there} {two}; give all the same shape and type")


def pair(inputs: Any, targets: Any, what: str = "") -> Arrays:
    """Inputs and targets, one target for each input."""
    of = f" of {what}" if what else ""
    x, y = as_array(inputs), as_array(targets)
    for name, values in (("inputs", x), ("targets", y)):
        if values.dtype.kind not in "uif":
            raise BadData(f"{name}{of} must be numbers, not {values.dtype}")
        if not values.ndim:
            raise BadData(f"the {name}{of} are one number, not an array with a row for each sample")
    if len(x) != len(y):
        raise BadData(f"{len(x)} inputs but {len(y)} targets{of}; give one target for each input")
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[..., np.newaxis]  # grey pictures
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] not in (1, 3, 4):
        raise BadData(
            f"uint8 pictures{of} are [n, height, width, channels], not {list(x.shape)}; move the channels to the end"
        )
    if x.dtype == np.float64:
        x = x.astype(np.float32) if np.array_equal(x, x.astype(np.float32), equal_nan=True) else x
    if y.dtype.kind in "ui":
        y = y.astype(np.int64)
    return x, y


def as_array(values: Any) -> NDArray[np.generic]:
    try:
        return np.asarray(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values)
    except (ValueError, TypeError) as error:  # such as rows of different lengths
        raise BadData(f"no array can be made of {shown(values)}: {error}") from error


def shown(value: Any) -> str:
    """What kind of thing it is, for an error.

    >>> shown([(1, 2.0), (3, 4.0)]), shown(np.zeros((2, 3)))
    ('a list of 2 (tuple, tuple)', 'an array [2, 3]')
    """
    if isinstance(value, ARRAYS):
        return f"an array {list(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, tuple | list):
        inside = ", ".join(type(item).__name__ for item in value[:4])
        return f"a {kind} of {len(value)}" + (f" ({inside}{', ...' if len(value) > 4 else ''})" if value else "")
    return f"a {kind}"
