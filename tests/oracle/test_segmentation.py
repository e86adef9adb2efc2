"""Dice against counting by hand."""

from __future__ import annotations

import numpy as np
import torch

from undrift.oracle.segmentation import dice_loss, dice_scores, metrics


def test_dice_is_what_counting_gives() -> None:
    random = np.random.default_rng(0)
    outputs, masks = random.normal(size=(5, 2, 6, 7)), random.integers(0, 3, (5, 6, 7))
    masks[3] = 0
    outputs[3] = -1  # nothing there, nothing found
    masks[4] = 0
    expected, losses = np.zeros((5, 2)), np.zeros((5, 2))
    for n in range(5):
        for c in range(2):
            found = {(i, j) for i in range(6) for j in range(7) if outputs[n, c, i, j] > 0}
            true = {(i, j) for i in range(6) for j in range(7) if masks[n, i, j] > c}
            expected[n, c] = 1.0 if not found | true else 2 * len(found & true) / (len(found) + len(true))
            p = 1 / (1 + np.exp(-outputs[n, c]))
            losses[n, c] = 1 - (2 * p[masks[n] > c].sum() + 1e-5) / (p.sum() + (masks[n] > c).sum() + 1e-5)
    given = torch.from_numpy(outputs), torch.from_numpy(masks)
    torch.testing.assert_close(dice_scores(*given).double(), torch.from_numpy(expected), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dice_loss(*given), torch.from_numpy(losses.mean(1)), rtol=1e-12, atol=1e-12)
    named = metrics(("disc", "cup"))
    torch.testing.assert_close(named["dice_cup"](*given), dice_scores(*given)[:, 1])
    torch.testing.assert_close(named["dice"](*given), dice_scores(*given).mean(1))
    assert float(dice_scores(*given)[3].sum()) == 2.0 and float(dice_scores(*given)[4].sum()) == 0.0
