"""The learning-rate schedule of every command."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RateSchedule:
    """Warm-up, decay and drops of the learning rate."""

    warmup: float = 0.0  # rounds in which the rate rises from 0
    decay: float = 1.0  # multiplies the rate after every round
    drops: tuple[int, ...] = ()  # rounds after which it is multiplied by `drop`
    drop: float = 0.1

    def largest(self, rounds: int) -> float:
        """A bound of the factor over so many rounds; infinity where it cannot be computed."""
        try:
            return max(self.decay, 1.0) ** rounds * max(self.drop, 1.0) ** len(self.drops)
        except OverflowError:
            return math.inf

    def rate(self, lr: float, t: int, passed: float) -> float:
        """The rate in round t, counted from 0, after `passed` rounds.

        >>> RateSchedule(warmup=2.0, drops=(4,)).rate(0.5, 0, 1.0), RateSchedule(drops=(4,), drop=0.5).rate(0.5, 4, 4.0)
        (0.25, 0.25)
        """
        warm = min(1.0, passed / self.warmup) if self.warmup else 1.0
        return float(warm * lr * self.decay**t * self.drop ** sum(t >= drop for drop in self.drops))
