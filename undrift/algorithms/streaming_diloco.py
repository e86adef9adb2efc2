"""Streaming DiLoCo: DiLoCo whose model is exchanged in fragments, in turn, which arrive while the clients go on training.

Douillard, Donchev, Rush, Kale, Charles, Garrett, Teston, Lacey, McIlroy, Shen, Ramé, Szlam, Ranzato, Barham: Streaming DiLoCo
with overlapping communication: Towards a Distributed Free Lunch. 2025.

Differs: a fragment is a stretch of the model's vector, all of one length, and not every third layer; what is sent is not
quantised. A client that was not in the round before begins from the server's model; in the paper all are in every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, GradientOracle, LocalData, LocalSGD, State, Vec, Work
from undrift.algorithms.checks import at_least, below_one
from undrift.core.errors import BadSetting
from undrift.core.trees import nbytes
from undrift.core.vec import mean, positions


@dataclass(frozen=True)
class Fragments(LocalSGD):
    """Clients keep their own models. In round t fragment t mod P goes up; it comes back in the next round, and is mixed in."""

    lr: float = 0.002
    optimizer: str = "adamw"
    keep_moments: bool = True
    fragments: int = 4  # P
    delay: int = 1  # tau, local steps that are made while a fragment is on its way
    alpha: float = 0.5  # how much of its own a client keeps of a fragment that arrives
    beta: float = 0.9  # the outer Nesterov momentum of each fragment

    sends_updates: ClassVar[bool] = False  # but fragments of them
    whole_uploads: ClassVar[bool] = False

    class Companion(NamedTuple):
        m: Tensor
        turn: Tensor  # [..., 1] fragments exchanged so far

    class Down(NamedTuple):
        x: Vec
        turn: Tensor

    class Up(NamedTuple):
        d: Tensor  # [..., b] the fragment of x_t - x_i

    class Client(NamedTuple):
        x: Tensor  # x_i at the end of its last round
        turn: Tensor  # [..., 1] of the round after it

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(torch.zeros_like(x0), torch.zeros_like(x0[..., :1]))

    def bytes_down(self, down: Down, invited: int, returning: int, clients: int) -> int:
        once = nbytes(down.turn) + self.length(down.x) * down.x.element_size()  # the others get the whole model
        return returning * once + (invited - returning) * nbytes(down)

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(down.x, torch.full_like(down.turn, -1.0))  # it was in no round

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        work: Work = super().local_start(down, client, local)
        return work._replace(x=torch.where(client.turn == down.turn, client.x, down.x))

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        return super().local_step(down, client, self.arrive(down, client, work, work.k == self.delay), oracle)

    def arrive(self, down: Down, client: Client, work: Work, now: Tensor) -> Work:
        """Mix in the fragment of the round before: theta_m,p <- alpha theta_m,p + (1 - alpha) theta_p."""
        here = self.of_turn(down.turn - 1, work.x) & (client.turn == down.turn) & (down.turn > 0) & now
        return work._replace(x=torch.where(here, self.alpha * work.x + (1 - self.alpha) * down.x, work.x))

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        x = self.arrive(down, client, work, work.k <= self.delay).x  # at the latest when the round is over
        return self.Up(self.cut(down.x - x, down.turn)), self.Client(x, down.turn + 1)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, State]:
        here = self.of_turn(companion.turn, companion.m)
        d = self.spread(mean(up.d, cohort.weight), companion.m)
        m = torch.where(here, self.beta * companion.m + d, companion.m)
        step = torch.where(here, d + self.beta * m, torch.zeros_like(m))  # Nesterov's momentum of this fragment
        return step, self.Companion(m, companion.turn + 1)

    # Fragments: stretches of b entries of a vector [..., P].
    def length(self, x: Tensor) -> int:
        """b."""
        *_, entries = x.shape
        return entries // self.fragments + (entries % self.fragments > 0)

    def of_turn(self, turn: Tensor, x: Tensor) -> Tensor:
        """[..., P] whether an entry is in the fragment of this turn [..., 1]."""
        return positions(x, x.dim() - 1) // self.length(x) == turn % self.fragments

    def cut(self, x: Tensor, turn: Tensor) -> Tensor:
        """[..., b] the fragment of this turn [..., 1]; zeros after the vector's end."""
        *lead, entries = x.shape
        every = F.pad(x, (0, self.fragments * self.length(x) - entries))
        now = (turn % self.fragments).long().unsqueeze(len(lead))
        return (
            every.unflatten(len(lead), (self.fragments, self.length(x)))
            .take_along_dim(now, len(lead))
            .squeeze(len(lead))
        )

    def spread(self, d: Tensor, x: Tensor) -> Tensor:
        """[..., P] as long as x, in which every fragment is d."""
        return torch.cat([d] * self.fragments, d.dim() - 1)[..., : x.shape[x.dim() - 1]]

    # In a training loop of one's own.
    @property
    def turns(self) -> int:
        return self.fragments

    @property
    def late(self) -> int:
        return self.delay

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "alpha", "delay")
        below_one(self, "beta")
        if not 1 <= self.fragments < 1000 or self.fragments != int(self.fragments) or self.delay != int(self.delay):
            raise BadSetting(
                f"fragments and delay are whole numbers, of at least 1 and 0, not {self.fragments} and {self.delay}"
            )
        if self.alpha > 1:
            raise BadSetting(f"alpha is a share from 0 to 1 of a client's own model, not {self.alpha}")


@dataclass(frozen=True)
class StreamingDiLoCo(Fragments, Average):
    """x_p <- x_p - eta_g (d_p + beta m_p), fragment after fragment, with AdamW on the clients."""

    server_lr: float = 0.7
