"""Flower's strategies, which ask clients and are answered by messages, without a network between them."""

from __future__ import annotations

import copy
import logging
from typing import Any

import flwr.serverapp.strategy as strategies
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from audited.problem import (
    LR,
    MODEL,
    SIZES,
    Batch,
    Course,
    Path,
    Row,
    Rows,
    Run,
    Server,
    State,
    course,
    descend,
    network,
    ours,
    played,
    put,
    vector,
)

PACKAGE = "flwr"


class Nodes:
    """What a strategy asks of Flower's grid: who is there."""

    def __init__(self, cohort: list[int]) -> None:
        self.cohort = cohort

    def get_node_ids(self) -> list[int]:
        return [i + 1 for i in self.cohort]


def as_documented(x: Tensor, batches: list[Batch], mu: float) -> Tensor:
    """A client as FedProx's docstring asks for it."""
    net = put(network(), x)
    global_params = list(copy.deepcopy(net).parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for inputs, labels in batches:
        optimizer.zero_grad()
        proximal_term = 0.0
        for local_weights, global_weights in zip(net.parameters(), global_params, strict=True):
            proximal_term += (local_weights - global_weights).norm(2)
        loss = F.cross_entropy(net(inputs), labels) + (mu / 2) * proximal_term
        loss.backward()
        optimizer.step()
    return vector(net)


def squared(x: Tensor, batches: list[Batch], mu: float) -> Tensor:
    """A client as FedProx's formula asks for it."""
    return descend(x, batches, lambda y: mu * (y - x))


def theirs(kind: str, course: Course, client: Any = None, **settings: Any) -> Run:
    def run() -> Path:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        logging.getLogger("flwr").setLevel(logging.ERROR)
        strategy, models, x = getattr(strategies, kind)(**settings), [], vector(network())
        for t, round in enumerate(course.rounds):
            arrays = ArrayRecord({"x": Array(x.numpy())})
            asked, replies = strategy.configure_train(t + 1, arrays, ConfigRecord(), Nodes(sorted(round))), []
            for mail in asked:
                i = mail.metadata.dst_node_id - 1
                mail.metadata.__dict__["_message_id"] = str(i)
                sent = torch.from_numpy(mail.content["arrays"]["x"].numpy().copy())
                batches = course.steps(t, i)
                if client is None:
                    end = descend(sent, batches)
                else:
                    end = client(sent, batches, mail.content["config"]["proximal-mu"])
                content = {
                    "arrays": ArrayRecord({"x": Array(end.numpy())}),
                    "metrics": MetricRecord({"num-examples": SIZES[i]}),
                }
                replies.append(Message(RecordDict(content), reply_to=mail))
            assert len(replies) == len(round)
            arrays, _ = strategy.aggregate_train(t + 1, replies)
            x = torch.from_numpy(arrays["x"].numpy().copy())
            models.append(x)
        return {MODEL: torch.stack(models)}

    return run


def by_size(models: list[Tensor], cohort: list[int]) -> Tensor:
    share = torch.tensor([SIZES[i] for i in cohort], dtype=torch.float64)
    return (share / share.sum()) @ torch.stack(models)


def adam(shift: int, lr: float = 0.1, b1: float = 0.9, b2: float = 0.99, tau: float = 1e-3) -> Server:
    """FedAdam with Kingma and Ba's correction, whose exponent is t + shift, t from 1."""

    def step(memory: State, t: int, x: Tensor, models: list[Tensor], cohort: list[int]) -> Tensor:
        d, n = x - by_size(models, cohort), t + 1 + shift
        memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * d
        memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * d * d
        rate = lr * (1 - b2**n) ** 0.5 / (1 - b1**n)
        return x - rate * memory["m"] / (memory["v"].sqrt() + tau)

    return step


def unsquared(memory: State, x: Tensor, i: int, batches: list[Batch]) -> Tensor:
    """The gradient of mu/2 sum_j |y_j - x_j|, j the tensors."""
    parts = [p.numel() for p in network().parameters()]

    def term(y: Tensor) -> Tensor:
        return torch.cat([0.5 * (part / part.norm().clamp(min=1e-300)) for part in (y - x).split(parts)])

    return descend(x, batches, term)


def server_by_size(memory: State, t: int, x: Tensor, models: list[Tensor], cohort: list[int]) -> Tensor:
    return by_size(models, cohort)


def rows() -> Rows:
    some = course()
    opt = {"eta": 0.1, "eta_l": LR, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}
    field = {"server_lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}

    def us(name: str, **fields: Any) -> Run:
        return lambda: ours(name, fields, some, "size")

    yield Row("FedAvg", theirs("FedAvg", some), us("fedavg"))
    yield Row(
        "FedProx, clients by its formula", theirs("FedProx", some, squared, proximal_mu=1.0), us("fedprox", mu=1.0),
        note="Flower sends mu; the clients' part is the user's",
    )  # fmt: skip
    yield Row(
        "FedProx, clients by its example", theirs("FedProx", some, as_documented, proximal_mu=1.0), us("fedprox", mu=1.0),
        faults={"the example adds mu/2 times the norm of w - w_t, tensor by tensor; the formula above it and the paper square it":
                lambda: played(some, unsquared, server_by_size)},
        line="flwr/serverapp/strategy/fedprox.py, docstring: proximal_term += (...).norm(2)",
    )  # fmt: skip
    momentum = {"server_learning_rate": 0.7, "server_momentum": 0.6}
    yield Row("FedAvgM", theirs("FedAvgM", some, **momentum), us("fedavgm", server_lr=0.7, beta1=0.6))
    yield Row(
        "FedAdam", theirs("FedAdam", some, **opt), us("fedadam", **field),
        variants={
            "Kingma and Ba's bias correction": us("fedadam", **field, bias_correction=True),
            "Kingma and Ba's bias correction, whose exponent is one round ahead: t + 1, t from 1. The paper has none":
                lambda: played(some, server=adam(1)),
        },
        line="flwr/serverapp/strategy/fedadam.py: np.power(self.beta_2, server_round + 1.0)",
    )  # fmt: skip
    yield Row("FedYogi", theirs("FedYogi", some, **opt), us("fedyogi", **field))
    adagrad = {n: v for n, v in opt.items() if not n.startswith("beta")}
    yield Row("FedAdagrad", theirs("FedAdagrad", some, **adagrad), us("fedadagrad", **field | {"beta1": 0.0}))
    everybody = course(everybody=True)
    for name, settings, rule in (
        ("FedMedian", {}, "median"),
        ("FedTrimmedAvg", {"beta": 0.25}, "trimmed:0.25"),
        ("Krum", {}, "krum:0"),
        ("MultiKrum", {"num_nodes_to_select": 2}, "krum:0:2"),
    ):
        us_robust: Run = lambda rule=rule: ours("fedavg", {}, everybody, "size", aggregate=rule)  # type: ignore[misc]  # noqa: E731
        yield Row(name, theirs(name, everybody, **settings), us_robust)
