"""One client's private samples: an .npz of plain arrays.

It holds x_train and y_train, optionally x_test and y_test; or x and y, optionally split [n] with train, val or test for each
sample. Pictures are uint8 [n, height, width] or [n, height, width, channels]; other inputs are numbers [n, ...]. Targets are
class labels [n], or masks [n, height, width].
"""

from __future__ import annotations

from pathlib import Path

from undrift.core.errors import BadData
from undrift.data._formats import read_arrays
from undrift.data._sites import check_split
from undrift.data.from_user import Arrays, pair


def read_user_file(path: Path, masks: bool, part: str = "train") -> Arrays:
    """The inputs and targets of one part, train or test; all samples where the file has no split."""
    both = (f"x_{part}", f"y_{part}")
    arrays = read_arrays(path)
    if arrays.keys() >= set(both):
        x, y = pair(arrays[both[0]], arrays[both[1]])
    elif {"x", "y"} <= arrays.keys():
        x, y = pair(arrays["x"], arrays["y"])
        if "split" in arrays:
            split = arrays["split"].astype(str)
            if split.shape != (len(y),):
                raise BadData(f"{path}: split has shape {list(split.shape)}, but there are {len(y)} samples")
            check_split(str(path), split)
            x, y = x[split == part], y[split == part]
    else:
        held = ", ".join(arrays) or "nothing"
        raise BadData(f"{path}: holds {held}; expected {both[0]} and {both[1]}, or x and y")
    if not len(y):
        raise BadData(f"{path}: holds no samples for {part}; expected at least one")
    if not x.size:
        raise BadData(f"{path}: its inputs are empty, their shape is {list(x.shape)}")
    if y.dtype.kind not in "iu" or y.ndim != (3 if masks else 1) or int(y.min()) < 0:
        wanted = "masks [n, height, width]" if masks else "class labels [n]"
        raise BadData(f"{path}: expected {wanted} of whole numbers from 0 on, found {y.dtype} {list(y.shape)}")
    if masks and (x.ndim != 4 or x.shape[:3] != y.shape):
        raise BadData(f"{path}: inputs {list(x.shape)} but masks {list(y.shape)}; give each picture one of its size")
    return x, y
