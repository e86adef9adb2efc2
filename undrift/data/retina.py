"""Optic disc and cup on fundus pictures of several sites, from files: retina(size=128, split=0, parts=1).

Reads UNDRIFT_DATA/retina/, one .npz or one folder per site. Masks are 0 background, 1 rim, 2 cup. `parts` cuts every site into
so many clients with different colour balance and contrast.
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
    """Divide a site's groups among several clients and change the appearance of all but the first."""
    groups = np.arange(len(site.masks)) if site.groups is None else site.groups
    names, member = np.unique(groups, return_inverse=True)
    random = np.random.Generator(np.random.PCG64([STREAM, number]))
    owner = (random.permutation(len(names)) % parts)[member]
    clients = []
    for part in range(parts):
        rows = owner == part
        images, gain, gamma = site.images[rows], np.ones(site.images.shape[-1]), 1.0
        if part:
            gain, gamma = np.exp(random.uniform(-0.4, 0.4, len(gain))), float(np.exp(random.uniform(-0.5, 0.5)))
        changed = (255 * np.clip(gain * (images / 255.0) ** gamma, 0, 1)).round().astype(np.uint8)
        split = None if site.split is None else site.split[rows]
        clients.append(Site(f"{site.name} {part + 1}", changed, site.masks[rows], groups[rows], split))
    return clients
