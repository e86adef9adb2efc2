"""The sum of updates that hides single clients."""

from __future__ import annotations

import pytest
import torch

from undrift.round.private import private_sum


def test_the_private_sum_is_clipped_and_has_the_noise_that_it_says() -> None:
    d = torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.4, 0.0]], dtype=torch.float64)
    none = private_sum(d, 1.0, 0.0, 2)
    torch.testing.assert_close(none, torch.tensor([0.9, 1.2, 0.0], dtype=torch.float64))
    drawn = torch.stack([private_sum(torch.zeros(1, 4000), 0.5, 3.0, 3999) for _ in range(20)])
    assert drawn[:, :-1].std() == pytest.approx(1.5, rel=0.02) and not drawn[:, -1].any()
    assert not torch.equal(drawn[0], drawn[1])
