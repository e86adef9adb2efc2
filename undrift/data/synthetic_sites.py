"""Drawn disc-and-cup pictures of sites with different cameras and annotators: synthetic-sites(sites=6, size=32, shift=1.0).

Every picture shows a bright disc with a brighter cup on a coloured ground, vessels across both, and noise. Sites differ in
colours, contrast, disc size and place, noise, and label style (how far from the true border annotators draw). `colour`,
`contrast`, `scale` and `style` say how much, all multiplied by `shift`; 0 makes sites alike. A patient has two pictures, both in
one split.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadSetting
from undrift.data._sites import Site, dataset_of_sites
from undrift.data.dataset import Dataset

PATIENTS = (24, 48, 24, 96, 36, 144)  # per site; about the proportions of the thesis' retinal sites
STREAM = 0xD15C


def load(
    root: Path | None,
    sites: int = 6,
    size: int = 32,
    patients: int = 0,
    shift: float = 1.0,
    colour: float = 1.0,
    contrast: float = 1.0,
    scale: float = 1.0,
    style: float = 1.0,
    seed: int = 0,
    split: int = 0,
) -> Dataset:
    """`patients` per site, by default `PATIENTS`; `seed` draws the pictures and `split` divides them."""
    if sites < 2 or size < 16 or (patients and patients < 4):
        raise BadSetting(
            f"synthetic-sites needs sites >= 2, size >= 16 and patients >= 4, not {sites}, {size}, {patients}"
        )
    amounts = [shift * amount for amount in (colour, contrast, scale, style)]
    drawings = [draw_site(k, patients or PATIENTS[k % 6], size, amounts, seed) for k in range(sites)]
    return dataset_of_sites("synthetic-sites", drawings, ("disc", "cup"), split)


def draw_site(number: int, patients: int, size: int, amounts: list[float], seed: int) -> Site:
    """Draw one site. Its habits depend on its number alone, so that adding sites changes no earlier one."""
    random = np.random.Generator(np.random.PCG64([seed, STREAM, number]))
    colour, contrast, scale, style = amounts
    habits = {
        "ground": np.array([0.45, 0.25, 0.15]) * np.exp(colour * random.uniform(-0.7, 0.7, 3)),
        "tint": np.exp(colour * random.uniform(-0.5, 0.5, 3)),
        "contrast": np.exp(contrast * random.uniform(-0.8, 0.3)),
        "radius": 0.26 * np.exp(scale * random.uniform(-0.45, 0.3)),
        "place": 0.5 + scale * random.uniform(-0.12, 0.12, 2),
        "ratio": 0.5 + 0.18 * scale * random.uniform(-1, 1),
        "disc_style": 1 + 0.18 * style * random.uniform(-1, 1),
        "cup_style": 1 + 0.25 * style * random.uniform(-1, 1),
        "noise": 0.02 * np.exp(contrast * random.uniform(0, 1.2)),
    }
    pictures = [draw_picture(random, size, habits) for _ in range(2 * patients)]
    images, masks = (np.stack(arrays) for arrays in zip(*pictures, strict=True))
    return Site(f"site {number + 1}", images, masks, np.repeat(np.arange(patients), 2))


def draw_picture(
    random: np.random.Generator, size: int, habits: dict[str, NDArray[np.float64]]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """One picture [size, size, 3] and its mask [size, size]: 0 ground, 1 rim, 2 cup."""
    y, x = (np.mgrid[:size, :size] + 0.5) / size
    centre = habits["place"] + random.uniform(-0.08, 0.08, 2)
    radius = habits["radius"] * np.exp(random.uniform(-0.15, 0.15))
    ratio = np.clip(habits["ratio"] + random.uniform(-0.12, 0.12), 0.2, 0.85)
    stretch, turn = np.exp(random.uniform(-0.12, 0.12)), random.uniform(0, np.pi)
    dx, dy = x - centre[0], y - centre[1]
    along, across = np.cos(turn) * dx + np.sin(turn) * dy, np.cos(turn) * dy - np.sin(turn) * dx
    distance = np.hypot(along * stretch, across / stretch) / radius  # 1 at the border of the disc

    def inside(border: float, sharpness: float) -> NDArray[np.float64]:
        soft: NDArray[np.float64] = 1 / (1 + np.exp(np.clip((distance - border) * sharpness, -40, 40)))
        return soft

    light = 1 - 0.35 * np.hypot(x - 0.5, y - 0.5) * random.uniform(0.5, 1.5)  # darker towards the edge
    picture = habits["ground"] * light[..., None]
    glow = 0.45 * inside(1.0, 14) + 0.3 * inside(float(ratio), 10)
    picture = picture + habits["contrast"] * habits["tint"] * np.array([0.7, 0.6, 0.4]) * glow[..., None]
    for _ in range(4):  # vessels: dark arcs through the disc
        angle, bend = random.uniform(0, 2 * np.pi), random.uniform(-2, 2)
        side = np.cos(angle) * dy - np.sin(angle) * dx + bend * (np.cos(angle) * dx + np.sin(angle) * dy) ** 2
        picture = picture * (1 - 0.35 * np.exp(-((side * size / 1.2) ** 2)))[..., None]
    picture = picture + habits["noise"] * random.standard_normal((size, size, 3))
    disc, cup = habits["disc_style"], min(ratio * habits["cup_style"], 0.95 * habits["disc_style"])
    mask = (distance < disc).astype(np.uint8) + (distance < cup).astype(np.uint8)
    return (picture.clip(0, 1) * 255).round().astype(np.uint8), mask
