"""How the rounds of a simulation are run, apart from what is trained on what."""

from __future__ import annotations

from dataclasses import dataclass

from undrift.core.rates import RateSchedule
from undrift.data.batches import Plan
from undrift.round.aggregate import MEAN
from undrift.round.clock import Clock
from undrift.round.private import Privacy
from undrift.round.timeline import Recorded


@dataclass(frozen=True)
class Settings:
    """The settings of a simulation; `jobs/run.py` makes them from those that a user gives."""

    cohort: int
    plan: Plan
    seed: int = 0
    weights: str = "uniform"  # or size: n_i / sum of the cohort's n_i
    eval_every: int = 1
    execution: str = "auto"  # or stacked, or pool
    chunk: int = 0  # clients stacked at a time; 0: as many as fit in memory
    lr_decay: float = 1.0  # the local rate is multiplied by this after every round
    lr_drops: tuple[int, ...] = ()  # and by lr_drop after these rounds
    lr_drop: float = 0.1
    sampling: str = "fixed"  # or bernoulli: every client with probability cohort / clients
    dropout_rate: float = 0.0  # how often an invited client fails to answer
    slow: tuple[float, float] = (0.0, 1.0)  # how often a client makes only that share of its steps
    bandwidth: float = 0.0  # Mbit/s of each client's link, for simulated seconds; 0: infinite
    latency: float = 0.0  # seconds of each message
    replay: bool = True  # on a GPU, replay rounds as CUDA graphs
    compile: bool = False  # fuse the local step's kernels with torch.compile, where rounds are replayed
    client_eval_every: int = 0  # rounds between scores on the clients' own samples; 0: only in the last round
    compress: str = ""  # compress uploads, with error feedback: rbgs:R, randk:R, topk:R, fp16, int8 or int4
    warmup: float = 0.0  # rounds in which the local rate rises
    client_state: str = "auto"  # where it is kept: memory, disk, or auto
    privacy: Privacy | None = None  # the updates are clipped and their sum gets noise
    aggregate: str = MEAN  # or a rule of undrift/round/aggregate
    attack: str = ""  # what some clients send instead, see round/attack.py
    clock: Clock | Recorded | None = None  # how long clients take in virtual time; or the arrivals of a real federation
    over_select: int = 0  # clients invited beyond the cohort, with a clock: the first answers count
    concurrent: int = 0  # clients that are at work at a time in an asynchronous run; 0: rounds wait for their cohort

    def schedule(self, t: int) -> float:
        """What the local rate of round t (counted from 0) is multiplied by."""
        return RateSchedule(self.warmup, self.lr_decay, self.lr_drops, self.lr_drop).rate(1.0, t, t + 1.0)
