"""Segmentation data of several sites: split each site and join them in one data set."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadData, BadSetting
from undrift.data.dataset import Dataset

SHARES = (0.5, 0.25, 0.25)  # training, validation and test
SPLITS = ("train", "val", "test")
STREAM = 0x517E  # separates these random numbers from others with the same seed


@dataclass(frozen=True)
class Site:
    """The pictures of one site."""

    name: str
    images: NDArray[np.uint8]  # [n, H, W, C]
    masks: NDArray[np.uint8]  # [n, H, W]
    groups: NDArray[np.generic] | None = None  # [n] the patient or case; each stays in one split
    split: NDArray[np.str_] | None = None  # [n] train, val or test, if the site says so


def draw_split(groups: NDArray[np.generic], seed: int) -> NDArray[np.str_]:
    """train, val or test for each sample: whole groups in random order, by `SHARES`.

    >>> draw_split(np.array([1, 1, 2, 2, 3, 3, 4, 4]), 0).tolist().count("train")
    4
    """
    names, member = np.unique(groups, return_inverse=True)
    order = np.random.Generator(np.random.PCG64([seed, STREAM])).permutation(len(names))
    ends = np.rint(np.cumsum(SHARES) * len(names)).astype(int)
    group_split = np.empty(len(names), dtype="<U5")
    for name, start, end in zip(SPLITS, [0, *ends], ends, strict=False):
        group_split[order[start:end]] = name
    return group_split[member]


def dataset_of_sites(
    name: str, sites: list[Site], structures: tuple[str, ...], seed: int, crop: int = 0, flip: bool = True
) -> Dataset:
    """Join all sites; site k becomes client k under the partition `sites`."""
    if seed < 0:
        raise BadSetting(f"split must be at least 0, not {seed}")
    if len(sites) < 2:
        raise BadData(f"{name} needs at least two sites, one .npz file or one folder for each, but has {len(sites)}")
    for site in sites:
        check(site, len(structures))
    shapes = {site.images.shape[1:] for site in sites}
    if len(shapes) > 1:
        raise BadData(f"the sites of {name} have pictures of different shapes {sorted(shapes)}; give them one size")
    split = np.concatenate([split_site(site, seed) for site in sites])
    owner = np.repeat(np.arange(len(sites)), [len(site.masks) for site in sites])
    for k, site in enumerate(sites):
        missing = [part for part in SPLITS if not (split[owner == k] == part).any()]
        if missing:
            raise BadData(f"site {site.name} has no sample for {missing[0]}; it needs at least four groups of samples")
    images = np.concatenate([site.images for site in sites])
    masks = np.concatenate([site.masks for site in sites]).astype(np.int64)
    train = split != "test"  # with validation
    pixels = images[split == "train"].reshape(-1, images.shape[-1]) / 255.0
    return Dataset(
        name, images[train], masks[train], images[~train], masks[~train], len(structures),
        mean=tuple(pixels.mean(0).round(4).tolist()), std=tuple(pixels.std(0).round(4).tolist()), crop=crop, flip=flip,
        sites=owner[train], test_sites=owner[~train], validation=np.flatnonzero(split[train] == "val"),
        structures=structures, site_names=tuple(site.name for site in sites),
    )  # fmt: skip


def leave_out(data: Dataset, number: int) -> Dataset:
    """Leave one site (counted from 1) out of training; its test samples become `unseen`."""
    if data.sites is None or data.test_sites is None or not isinstance(data.x_train, np.ndarray):
        raise BadSetting(f"{data.name} has no sites of which one could be left out; use data such as synthetic-sites")
    count = int(data.sites.max()) + 1
    if not 1 <= number <= count:
        raise BadSetting(f"without must be a site from 1 to {count}, not {number}")
    kept, tested, x_test = data.sites != number - 1, data.test_sites != number - 1, np.asarray(data.x_test)
    validation = np.zeros(len(kept), bool)
    validation[[] if data.validation is None else data.validation] = True
    return replace(
        data, x_train=data.x_train[kept], y_train=data.y_train[kept], x_test=x_test[tested], y_test=data.y_test[tested],
        sites=data.sites[kept], test_sites=data.test_sites[tested], validation=np.flatnonzero(validation[kept]),
        site_names=tuple(name for k, name in enumerate(data.site_names, 1) if k != number),
        unseen=(x_test[~tested], data.y_test[~tested]),
    )  # fmt: skip


def split_site(site: Site, seed: int) -> NDArray[np.str_]:
    """The site's own split, or one drawn by the seed."""
    groups = np.arange(len(site.masks)) if site.groups is None else site.groups
    if site.split is None:
        return draw_split(groups, seed)
    for group in np.unique(groups):
        parts = np.unique(site.split[groups == group])
        if len(parts) > 1:
            raise BadData(f"site {site.name} has {group!s} in both {parts[0]} and {parts[1]}; choose one split")
    return site.split


def check_split(what: str, split: NDArray[np.str_]) -> None:
    """Refuse a word other than train, val and test, whose samples would be lost, or trained on though they were to test."""
    unknown = sorted(set(split.tolist()) - set(SPLITS))
    if unknown:
        raise BadData(
            f"{what}: the split of {int((split == unknown[0]).sum())} samples is {unknown[0]!r}; give train, val or test"
        )


def check(site: Site, structures: int) -> None:
    """Raise BadData unless pictures and masks match."""
    images, masks = site.images, site.masks
    if images.dtype != np.uint8 or images.ndim != 4:
        raise BadData(
            f"site {site.name} has pictures {images.dtype} {list(images.shape)}, not uint8 [n, H, W, channels]"
        )
    if not images.size:
        raise BadData(f"site {site.name} has no pictures, or pictures without pixels: {list(images.shape)}")
    if masks.shape != images.shape[:3]:
        raise BadData(
            f"site {site.name} has pictures {list(images.shape)} but masks {list(masks.shape)}; make them fit"
        )
    if masks.dtype.kind not in "bui":
        raise BadData(f"the masks of site {site.name} are {masks.dtype}; expected whole numbers")
    if masks.min() < 0 or masks.max() > structures:
        raise BadData(
            f"the masks of site {site.name} go from {masks.min()} to {masks.max()}; expected 0 (background) to {structures}"
        )
    for what, values in (("groups", site.groups), ("split", site.split)):
        if values is not None and values.shape != (len(masks),):
            raise BadData(f"site {site.name} has {len(masks)} masks but {what} of shape {list(values.shape)}")
    if site.split is not None:
        check_split(f"site {site.name}", site.split)
