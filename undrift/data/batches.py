"""The samples that a client trains on in a round, as an index table.

Every pass of a client over its data is a permutation keyed by (seed, client, pass), and by the round unless passes go on.
Only each client's position is stored. The table is the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.core.streams import Purpose, fold, stream, to_signed

Counts = NDArray[np.int64]
MOST_INDICES = 1 << 31  # in the table of a round, 16 GiB


@dataclass(frozen=True)
class Table:
    """The batches of a cohort in a round. In each batch, real samples come before padding."""

    index: Tensor  # [S, K, B] rows of the training set; 0 for padding
    count: Counts  # [S, K] real samples of each batch, 0 after the client's last step
    steps: Counts  # [S] local steps K_i

    def shorten(self, steps: Counts) -> Table:
        """Keep only the first `steps` [S] batches of each client."""
        live = np.arange(self.count.shape[1]) < steps[:, None]
        return Table(self.index, np.where(live, self.count, 0)[:, : steps.max()], steps)


@dataclass(frozen=True)
class Plan:
    """How much a client trains in a round: `steps` batches, or `epochs` passes over its data."""

    batch: int
    steps: int = 0
    epochs: float = 0.0
    persistent: bool = True  # with steps: continue the last round's pass instead of shuffling anew

    def per_pass(self, sizes: Counts) -> Counts:
        """Batches in one pass. Persistent passes drop a last batch of one sample, as GradMA's loaders do."""
        whole, rest = sizes // self.batch, sizes % self.batch
        least = 2 if self.continues else 1
        batches: Counts = whole + ((rest >= least) | (whole == 0) & (rest > 0))
        return batches

    @property
    def continues(self) -> bool:
        return self.persistent and self.steps > 0

    def check_size(self, sizes: Counts, cohort: int) -> None:
        """Raise BadSetting where the index table of a round is too large to be made."""
        longest = int(sizes.max(initial=0))
        # A float: it cannot overflow, and numpy's integers can.
        steps = float(self.steps or (self.epochs + 1.0) * float(self.per_pass(sizes).max(initial=0)))
        if steps * cohort * min(self.batch, longest) > MOST_INDICES:
            raise BadSetting(
                f"a round of {cohort} clients with {steps:.3g} local steps of {min(self.batch, longest)} samples has more than "
                f"{MOST_INDICES} indices; use fewer steps or epochs"
            )

    def shuffle_stream(self, seed: int, round: int) -> int:
        """The random stream of a round's shuffles; passes that go on use one stream in all rounds."""
        return to_signed(stream(seed, Purpose.BATCHES, 0 if self.continues else round + 1))

    def shuffle_streams(self, seed: int, rounds: Counts) -> Counts:
        """`shuffle_stream` of many rounds."""
        numbers = np.zeros_like(rounds) if self.continues else rounds + 1
        return fold(stream(seed, Purpose.BATCHES), torch.from_numpy(numbers)).numpy()

    def steps_of(self, sizes: Counts) -> Counts:
        """K_i, at least 1. A fraction f of an epoch is the first round(f n_i / B) batches of a shuffle."""
        if self.steps:
            return np.full_like(sizes, self.steps)
        whole = int(self.epochs)
        part = np.rint((self.epochs - whole) * sizes / self.batch).astype(np.int64)
        steps: Counts = np.maximum(whole * self.per_pass(sizes) + part, 1)
        return steps


def table(
    plan: Plan, streams: Counts | int, ids: Counts, members: Tensor, start: Counts, sizes: Counts, position: Counts
) -> Table:
    """The batches of clients `ids` [S]; `streams`, one or [S], come from `Plan.shuffle_stream`.

    A client holds members[start : start + size]. `position` counts the batches of its earlier rounds. All are [S].
    """
    steps, per_pass = plan.steps_of(sizes), plan.per_pass(sizes)
    first = position if plan.continues else np.zeros_like(position)
    step = first[:, None] + np.arange(steps.max())  # [S, K] batch number since the client's first round
    live = np.arange(steps.max()) < steps[:, None]
    visit, slot = step // per_pass[:, None], step % per_pass[:, None]  # the pass, and the batch within it
    count = np.where(live, np.minimum(plan.batch, sizes[:, None] - slot * plan.batch), 0)

    # One sort of (shuffle number, random word) makes all shuffles, one for each (client, pass) of the round.
    last = np.where(live, visit, -1).max(1)
    shuffles = last - visit[:, 0] + 1  # [S]
    before = np.concatenate([[0], np.cumsum(shuffles)])  # shuffles of earlier clients
    owner = np.repeat(np.arange(len(ids)), shuffles)
    passes = np.arange(len(owner)) - before[owner] + visit[owner, 0]
    begin = np.concatenate([[0], np.cumsum(sizes[owner])])  # start of each shuffle in the flat list
    device = members.device
    lengths = torch.from_numpy(sizes[owner]).to(device)
    shuffle = torch.arange(len(owner), device=device).repeat_interleave(lengths, output_size=int(begin[-1]))
    place = torch.arange(int(begin[-1]), device=device) - torch.from_numpy(begin).to(device)[shuffle]
    stream_of = torch.from_numpy(np.broadcast_to(np.int64(streams), ids.shape)[owner]).to(device)
    keys = fold(fold(stream_of, torch.from_numpy(ids[owner]).to(device)), torch.from_numpy(passes).to(device))
    word = (fold(keys[shuffle], place) >> 24) & ((1 << 40) - 1)
    shuffled = place[torch.sort((shuffle << 40) | word, stable=True).indices]

    width = int(count.max())
    at = begin[before[:-1, None] + np.where(live, visit - visit[:, :1], 0)] + np.where(live, slot * plan.batch, 0)
    flat = torch.from_numpy(at).to(device).unsqueeze(-1) + torch.arange(width, device=device)
    real = torch.arange(width, device=device) < torch.from_numpy(count).to(device).unsqueeze(-1)
    inside = shuffled[flat.clamp(max=len(shuffled) - 1)]
    index = members[(torch.from_numpy(start).to(device)[:, None, None] + inside).clamp(max=len(members) - 1)]
    return Table(torch.where(real, index, 0), count, steps)
