"""Optic disc and cup on fundus pictures of several sites, from files: retina(size=128, split=0, parts=1).

Reads UNDRIFT_DATA/retina/, one .npz or one folder a site. Masks are 0 background, 1 rim, 2 cup. `parts` cuts every site into
so many clients, each with a colour balance and a contrast of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from undrift.data._site_files import read_sites
from undrift.data._sites import Site, dataset_of_sites
from undrift.data.dataset import Dataset

STREAM = 0x2E71


def load(root: Path | None, size: int = 128, split: int = 0, parts: int = 1) -> Dataset:
    sites = read_sites(root, "retina", size, 2)
    if parts > 1:
        sites = [part for number, site in enumerate(sites) for part in cut(site, parts, number)]
    return dataset_of_sites("retina", sites, ("disc", "cup"), split, crop=size // 16)


def cut(site: Site, parts: int, number: int) -> list[Site]:
    """Groups of a site dealt out to several clients, each with an appearance of its own; the first keeps the site's."""
    groups = np.arange(len(site.masks)) if site.groups is None else site.groups
    names, member = np.unique(groups, return_inverse=True)
    random = np.random.Generator(np.random.PCG64([STREAM, number]))
    owner = (random.permutation(len(names)) % parts)[member]
    found = []
    for part in range(parts):
        mine = owner == part
        images, gain, gamma = site.images[mine], np.ones(site.images.shape[-1]), 1.0
        if part:
            gain, gamma = np.exp(random.uniform(-0.4, 0.4, len(gain))), float(np.exp(random.uniform(-0.5, 0.5)))
        changed = (255 * np.clip(gain * (images / 255.0) ** gamma, 0, 1)).round().astype(np.uint8)
        given = None if site.split is None else site.split[mine]
        found.append(Site(f"{site.name} {part + 1}", changed, site.masks[mine], groups[mine], given))
    return found
