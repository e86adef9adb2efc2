"""MOON: a contrastive loss that keeps local features near the server model's and away from the last local model's.

Li, He, Song: Model-Contrastive Federated Learning. CVPR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.base import Average, Down, GradientOracle, LocalData, State, Up, Worker
from undrift.algorithms.checks import above, at_least
from undrift.oracle.oracle import View


@dataclass(frozen=True)
class Contrastive(Worker):
    """loss + mu * cross-entropy of [sim(z, z_glob), sim(z, z_prev)] / tau with the first as the answer.

    z are the features in front of the classifier. z_glob and z_prev come from the server's and the client's last model in
    evaluation mode. A client's first previous model is the server's, which gives the term no gradient.
    """

    mu: float = 1.0
    temperature: float = 0.5  # tau

    class Client(NamedTuple):
        x: Tensor  # the last local model
        buffers: Tensor  # its BatchNorm statistics

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        buffers: Tensor  # the client's current statistics
        start: Tensor  # the server's statistics at the start of the round

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(down.x, buffers)

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        return super().local_start(down, client, local)._replace(buffers=local.buffers, start=local.buffers)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        g = oracle.grad(work.x, self.objective, down.x, work.start, client.x, client.buffers)
        return self.move(work, g, oracle)._replace(buffers=oracle.buffers)

    def objective(
        self,
        model: View,
        x: Tensor,
        inputs: Tensor,
        targets: Tensor,
        x_t: Tensor,
        start: Tensor,
        prev: Tensor,
        previous: Tensor,
    ) -> Tensor:
        *_, h, outputs = model.trace(x, inputs)
        z, z_glob = h.flatten(1), model.still_features(x_t, start, inputs)
        z_prev = model.still_features(prev, previous, inputs)
        near, far = (
            F.cosine_similarity(z, other.detach(), dim=-1, eps=1e-8) / self.temperature for other in (z_glob, z_prev)
        )
        return model.loss(outputs, targets) + self.mu * (torch.logaddexp(near, far) - near)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        return Up(down.x - work.x), self.Client(work.x, work.buffers)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "mu")
        above(self, 0.0, "temperature")


@dataclass(frozen=True)
class MOON(Contrastive, Average):
    """Contrastive local losses and a weighted mean."""
