"""Turn the user's data into a `Dataset`.

Accepted are
- a `Dataset`,
- four arrays (x_train, y_train, x_test, y_test), as a tuple or a mapping with these names,
- a pair (train, test) of torch Datasets that yield (input, target),
- a pair (clients, test) where `clients` lists one torch Dataset, or one (inputs, targets) pair, per client; the
  partition `sites` then gives each client its samples.

uint8 images are [n, height, width, channels] and are scaled to 0..1; floating-point inputs are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from undrift.core.errors import BadData
from undrift.data.dataset import Dataset

Arrays = tuple[NDArray[np.generic], NDArray[np.generic]]
ARRAYS = (np.ndarray, torch.Tensor, list)
NAMES = ("x_train", "y_train", "x_test", "y_test")


def dataset_from(data: Any) -> Dataset:
    """Any of the forms above as a `Dataset`.

    >>> dataset_from((np.zeros((4, 2)), [0, 1, 0, 1], np.zeros((2, 2)), [0, 1])).classes
    2
    """
    if isinstance(data, Dataset):
        return data
    sites = None
    if isinstance(data, Mapping):
        missing = [name for name in NAMES if name not in data]
        if missing:
            raise BadData(f"data lacks {', '.join(missing)}; give {', '.join(NAMES)}")
        data = tuple(data[name] for name in NAMES)
    if isinstance(data, (tuple, list)) and len(data) == 4:
        train, test = pair(data[0], data[1]), pair(data[2], data[3])
    elif isinstance(data, (tuple, list)) and len(data) == 2:
        if isinstance(data[0], list) or (isinstance(data[0], tuple) and not isinstance(data[0][0], ARRAYS)):
            parts = [arrays(part) for part in data[0]]
            if any(len(y) == 0 for _, y in parts):
                raise BadData("a client has no samples; leave it out of the list")
            train = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
            sites = np.repeat(np.arange(len(parts)), [len(y) for _, y in parts])
        else:
            train = arrays(data[0])
        test = arrays(data[1])
    else:
        raise BadData("data must be (x_train, y_train, x_test, y_test), (train, test) or ([one per client], test)")
    labels = train[1]
    if not len(labels):
        raise BadData("there are no training samples")
    classes = 0
    if labels.ndim == 1 and labels.dtype.kind in "ui":
        classes = int(max(labels.max(), test[1].max() if len(test[1]) else 0)) + 1
    return Dataset("own", train[0], labels, test[0], test[1], classes, sites=sites)


def arrays(part: Any) -> Arrays:
    """Inputs and targets of a torch Dataset, or of a pair of arrays."""
    if isinstance(part, (tuple, list)):
        return pair(part[0], part[1])
    samples = [part[i] for i in range(len(part))]
    if not samples:
        raise BadData("a Dataset is empty; give at least one sample")
    return pair(np.stack([as_array(x) for x, _ in samples]), np.stack([as_array(y) for _, y in samples]))


def pair(inputs: Any, targets: Any) -> Arrays:
    x, y = as_array(inputs), as_array(targets)
    if len(x) != len(y):
        raise BadData(f"{len(x)} inputs but {len(y)} targets; give one target for each input")
    for what, values in (("inputs", x), ("targets", y)):
        if values.dtype.kind not in "uif":
            raise BadData(f"{what} must be numbers, not {values.dtype}")
    if x.dtype == np.float64:
        x = x.astype(np.float32) if np.array_equal(x, x.astype(np.float32), equal_nan=True) else x
    if y.dtype.kind in "ui":
        y = y.astype(np.int64)
    return x, y


def as_array(values: Any) -> NDArray[np.generic]:
    return np.asarray(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values)
