"""FedLab: its standalone pipeline with its handlers and trainers, which are handed our cohorts and samples."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from fedlab.core.standalone import StandalonePipeline
from torch import Tensor

from audited.problem import (
    CLIENTS,
    LR,
    MODEL,
    Batch,
    Course,
    Local,
    Path,
    Row,
    Rows,
    Run,
    Server,
    State,
    course,
    network,
    ours,
    plain,
    played,
    vector,
)

PACKAGE = "fedlab"


def theirs(module: str, name: str, course: Course, server: Any = None, client: Any = None) -> Run:
    def run() -> Path:
        code = importlib.import_module(f"fedlab.contrib.algorithm.{module}")
        start, models = network(), list[Tensor]()

        class Data:
            def get_dataloader(self, i: int, batch_size: int) -> list[Batch]:
                x, y = course.rounds[len(models)][i]
                return [*zip(x.split(batch_size), y.split(batch_size), strict=True)]

        handler = getattr(code, f"{name}ServerHandler")(start, len(course.rounds), len(course.rounds[0]) / CLIENTS)
        trainer = getattr(code, f"{name}SerialClientTrainer")(start, CLIENTS)
        trainer.setup_dataset(Data())
        trainer.setup_optim(**{"epochs": course.passes, "batch_size": course.batch, "lr": LR} | (client or {}))
        if server is not None:
            handler.setup_optim(**server)
        handler.sample_clients = lambda: sorted(course.rounds[len(models)])

        class Pipeline(StandalonePipeline):  # type: ignore[misc]
            def evaluate(self) -> None:
                models.append(vector(self.handler.model))

        Pipeline(handler, trainer).main()
        return {MODEL: torch.stack(models)}

    return run


def feddyn(alpha: float) -> tuple[Local, Server]:
    """FedDyn without its terms on the clients, whose h counts x_t once for the whole cohort."""

    def server(memory: State, t: int, x: Tensor, models: list[Tensor], cohort: list[int]) -> Tensor:
        memory["h"] = memory.get("h", 0.0) - alpha / CLIENTS * (sum(models) - x)
        return torch.stack(models).mean(0) - memory["h"] / alpha

    return plain, server


def scaled(course: Course) -> Server:
    """FedNova with the mean over the cohort multiplied by N / S."""

    def server(memory: State, t: int, x: Tensor, models: list[Tensor], cohort: list[int]) -> Tensor:
        tau = [float(len(course.steps(t, i))) for i in cohort]
        mean = torch.stack([(y - x) / n for n, y in zip(tau, models, strict=True)]).mean(0)
        return x + sum(tau) / len(tau) * CLIENTS / len(cohort) * mean

    return server


def rows() -> Rows:
    some, everybody = course(), course(everybody=True)

    def us(name: str, on: Course = some, **fields: Any) -> Run:
        return lambda: ours(name, fields, on)

    yield Row("FedAvg", _fedavg(some), us("fedavg"), note="the mean does not weigh by size")
    yield Row("FedProx", theirs("fedprox", "FedProx", some, client={"mu": 1.0}), us("fedprox", mu=1.0))
    yield Row("SCAFFOLD", theirs("scaffold", "Scaffold", some, {"lr": 1.0}), us("scaffold"))
    yield Row("SCAFFOLD, lr 0.5", theirs("scaffold", "Scaffold", some, {"lr": 0.5}), us("scaffold", server_lr=0.5))
    yield Row(
        "FedDyn", theirs("feddyn", "FedDyn", some, {"alpha": 0.5}, {"alpha": 0.5}), us("feddyn", alpha=0.5),
        faults={"the clients' terms have no gradient, and the server's h subtracts x_t once, not once for each client":
                lambda: played(some, *feddyn(0.5))},
        line="fedlab/contrib/algorithm/feddyn.py: l2 and l3 of self.model_parameters, which is a copy; sum(parameters_list) - x",
    )  # fmt: skip
    yield Row("FedNova, all clients", theirs("fednova", "FedNova", everybody, {}), us("fednova", everybody))
    yield Row(
        "FedNova, some clients", theirs("fednova", "FedNova", some, {}), us("fednova"),
        faults={"the mean over the cohort is multiplied by N / S once more, with the default option":
                lambda: played(some, server=scaled(some))},
        line="fedlab/contrib/algorithm/fednova.py: option weighted_scale, delta = sum(...) * N / K with p = 1 / K",
        note="equal with option='uniform'",
    )  # fmt: skip
    yield Row(
        "Ditto", theirs("ditto", "Ditto", everybody), us("ditto", everybody), fails=True,
        line="fedlab/contrib/algorithm/ditto.py: tqdm is the module; self.args, get_data_loader and _train_alone do not exist",
    )  # fmt: skip


def _fedavg(course: Course) -> Run:
    return theirs("fedavg", "FedAvg", course)
