"""Turn the user's data into a `Dataset`.

Accepted are
- a `Dataset`,
- four arrays (x_train, y_train, x_test, y_test), as a tuple, a list or a mapping with these names,
- a tuple (train, test) of two parts. A part is a torch Dataset that yields (input, target), a list of (input, target)
  tuples, or one tuple (inputs, targets) of arrays,
- a tuple (clients, test), where `clients` lists one part per client; the partition `sites` then gives each client its
  samples.

Inputs of several parts are a tuple or a mapping of arrays, as in ((ids, mask), y), or such a sample of a torch Dataset. Samples
that are mappings have their target under `labels`. The samples of a DataLoader and of an IterableDataset are read once.

What could be read in two ways is refused. uint8 images are [n, height, width] or [n, height, width, channels] and are
scaled to 0..1; floating-point inputs are not changed.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from undrift.core.errors import BadData
from undrift.core.pieces import records
from undrift.data.dataset import Dataset

Arrays = tuple[NDArray[np.generic], NDArray[np.generic]]
ARRAYS = (np.ndarray, torch.Tensor)
NAMES = ("x_train", "y_train", "x_test", "y_test")
LABELS = "labels"  # the key of the labels in a mapping
ENDLESS = 1 << 26  # samples of a stream: who gives more does not end
LOOKED_AT = 8  # samples of a torch Dataset that are read twice
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
        raise BadData(f"{describe_value(data)} has no test samples; {TEST}")
    if isinstance(data, Mapping):
        missing = [name for name in NAMES if name not in data]
        if missing:
            pair_of = "; a training and a test part are a tuple, data=(train, test)" if "train" in data else ""
            raise BadData(f"data lacks {', '.join(missing)}; give {', '.join(NAMES)}{pair_of}")
        data = tuple(data[name] for name in NAMES)
    if isinstance(data, tuple | list) and len(data) == 4 and are_four(*data):
        train, test = pair(data[0], data[1]), pair(data[2], data[3])
    elif isinstance(data, tuple) and len(data) == 2:
        if is_one_part(data[0]):
            train = read_part(data[0], "the training data")
        else:
            parts = [read_part(part, f"client {n}") for n, part in enumerate(data[0])]
            train, sites = join(parts), np.repeat(np.arange(len(parts)), [len(y) for _, y in parts])
        test = read_part(data[1], "the test data")
    else:
        raise BadData(
            "data must be (x_train, y_train, x_test, y_test), (train, test) or ([one part per client], test), "
            f"not {describe_value(data)}{hint(data)}"
        )
    if not len(train[1]):
        raise BadData("there are no training samples")
    if len(test[1]):
        check_alike(train, test, "the training data", "the test data")
    return Dataset("own", *train, *test, count_classes(train, test), sites=sites)


def count_classes(*pairs: tuple[Any, Any]) -> int:
    """How many classes labels have, or how many tokens texts with a label for each token; 0 for other targets."""
    found = -1
    for x, y in pairs:
        tokens = y.ndim == 2 and isinstance(x, np.ndarray) and x.dtype.kind in "ui" and x.shape == y.shape
        if y.dtype.kind not in "ui" or not (y.ndim == 1 or tokens):
            return 0
        found = max([found, *(int(t.max()) for t in ((x, y) if tokens else (y,)) if len(t))])
    return found + 1


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


def are_four(x_train: Any, y_train: Any, x_test: Any, y_test: Any) -> bool:
    """Whether these are the arrays (x_train, y_train, x_test, y_test)."""
    return is_array(y_train) and is_array(y_test) and all(is_array(x) or has_parts(x) for x in (x_train, x_test))


def has_parts(inputs: Any) -> bool:
    """Whether these are the arrays of inputs of several parts."""
    parts = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    return isinstance(inputs, tuple | Mapping) and bool(parts) and all(map(is_array, parts))


def is_one_part(given: Any) -> bool:
    """Whether the training data are one part; otherwise they list one part per client."""
    if has_several_inputs(given):
        return True
    if isinstance(given, list) and given:
        return all(map(is_sample, given))
    return not isinstance(given, tuple | list) or all(map(is_array, given))


def has_several_inputs(given: Any) -> bool:
    """Whether this is (inputs, targets) whose inputs are of several parts, such as ((ids, masks), targets)."""
    return isinstance(given, tuple) and len(given) == 2 and has_parts(given[0]) and is_array(given[1])


def read_part(part: Any, what: str) -> Arrays:
    """Inputs and targets of one part; `what` names it in an error."""
    if isinstance(part, Mapping):
        if LABELS not in part or not has_parts(part):
            names = ", ".join(map(repr, list(part)[:4]))
            raise BadData(f"{what} is a mapping of {names}; give a tuple (inputs, targets) of its arrays")
        part = inputs_and_labels(part)
    if isinstance(part, tuple):
        if len(part) != 2 or not (all(map(is_array, part)) or has_several_inputs(part)):
            raise BadData(f"{what} is {describe_value(part)}; {PART}")
        return pair(*part, what)
    if isinstance(part, DataLoader):
        part = samples_of(part, what)
    if isinstance(part, IterableDataset):
        part = read_stream(part, what)
    stored = isinstance(part, Stored)
    listed = isinstance(part, list) and not stored and all(isinstance(item, tuple) for item in part)
    readable = hasattr(part, "__getitem__") and hasattr(part, "__len__")
    if not (listed or stored) and (not readable or isinstance(part, (str, bytes, list, *ARRAYS))):
        raise BadData(f"{what} is {describe_value(part)}; {PART}")
    if not len(part):
        raise BadData(f"{what} has no samples; give at least one, or leave a client without samples out")
    samples = [read_sample(part, i, what) for i in range(len(part))]
    if not (listed or stored):
        say_read_once(part, samples, what)
    if listed and all(y.ndim and x.ndim and len(x) == len(y) for x, y in samples):
        raise BadData(f"{what} is a list of (array, array): are these samples, or batches? {PART}")
    for i, sample in enumerate(samples):
        for name, first, values in zip(("input", "target"), samples[0], sample, strict=True):
            if values.dtype.names and values.dtype != first.dtype:
                raise BadData(f"{what}: the parts of {name} 0 are {first.dtype}, those of {name} {i} {values.dtype}")
            if values.shape != first.shape:
                raise BadData(f"{what}: {name} 0 has the shape {list(first.shape)}, {name} {i} {list(values.shape)}")
    return pair(np.stack([x for x, _ in samples]), np.stack([y for _, y in samples]), what)


def say_read_once(part: Any, samples: list[Arrays], what: str) -> None:
    """Warn where a torch Dataset gives another sample each time it is asked, such as a picture that is turned at random."""
    for i, before in enumerate(samples[:LOOKED_AT]):
        again = read_sample(part, i, what)
        if not all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(before, again, strict=True)):
            warnings.warn(
                f"{what} gives another sample {i} each time it is asked, but is read once: what it draws at random stays the "
                "same in all rounds; leave random transforms out, and give the crop and flip of an undrift.Dataset instead",
                stacklevel=2,
            )
            return


def read_sample(part: Any, i: int, what: str) -> Arrays:
    """Input and target number i of a torch Dataset or of a list."""
    try:
        sample = part[i]
    except Exception as error:  # whatever the user's Dataset raises
        raise BadData(f"{what}: reading sample {i} failed: {type(error).__name__}: {error}") from error
    if isinstance(sample, Mapping) and LABELS in sample:
        sample = inputs_and_labels(sample)
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise BadData(f"{what}: sample {i} is {describe_value(sample)}, not (input, target)")
    for name, value in zip(("input", "target"), sample, strict=True):
        if (name == "target" and isinstance(value, tuple | Mapping)) or (
            isinstance(value, list) and any(isinstance(v, ARRAYS) for v in value)
        ):
            raise BadData(
                f"{what}: the {name} of sample {i} is {describe_value(value)}; a {name} is an array of numbers"
            )
    if isinstance(sample[0], tuple | Mapping):
        return np.asarray(records(by_part(sample[0], f"{what}: sample {i}", [np.newaxis]))[0]), as_array(sample[1])
    return as_array(sample[0]), as_array(sample[1])


class Stored(list[Any]):
    """The samples of a stream, in memory."""


def read_stream(part: IterableDataset[Any], what: str) -> Stored:
    """The samples of a stream, from its beginning to its end."""
    try:
        found = Stored(itertools.islice(part, ENDLESS))
    except Exception as error:  # whatever the user's IterableDataset raises
        raise BadData(f"{what}: reading the stream failed: {type(error).__name__}: {error}") from error
    if len(found) == ENDLESS:
        raise BadData(f"{what} is a stream of more than {ENDLESS} samples; give one that ends")
    return found


def samples_of(loader: DataLoader[Any], what: str) -> Any:
    """A loader's samples in their own order: batches are drawn here."""
    if isinstance(loader.dataset, IterableDataset):
        stored = read_stream(loader.dataset, what)
        given: Any = stored
    else:
        if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
            kind = type(loader.sampler).__name__
            raise BadData(f"{what} is a DataLoader with a {kind}, but samples are drawn here; give a Subset of them")
        given = loader.dataset
    if loader.collate_fn is default_collate:
        return given
    try:
        batches = [loader.collate_fn([given[i]]) for i in range(len(given))]
        return Stored(first_of(batch) for batch in batches)
    except Exception as error:  # whatever the user's function raises
        raise BadData(f"{what}: collate_fn failed for one sample: {type(error).__name__}: {error}") from error


def first_of(batch: Any) -> Any:
    """The sample of a batch of one."""
    if isinstance(batch, Mapping):
        return {name: first_of(value) for name, value in batch.items()}
    return tuple(map(first_of, batch)) if isinstance(batch, tuple | list) else batch[0]


def inputs_and_labels(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """A mapping's targets, which are called labels, and the rest, which are inputs."""
    inputs = {name: value for name, value in given.items() if name != LABELS}
    return inputs, given[LABELS]


def by_part(inputs: Any, what: str, index: Any = ()) -> Any:
    """Inputs of several parts as arrays of numbers, which `index` may give another dimension."""
    named = dict(inputs) if isinstance(inputs, Mapping) else {str(n): part for n, part in enumerate(inputs)}
    arrays = {str(name): as_array(part) for name, part in named.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in "buif":
            raise BadData(f"{what}: the part {name} of the inputs must be numbers, not {array.dtype}")
    return {name: array[tuple(index)] if index else array for name, array in arrays.items()}


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
        if a.shape[1:] != b.shape[1:] or a.dtype.kind != b.dtype.kind or (a.dtype.names and a.dtype != b.dtype):
            one, two = (f"{v.dtype}" if v.dtype.names else f"{list(v.shape[1:])} of {v.dtype}" for v in (a, b))
            raise BadData(f"the {name} of {here} are {one}, those of {there} {two}; give all the same shape and type")


def pair(inputs: Any, targets: Any, what: str = "") -> Arrays:
    """Inputs and targets, one target for each input."""
    of = f" of {what}" if what else ""
    several = isinstance(inputs, tuple | Mapping)
    x = records(by_part(inputs, f"the inputs{of}")) if several else as_array(inputs)
    y = as_array(targets)
    for name, values in (("inputs", x), ("targets", y)):
        if values.dtype.kind not in "uif" and not values.dtype.names:
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
        raise BadData(f"no array can be made of {describe_value(values)}: {error}") from error


def hint(data: Any) -> str:
    """What to do with what is not accepted, if there is an easy way."""
    if any(hasattr(each, "to_numpy") for each in (data, *(data if isinstance(data, tuple | list) else ()))):
        return "; make arrays of them with .to_numpy()"
    if isinstance(data, str | Path):
        return "; give a file a name with 'undrift data add NAME FILE.npz', and then dataset=NAME"
    return ""


def describe_value(value: Any) -> str:
    """What kind of thing it is, for an error.

    >>> describe_value([(1, 2.0), (3, 4.0)]), describe_value(np.zeros((2, 3)))
    ('a list of 2 (tuple, tuple)', 'an array [2, 3]')
    """
    if isinstance(value, ARRAYS):
        return f"an array {list(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, tuple | list):
        inside = ", ".join(type(item).__name__ for item in value[:4])
        return f"a {kind} of {len(value)}" + (f" ({inside}{', ...' if len(value) > 4 else ''})" if value else "")
    return f"a {kind}"
