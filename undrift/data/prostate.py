"""The prostate on slices of MR pictures of several sites, from files: prostate(size=128, split=0).

Reads UNDRIFT_DATA/prostate/, one .npz or one folder per site. Groups are cases: all slices of a case stay in one split.
Masks are 0 background, 1 prostate.
"""

from __future__ import annotations

from pathlib import Path

from undrift.data._site_files import read_sites
from undrift.data._sites import dataset_of_sites
from undrift.data.dataset import Dataset


def load(root: Path | None, size: int = 128, split: int = 0) -> Dataset:
    return dataset_of_sites("prostate", read_sites(root, "prostate", size, 1), ("prostate",), split, crop=size // 16)
