"""Asks clients that began with older models of the server, which are kept as long as somebody trains from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.core.trees import State, map_leaves, named_leaves
from undrift.data.batches import Table
from undrift.round.clients import Answers, new_clients
from undrift.round.who import Who
from undrift.simulate.client_store import DiskTable
from undrift.simulate.clients import ClientTable
from undrift.simulate.here import Apart, Execution, add_client_dimension
from undrift.simulate.work import LocalWork

Rows = NDArray[np.int64]


class Held(NamedTuple):
    """What a client began with."""

    x: Tensor  # the server's model
    buffers: Tensor
    down: State  # the server's message


def tensors_of(held: Mapping[int, Held]) -> dict[str, Tensor]:
    """What a checkpoint holds: a model that is the message itself once."""
    leaves = (leaf for t, one in sorted(held.items()) for leaf in named_leaves(f"held.{t}", one))
    return {
        name: leaf
        for name, leaf in leaves
        if not (name.endswith(".down.x") and leaf is held[int(name.split(".")[1])].x)
    }


def restore_held(tensors: Mapping[str, Tensor], form: Held) -> dict[int, Held]:
    """What clients at work began with, from a checkpoint."""
    held: dict[int, Held] = {}
    for t in sorted({int(name.split(".")[1]) for name in tensors if name.startswith("held.")}):
        x = tensors[f"held.{t}.x"].to(form.x.device).clone()
        stored = [
            tensors[name].to(leaf.device).clone() if name in tensors and name != f"held.{t}.x" else x
            for name, leaf in named_leaves(f"held.{t}", form)
        ]
        each = iter(stored)
        held[t] = map_leaves(lambda _, each=each: next(each), form)  # type: ignore[misc]
    return held


class AskStale:
    """Asks the clients of one server step: all that have the same rate are run together, whatever they began with."""

    def __init__(
        self, execution: Execution, work: LocalWork, clients: ClientTable | DiskTable, versions: Rows, held: dict[int, Held],
        rate: Callable[[int], float], at: Callable[[int], Algorithm],
    ) -> None:  # fmt: skip
        """`rate` and `at` give the factor of the local rate in a round and the algorithm with it."""
        self.execution, self.work, self.clients, self.held = execution, work, clients, held
        self.versions, self.rate, self.at = versions, rate, at

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Tensor:
        raise NotImplementedError  # `check_asynchronous` refuses methods that measure

    def train(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Answers:
        rates = np.array([self.rate(version) for version in self.versions.tolist()])
        groups = [np.flatnonzero(rates == rate) for rate in dict.fromkeys(rates.tolist())]
        answers = [self.together(rows, who.ids) for rows in groups]
        if len(groups) == 1:
            return answers[0]
        back = torch.from_numpy(np.argsort(np.concatenate(groups), kind="stable")).to(who.ids.device)
        return map_leaves(lambda *parts: torch.cat(parts)[back], *answers)

    def together(self, rows: Rows, ids: Tensor) -> Answers:
        """The answers of some of the clients, whose rates are the same."""
        versions = self.versions[rows].tolist()
        alg, mine = self.at(versions[0]), ids[torch.from_numpy(rows).to(ids.device)]
        began = [self.held[version] for version in versions]
        down, buffers = began[0].down, began[0].buffers
        message = add_client_dimension(down)
        if len(set(versions)) > 1:
            message = map_leaves(lambda *each: torch.stack(each, -2), *(held.down for held in began))
            buffers = torch.stack([held.buffers for held in began])
            down = Apart(message)
        fresh = new_clients(alg, message, mine, buffers if buffers.dim() == 2 else buffers.unsqueeze(-2))
        client = self.clients.read(mine, fresh)
        work = self.work
        if len(rows) == len(work.ids):
            return self.execution.train(alg, down, client, buffers, work)
        table = Table(
            work.table.index[torch.from_numpy(rows).to(ids.device)], work.table.count[rows], work.table.steps[rows]
        )
        table = Table(table.index[:, : table.steps.max()], table.count[:, : table.steps.max()], table.steps)
        assert work.rounds is not None
        some = replace(
            work, ids=mine, table=table, rounds=work.rounds[torch.from_numpy(rows).to(ids.device)], gradients=0
        )
        answers = self.execution.train(alg, down, client, buffers, some)
        work.gradients += some.gradients
        return answers
