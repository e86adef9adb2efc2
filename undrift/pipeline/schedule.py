"""The timeline of a pipeline, DSP(p; m), as data that can be printed, checked and compared.

An Xu, Improve the Efficiency of Model Parallelism (thesis, chapter 1); An Xu, Zhouyuan Huo and Heng Huang, On the
Acceleration of Deep Learning Model Parallelism with Staleness, CVPR 2020.

Block k has three queues: inputs M_k of length 1 + m_k, outputs P_k of length 1 + p_k and error gradients Q_k of length
1 + q_k. At timestamp t it forwards batch t - F_k, replays and backwards batch t - F_k - m_k, and updates; m_k is its
staleness. Batches count from 0 since the queues were last empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from undrift.core.errors import BadSetting

MOST_BLOCKS = 1000
LONGEST = 100_000  # queue


class BlockWork(NamedTuple):
    """The batches that a block forwards and backwards at a timestamp."""

    forward: int | None
    backward: int | None

    def __str__(self) -> str:
        parts = (("F", self.forward), ("B", self.backward))
        return " ".join(f"{letter}{batch}" for letter, batch in parts if batch is not None)


@dataclass(frozen=True)
class Schedule:
    """Queue lengths, and the timeline that follows from them.

    >>> schedule = Schedule.parse("1,1,0;4,2,0")
    >>> schedule.q, schedule.forward_lag, schedule.backward_lag
    ((0, 1, 1), (0, 1, 2), (4, 3, 2))
    >>> print(schedule.text(3))
    t  block 0  block 1  block 2
    0  F0
    1  F1       F0
    2  F2       F1       F0 B0
    3           F2 B0    F1 B1
    4  B0       B1       F2 B2
    5  B1       B2
    6  B2
    """

    p: tuple[int, ...]
    m: tuple[int, ...]

    def __post_init__(self) -> None:
        for length in (*self.p, *self.m):
            if not hasattr(length, "__index__"):
                raise BadSetting(f"queue lengths are whole numbers, not {length!r}")
        if broken := broken_rule(self.p, self.m):
            raise BadSetting(f"the queue lengths {self} cannot work: {broken}; nearest: {nearest(self.p, self.m)}")
        if self.blocks > MOST_BLOCKS or max(*self.p, *self.m) > LONGEST:
            raise BadSetting(f"there are at most {MOST_BLOCKS} blocks, and queues of at most {LONGEST}")

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """From "p_0,p_1,...;m_0,m_1,...", the thesis' way of writing it."""
        try:
            p, m = (tuple(int(length) for length in part.split(",")) for part in text.strip("() ").split(";"))
        except ValueError:
            raise BadSetting(f"write queue lengths p0,p1,..;m0,m1,.., such as 1,1,0;4,2,0, not {text!r}") from None
        return cls(p, m)

    @classmethod
    def bp(cls, blocks: int) -> Schedule:
        """Backpropagation: no staleness, block after block."""
        return cls((0,) * blocks, (0,) * blocks)

    @classmethod
    def fr(cls, blocks: int) -> Schedule:
        """Features Replay: a forward passes all blocks in one timestamp, m_k = K - 1 - k."""
        return cls((0,) * blocks, tuple(range(blocks - 1, -1, -1)))

    @classmethod
    def shortest(cls, blocks: int) -> Schedule:
        """The shortest queues with which no block waits for another: (1,..,1,0; 2(K-1),..,2,0)."""
        return cls((1,) * (blocks - 1) + (0,), tuple(range(2 * blocks - 2, -1, -2)))

    @property
    def blocks(self) -> int:
        return len(self.m)

    @property
    def q(self) -> tuple[int, ...]:
        """q_k = m_{k-1} - p_{k-1} - m_k, so that an input meets its own error gradient; q_0 = 0."""
        return (0, *(self.m[k - 1] - self.p[k - 1] - self.m[k] for k in range(1, self.blocks)))

    @property
    def forward_lag(self) -> tuple[int, ...]:
        """F_k = p_0 + .. + p_{k-1}: block k forwards batch t - F_k."""
        return tuple(accumulate(self.p[:-1], initial=0))

    @property
    def backward_lag(self) -> tuple[int, ...]:
        """B_k = F_k + m_k: block k backwards batch t - B_k."""
        return tuple(f + m for f, m in zip(self.forward_lag, self.m, strict=True))

    @property
    def in_order(self) -> bool:
        """Whether a block waits for its neighbour within a timestamp (BP, FR)."""
        return self.blocks > 1 and (0 in self.p[:-1] or 0 in self.q[1:])

    def work(self, k: int, t: int, batches: int) -> BlockWork:
        """The work of block k at timestamp t in a run of `batches`."""
        lags = self.forward_lag[k], self.backward_lag[k]
        return BlockWork(*(t - lag if 0 <= t - lag < batches else None for lag in lags))

    def table(self, batches: int) -> list[list[BlockWork]]:
        """[timestamp][block], from the first batch's forward to the last one's backward: batches + m_0 timestamps."""
        return [[self.work(k, t, batches) for k in range(self.blocks)] for t in range(batches + self.m[0])]

    def text(self, batches: int) -> str:
        """The table as aligned text."""
        rows = [["t", *(f"block {k}" for k in range(self.blocks))]]
        rows += [[str(t), *map(str, row)] for t, row in enumerate(self.table(batches))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def __str__(self) -> str:
        return format_queues(self.p, self.m)


def format_queues(p: tuple[int, ...], m: tuple[int, ...]) -> str:
    return f"{','.join(map(str, p))};{','.join(map(str, m))}"


def broken_rule(p: tuple[int, ...], m: tuple[int, ...]) -> str:
    """The rule that queue lengths break, or "".

    With p = 0 everywhere blocks forward in order within a timestamp, as in BP and FR, and q may be 0 as well.
    Otherwise t_0 < t_1 < .. < t_{K-1} <= t_K < .. < t_{2K-1} must hold: p_k >= 1, q_k >= 1.
    """
    if len(p) != len(m) or not m:
        return f"there are {len(p)} output queues p and {len(m)} input queues m; give one of each for every block"
    if min(*p, *m, 0) < 0:
        return "no length may be negative"
    if p[-1] != 0:
        return f"the last block sends no output, so its p must be 0, not {p[-1]}"
    lowest = 1 if any(p) else 0  # the lowest value of p and q
    for k in range(len(m) - 1):
        if p[k] < lowest:
            return f"p_{k} must be at least 1 where another p is not 0, so that no block waits inside a timestamp"
        q = m[k] - p[k] - m[k + 1]
        if q < lowest:
            rule = f"q_{k + 1} = m_{k} - p_{k} - m_{k + 1} must be at least {lowest}"
            return f"{rule}, but {m[k]} - {p[k]} - {m[k + 1]} = {q}"
    return ""


def nearest(p: tuple[int, ...], m: tuple[int, ...]) -> str:
    """The valid lengths with the smallest sum of changes, of either kind: p = 0 everywhere, or all p_k, q_k >= 1.

    Of equally near ones it takes those where no block waits, and then the longest m.

    >>> nearest((1, 1, 0), (3, 2, 0)), nearest((0, 0, 0), (2, 3, 0))
    ('1,1,0;4,2,0', '0,0,0;3,3,0')
    """
    m = m or (0,)
    joints = len(m) - 1
    given = (*p[:joints], *(1,) * (joints - len(p)))
    wishes = [max(length, 1) for length in given]
    # m_k - m_{k+1} = p_k + q_{k+1} >= 2, and each unit by which it is less than p_k + 1 costs one of p_k
    apart = nearest_falling(m, [2] * joints, [length + 1 for length in wishes])
    outputs = [min(length, apart[k] - apart[k + 1] - 1) for k, length in enumerate(wishes)]
    level = nearest_falling(m, [0] * joints, [0] * joints)
    choices = [((*outputs, 0), apart), ((0,) * len(m), level)]
    return format_queues(*min(choices, key=lambda pm: distance((*given, 0), pm[0]) + distance(m, pm[1])))


def distance(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def nearest_falling(m: tuple[int, ...], least: list[int], wishes: list[int]) -> tuple[int, ...]:
    """The x >= 0 with gaps x_k - x_{k+1} >= least_k that minimises sum |x_k - m_k| + sum (wishes_k - gap_k)_+.

    Isotonic regression by dynamic programming: f_k(x), the smallest sum over blocks k, k+1, .. with x_k = x, is convex
    and piecewise linear. `corners` holds where its slope rises; the last corner is its smallest minimiser. From block
    k + 1 only falling slopes remain, since a larger gap is free: the part of slope -1 moves by wishes_k, steeper ones
    by least_k. Then |x - m_k| adds its corner twice, and everything right of the minimum is dropped.
    """
    corners: list[int] = []
    lowest, floors, slopes = 0, [], []
    for k in range(len(m) - 1, -1, -1):
        if k < len(m) - 1:
            lowest += least[k]
            corners = [*(c + least[k] for c in corners[:-1]), corners[-1] + wishes[k]]
        *corners, last = sorted([*corners, m[k], m[k]])  # f_k is smallest between corners[-1] and last
        floors.append(lowest)
        slopes.append((corners[-2] if len(corners) > 1 else lowest, corners[-1], last))
    x = [max(slopes[-1][2], floors[-1])]
    for k in range(1, len(m)):
        steeper, smallest, _ = slopes[-1 - k]
        x.append(max(min(max(x[-1] - wishes[k - 1], steeper), smallest, x[-1] - least[k - 1]), floors[-1 - k]))
    return tuple(x)
