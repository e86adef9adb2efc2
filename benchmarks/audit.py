"""Which frameworks' methods compute what undrift's do: the same start, all clients in every round, the same batches, float64.

    python benchmarks/audit.py                       # frameworks that can be imported here
    python benchmarks/audit.py --json results/audit.json

Four clients of unequal sizes fit a softmax regression; a batch is all of a client's samples, and all clients come, so that no
random number can differ. Each framework runs its own code for ROUNDS rounds. A method is "equal" where the model is the
same to 1e-6 after every round; otherwise the first round that differs and by how much is printed, and it is tried whether a
variant that is written here, in the paper's letters with one change, explains it to 1e-6. Nothing is called wrong by this file
that is not wrong against the paper's own algorithm; see benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.data.batches import Plan
from undrift.data.federation import federate
from undrift.data.from_user import dataset_from
from undrift.jobs.registry import algorithm_class
from undrift.oracle.net import Net
from undrift.simulate.simulation import Settings, Simulation

SIZES, FEATURES, CLASSES = (6, 20, 9, 13), 5, 3
ROUNDS, STEPS, LR, EQUAL = 4, 3, 0.1, 1e-6


def problem() -> list[tuple[Tensor, Tensor]]:
    """Each client's samples; clients differ in their classes."""
    random = np.random.default_rng(0)
    clients = []
    for i, n in enumerate(SIZES):
        y = np.where(random.random(n) < 0.7, i % CLASSES, random.integers(0, CLASSES, n))
        x = random.normal(size=(n, FEATURES)) + 2 * np.eye(FEATURES)[y] + random.normal(size=FEATURES)
        clients.append((torch.from_numpy(x), torch.from_numpy(y)))
    return clients


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES).double()


def vector(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()


def put(module: nn.Module, x: Tensor) -> nn.Module:
    torch.nn.utils.vector_to_parameters(x.clone(), module.parameters())
    return module


def ours(name: str, fields: dict[str, Any], weights: str = "size", lr: float = LR) -> Tensor:
    """undrift's model after each round."""
    clients = [(x.numpy(), y.numpy()) for x, y in problem()]
    data = federate(dataset_from((clients, clients[0])), "sites", len(SIZES), 0, torch.device("cpu"))
    settings = Settings(len(SIZES), Plan(max(SIZES), STEPS, 0), 0, weights, 10**6, "stacked")
    alg = algorithm_class(name)(**({"lr": lr} | fields))
    run = Simulation(alg, Net(network(), dtype=torch.float64), data, settings, {}, torch.device("cpu"))
    points = []
    for _ in range(ROUNDS):
        run.round()
        points.append(run.net.sent(run.state.x, "model"))
    return torch.stack(points)


def local(x: Tensor, client: int, lr: float = LR, mu: float = 0.0) -> Tensor:
    """x after STEPS plain steps of a client."""
    module, (inputs, targets) = put(network(), x), problem()[client]
    for _ in range(STEPS):
        loss = F.cross_entropy(module(inputs), targets)
        grads = torch.autograd.grad(loss, list(module.parameters()))
        g = torch.cat([g.reshape(-1) for g in grads]) + mu * (vector(module) - x)
        put(module, vector(module) - lr * g)
    return vector(module)


# Servers in the papers' letters, from the clients' models, to explain what differs.
Server = Callable[[int, Tensor, Tensor, dict[str, Tensor]], Tensor]  # t from 1, x, d (positive = descent), state


def with_server(server: Server, weights: str = "size") -> Tensor:
    """The path of plain local steps under a server."""
    share = torch.tensor(SIZES if weights == "size" else [1] * len(SIZES), dtype=torch.float64)
    x, state, points = vector(network()), dict[str, Tensor](), []
    for t in range(1, ROUNDS + 1):
        ends = torch.stack([local(x, i) for i in range(len(SIZES))])
        x = server(t, x, x - (share / share.sum()) @ ends, state)
        points.append(x)
    return torch.stack(points)


def adam(shift: int | None, lr: float = 0.1, b1: float = 0.9, b2: float = 0.99, tau: float = 1e-3) -> Server:
    """FedAdam with Kingma and Ba's correction, whose exponent is t + shift; None: without it."""

    def step(t: int, x: Tensor, d: Tensor, s: dict[str, Tensor]) -> Tensor:
        s["m"] = b1 * s.get("m", torch.zeros_like(x)) + (1 - b1) * d
        s["v"] = b2 * s.get("v", torch.zeros_like(x)) + (1 - b2) * d * d
        rate = lr if shift is None else lr * (1 - b2 ** (t + shift)) ** 0.5 / (1 - b1 ** (t + shift))
        return x - rate * s["m"] / (s["v"].sqrt() + tau)

    return step


class Row(NamedTuple):
    """A method of a framework beside ours."""

    method: str  # as the framework calls it
    theirs: Callable[[], Tensor]
    name: str  # ours
    fields: dict[str, Any]
    weights: str = "size"
    variants: dict[str, Callable[[], Tensor]] = {}  # what may explain a difference


# Flower: strategies ask clients and are answered by messages, without a network between them.
class Nodes:
    """What a strategy asks of Flower's grid."""

    def get_node_ids(self) -> list[int]:
        return [i + 1 for i in range(len(SIZES))]


def flower(kind: str, **settings: Any) -> Callable[[], Tensor]:
    def run() -> Tensor:
        import flwr.serverapp.strategy as strategies
        from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        logging.getLogger("flwr").setLevel(logging.ERROR)
        strategy, points, x = getattr(strategies, kind)(**settings), [], vector(network())
        for t in range(1, ROUNDS + 1):
            asked = strategy.configure_train(t, ArrayRecord({"x": Array(x.numpy())}), ConfigRecord(), Nodes())
            replies = []
            for mail in asked:
                i = mail.metadata.dst_node_id - 1
                mail.metadata.__dict__["_message_id"] = str(i)
                sent = torch.from_numpy(mail.content["arrays"]["x"].numpy().copy())
                content = {
                    "arrays": ArrayRecord({"x": Array(local(sent, i).numpy())}),
                    "metrics": MetricRecord({"num-examples": SIZES[i]}),
                }
                replies.append(Message(RecordDict(content), reply_to=mail))
            assert len(replies) == len(SIZES)
            arrays, _ = strategy.aggregate_train(t, replies)
            x = torch.from_numpy(arrays["x"].numpy().copy())
            points.append(x)
        return torch.stack(points)

    return run


def flower_rows() -> Iterator[Row]:
    opt = {"eta": 0.1, "eta_l": LR, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}
    field = {"server_lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    yield Row("FedAvg", flower("FedAvg"), "fedavg", {})
    momentum = {"server_learning_rate": 0.7, "server_momentum": 0.6}
    yield Row("FedAvgM", flower("FedAvgM", **momentum), "fedavgm", {"server_lr": 0.7, "beta1": 0.6})
    yield Row(
        "FedAdam", flower("FedAdam", **opt), "fedadam", field,
        variants={
            "Kingma and Ba's bias correction": lambda: ours("fedadam", field | {"bias_correction": True}),
            "bias correction with the exponent t + 1 instead of t": lambda: with_server(adam(1)),
        },
    )  # fmt: skip
    yield Row("FedYogi", flower("FedYogi", **opt), "fedyogi", field)
    adagrad = {n: v for n, v in opt.items() if not n.startswith("beta")}
    yield Row(
        "FedAdagrad", flower("FedAdagrad", **adagrad), "fedadagrad", field | {"beta1": 0.0},
        variants={"with beta1 = 0.9": lambda: ours("fedadagrad", field)},
    )  # fmt: skip


FRAMEWORKS: dict[str, tuple[str, str, Callable[[], Iterator[Row]]]] = {
    "Flower": ("flwr", "flwr", flower_rows),
}


class Finding(NamedTuple):
    """What came out for one method."""

    framework: str
    version: str
    method: str
    verdict: str
    differs_in_round: int  # 0: nowhere
    size: float  # of the first difference, relative to how far the model has moved


def compare(theirs: Tensor, mine: Tensor) -> tuple[int, float]:
    """The first round in which the models differ, and by how much of what they moved; 0 where they do not."""
    start = vector(network())
    for t, (a, b) in enumerate(zip(theirs.double(), mine, strict=True), 1):
        gap = float((a - b).norm() / (b - start).norm().clamp(min=1e-300))
        if not gap <= EQUAL:
            return t, gap
    return 0, 0.0


def judge(framework: str, version: str, row: Row) -> Finding:
    theirs = row.theirs()
    at, size = compare(theirs, ours(row.name, row.fields, row.weights))
    if not at:
        return Finding(framework, version, row.method, "equal to 1e-6", 0, 0.0)
    for text, path in row.variants.items():
        if not compare(theirs, path())[0]:
            return Finding(framework, version, row.method, f"another variant: {text}", at, size)
    return Finding(framework, version, row.method, "differs, not explained", at, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the findings to this file")
    asked = parser.parse_args()
    found = []
    for framework, (module, package, rows) in FRAMEWORKS.items():
        if importlib.util.find_spec(module) is None:
            print(f"{framework} is not installed here")
            continue
        version = importlib.metadata.version(package)
        for row in rows():
            with contextlib.redirect_stdout(io.StringIO()):
                finding = judge(framework, version, row)
            found.append(finding)
            where = f"; first in round {finding.differs_in_round}, by {finding.size:.2g}" if finding.size else ""
            print(f"{framework} {version}  {finding.method:12} {finding.verdict}{where}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps([f._asdict() for f in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
