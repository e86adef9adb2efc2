"""Handwritten digits, 8 x 8 grey, 1438 + 359 samples, part of the package.

Source: UCI Optical Recognition of Handwritten Digits (test part), E. Alpaydin and C. Kaynak, 1998, CC BY 4.0.
Grey levels 0..16 are scaled to 0..255.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from undrift.data.dataset import Dataset


def load(root: Path | None) -> Dataset:
    """The embedded samples; every fifth one is for testing."""
    with np.load(Path(__file__).with_name("digits.npz")) as archive:
        images, labels = archive["x"], archive["y"].astype(np.int64)
    test = np.arange(len(images)) % 5 == 4
    arrays = images[~test], labels[~test], images[test], labels[test]
    return Dataset("digits", *arrays, classes=10, mean=(0.30586,), std=(0.37628,))
