"""The slowdown of a pipeline whose devices are slow now and then: its schedule in virtual time.

The thesis slows each step of every device by some per cent with probability 1/3, and reports how much longer an epoch
takes (Table 2, K = 3). Here a step of block k at timestamp t is a forward and then a replay with its backward:

    the forward begins when the block is free, block k - 1 has forwarded the same batch (at timestamp t - p_{k-1}),
    and block k + 1 has begun timestamp t - 1, which makes room in the output queue;
    the backward begins after that, when block k + 1 has backwarded the same batch (at timestamp t - q_{k+1}).

Sleeping processes on a shared machine are too noisy to tell 6 % from 8 %; in virtual time only the draws are noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from undrift.pipeline.schedule import Schedule

CHANCE = 1 / 3
SLOWDOWNS = (20, 50, 100, 150)  # per cent
THESIS = {  # Table 2: ResNet-164, CIFAR-10, K = 3
    "0,0,0;2,1,0": (8.977, 28.52, 97.06, 359.2),
    "1,1,0;4,2,0": (6.017, 16.14, 37.44, 70.99),
    "2,2,0;6,3,0": (7.465, 16.01, 36.57, 54.57),
    "3,3,0;10,5,0": (7.391, 18.15, 32.10, 53.42),
}
FORWARD, REPLAY, BACKWARD = 1.0, 1.0, 2.0  # time of blocks of equal size; the last one does not replay


def finishing_time(schedule: Schedule, factors: NDArray[np.float64]) -> float:
    """The time when the last step ends, if a step of block k at timestamp t takes factors[k, t] times its usual time.

    >>> finishing_time(Schedule.bp(3), np.ones((3, 10)))  # 10 batches in turn, 3 blocks with 4, 4 and 3 units
    110.0
    """
    blocks, length = factors.shape
    batches = length - schedule.m[0]
    p, q = schedule.p, schedule.q
    begun, forwarded, done = (np.zeros((blocks, length)) for _ in range(3))

    def at(times: NDArray[np.float64], k: int, t: int) -> float:
        return float(times[k, t]) if 0 <= k < blocks and t >= 0 else 0.0

    for t in range(length):
        work = [schedule.work(k, t, batches) for k in range(blocks)]
        for k in range(blocks):
            start = at(done, k, t - 1)
            if work[k].forward is not None:
                if k:
                    start = max(start, at(forwarded, k - 1, t - p[k - 1]))
                if k < blocks - 1 and p[k]:
                    start = max(start, at(begun, k + 1, t - 1))
            begun[k, t] = start
            forwarded[k, t] = start + (FORWARD * factors[k, t] if work[k].forward is not None else 0.0)
        for k in reversed(range(blocks)):
            done[k, t] = forwarded[k, t]
            if work[k].backward is not None:
                last = k + 1 == blocks
                ready = 0.0 if last else at(done, k + 1, t - q[k + 1])
                done[k, t] = max(forwarded[k, t], ready) + factors[k, t] * (BACKWARD if last else REPLAY + BACKWARD)
    return float(done.max())


def increase(schedule: Schedule, slowdown: float, batches: int = 2000, seed: int = 0, chance: float = CHANCE) -> float:
    """How many per cent longer a run takes when steps are slowed by `slowdown` per cent."""
    length = batches + schedule.m[0]
    draw = np.random.Generator(np.random.PCG64(seed))
    slow = draw.random((schedule.blocks, length)) < chance
    factors = np.where(slow, 1 + slowdown / 100, 1.0)
    return 100 * (finishing_time(schedule, factors) / finishing_time(schedule, np.ones_like(factors)) - 1)
