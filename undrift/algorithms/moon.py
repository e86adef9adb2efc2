"""MOON: a contrastive loss that keeps local features near the server model's and away from the last local model's.

Li, He, Song: Model-Contrastive Federated Learning. CVPR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.base import Average, Up, Worker, at_least
from undrift.core.errors import BadSetting
from undrift.oracle.oracle import GradientOracle, LocalData, View


@dataclass(frozen=True)
class Contrastive(Worker):
    """loss + mu * cross-entropy of [sim(z, z_glob), sim(z, z_prev)] / tau with the first as the answer.

    z are the features in front of the classifier. z_glob and z_prev come from the server's and the client's last model in
    evaluation mode. A client's first previous model is the server's, which gives the term no gradient.
    """

    mu: float = 1.0
    temperature: float = 0.5  # tau

    class Client(NamedTuple):
        x: Tensor  # the last local model, and its BatchNorm statistics
        buffers: Tensor

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: Any
        buffers: Tensor  # the client's own statistics now
        start: Tensor  # the server's at the start of the round

    def client_init(self, down: Any, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(down.x, buffers)

    def local_start(self, down: Any, client: Client) -> Work:
        none = torch.zeros_like(client.buffers)
        return self.Work(down.x, torch.zeros_like(down.x[..., :1]), self.rest(down.x), none, none)

    def prepare(self, down: Any, client: Client, work: Work, local: LocalData) -> Work:
        return work._replace(buffers=local.buffers, start=local.buffers)

    def local_step(self, down: Any, client: Client, work: Work, oracle: GradientOracle) -> Any:
        g = oracle.grad(work.x, self.objective, down.x, work.start, client.x, client.buffers)
        return self.move(work, g, oracle)

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

    def local_end(self, down: Any, client: Client, work: Work) -> tuple[Up, Client]:
        return Up(down.x - work.x), self.Client(work.x, work.buffers)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "mu")
        if not self.temperature > 0:
            raise BadSetting(f"temperature must be greater than 0, not {self.temperature}")


@dataclass(frozen=True)
class MOON(Contrastive, Average):
    """Contrastive local losses and a weighted mean."""

    paper: ClassVar[str] = """@inproceedings{li2021moon,
  title     = {Model-Contrastive Federated Learning},
  author    = {Li, Qinbin and He, Bingsheng and Song, Dawn},
  booktitle = {CVPR},
  year      = {2021}
}"""
