"""What messages and states of an algorithm are like: shapes and dtypes, on PyTorch's meta device, where nothing has memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.core.trees import State, map_leaves
from undrift.oracle.net import Net
from undrift.oracle.oracle import NoData
from undrift.round.clients import Answers, begin, end, new_clients
from undrift.round.order import first_state, reply_to, send_down
from undrift.round.who import Task, Who


class Forms(NamedTuple):
    """The forms of what one client sends, gets and keeps in a round."""

    down: State
    buffers: Tensor
    client: State
    answers: Answers
    reply: State

    @classmethod
    def of(cls, alg: Algorithm, net: Net, clients: int) -> Forms:
        x, buffers = (torch.empty_like(v, device="meta") for v in net.start())
        state = first_state(alg, net, x, buffers, clients)
        ids = torch.zeros(1, dtype=torch.int64, device="meta")
        one = x.new_ones(1, 1)
        cohort = Task(net, clients).cohort(alg, Who(ids, ids, one, one, one))
        down = send_down(alg, x, state.companion, cohort)
        client = new_clients(alg, down, ids[0], buffers)
        at = begin(alg, down, client, buffers, torch.Size(), NoData(buffers, net.layout))
        answers = end(alg, down, at, torch.zeros_like(x[..., :1]))
        stacked = map_leaves(lambda v: v.unsqueeze(0), answers)
        reply = map_leaves(lambda v: v[0], reply_to(alg, state.companion, stacked, cohort))
        return cls(down, buffers, client, answers, reply)
