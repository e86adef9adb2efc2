"""Whether two methods differ more than chance would have it: a paired t-test over the seeds that both have."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

TEST = "two-sided paired t-test over the seeds that both have, with Holm's correction for the number of comparisons"


class Difference(NamedTuple):
    """One method's score minus that of another, seed by seed."""

    mean: float
    p: float | None  # None where there is nothing to test: one seed, or the same difference in every seed
    seeds: int


def difference(a: Mapping[str, float], b: Mapping[str, float]) -> Difference | None:
    """The scores of a minus those of b, by seed; None if they share no seed.

    Seeds draw the same cohorts, batches and first weights for every method, so that pairing takes their luck out.

    >>> found = difference({"0": 0.9, "1": 0.8, "2": 0.7}, {"0": 0.8, "1": 0.6, "2": 0.4})  # 0.1, 0.2 and 0.3
    >>> round(found.p, 6), found.seeds
    (0.07418, 3)
    """
    gaps = [a[seed] - b[seed] for seed in a if seed in b]
    if not gaps:
        return None
    mean = statistics.fmean(gaps)
    # Differences that are equal up to rounding have no spread to judge by.
    spread = statistics.stdev(gaps) if len(gaps) > 1 else 0.0
    if spread <= 1e-12 * max(abs(gap) for gap in (*gaps, 1e-300)):
        return Difference(mean, 1.0 if len(gaps) > 1 and mean == 0.0 else None, len(gaps))
    return Difference(mean, two_sided(mean / (spread / math.sqrt(len(gaps))), len(gaps) - 1), len(gaps))


def two_sided(t: float, freedom: int) -> float:
    """The chance of a value of Student's t, with whole degrees of freedom, at least as far from 0.

    The finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4.

    >>> f"{two_sided(2.0, 4):.6f}", f"{two_sided(-3.0, 1):.6f}", two_sided(0.0, 3)
    ('0.116117', '0.204833', 1.0)
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term = cosine if freedom % 2 else 1.0
    total = term if freedom > 1 or not freedom % 2 else 0.0
    for k in range(2 + freedom % 2, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return min(1.0, max(0.0, 1.0 - inside))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's corrected values of several tests: the smallest is multiplied by their number, the next by one less, and so on.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    known = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    least = 0.0
    for done, (p, place) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - done)))
        corrected[place] = least
    return corrected
