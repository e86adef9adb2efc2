"""Crops, flips and colours are drawn from streams, and masks move with their pictures."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from undrift.data.augment import Transform


def test_colour_and_augmentation_are_drawn_from_streams() -> None:
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    keys, clients = torch.arange(6), torch.tensor([0, 0, 0, 1, 1, 1])
    plain = Transform((0.5,) * 3, (0.5,) * 3)
    assert torch.equal(plain(images, torch.float32, keys, clients), plain(images, torch.float32))
    moved = Transform(crop=2, flip=True)(images, torch.float64, keys, clients)
    assert torch.equal(moved[2:4], Transform(crop=2, flip=True)(images[2:4], torch.float64, keys[2:4], clients[2:4]))
    padded = F.pad(images.double() / 255, (2, 2, 2, 2))
    for i in range(6):  # every picture is one of the 25 crops, straight or flipped
        crops = [padded[i, :, a : a + 8, b : b + 8] for a in range(5) for b in range(5)]
        assert any(torch.equal(moved[i], c) or torch.equal(moved[i], c.flip(-1)) for c in crops)
    coloured = Transform(colour=0.5, seed=1)
    tinted = coloured(images, torch.float64, keys, clients)
    same = coloured(images[:1].expand(6, 3, 8, 8), torch.float64, keys, clients)
    assert torch.equal(same[0], same[2]) and not torch.equal(same[0], same[3]), "the tint belongs to the client"
    assert tinted.min() >= 0 and tinted.max() <= 1
    assert torch.equal(coloured(images, torch.float64), images.double() / 255), "test images are unchanged"
    assert math.isclose(
        float(Transform(colour=0.0)(images, torch.float64, keys, clients).sum()), float((images.double() / 255).sum())
    )


def test_masks_move_with_their_pictures() -> None:
    random = np.random.default_rng(0)
    masks = torch.from_numpy(random.integers(0, 3, (20, 8, 8)))
    pictures = (masks * 80).to(torch.uint8).unsqueeze(1)
    keys = torch.arange(20)
    transform = Transform(crop=2, flip=True)
    moved = transform(pictures, torch.float32, keys) * 255 / 80
    assert torch.equal(moved.squeeze(1).round().long(), transform.masks(masks, keys))
    assert not torch.equal(transform.masks(masks, keys), masks)
