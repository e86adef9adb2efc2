"""APPFL's aggregators and trainers, which are handed our cohorts and samples."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from audited.problem import LR, MODEL, SIZES, Course, Path, Row, Rows, Run, course, network, ours, problem, put, vector

PACKAGE = "appfl"


class Quiet(logging.Logger):
    """What a trainer tells its progress to."""

    def log_title(self, *_: object) -> None: ...

    set_title = log_content = log_title


def theirs(aggregator: str, course: Course, trainer: str = "VanillaTrainer", mu: float = 0.0, **settings: Any) -> Run:
    def run() -> Path:
        settings["optimize_memory"] = False
        kind = getattr(importlib.import_module("appfl.algorithm.aggregator"), aggregator)
        server = kind(network(), DictConfig(settings), Quiet("appfl"))
        if settings.get("client_weights_mode") == "sample_size":
            for i, n in enumerate(SIZES):
                server.set_client_sample_size(str(i), n)
        train = getattr(importlib.import_module("appfl.algorithm.trainer"), trainer)
        models, x = [], vector(network())
        for t, round in enumerate(course.rounds):
            answers = {}
            for i in sorted(round):
                configs = {
                    "mode": "epoch", "num_local_epochs": course.passes, "optim": "SGD", "optim_args": {"lr": LR}, "mu": mu,
                    "train_batch_size": course.batch, "train_data_shuffle": False, "device": "cpu", "optimize_memory": False,
                    "do_validation": False,
                }  # fmt: skip
                client = train(
                    model=network(), loss_fn=nn.CrossEntropyLoss(), metric=lambda *_: 0.0, logger=Quiet("appfl"),
                    train_dataset=TensorDataset(*course.rounds[t][i]), train_configs=DictConfig(configs), client_id=str(i),
                )  # fmt: skip
                client.load_parameters(put(network(), x).state_dict())
                client.train()
                state = client.get_parameters()
                answers[str(i)] = dict(state[0] if isinstance(state, tuple) else state)
            after: dict[str, Tensor] = server.aggregate(answers)
            module = network()
            module.load_state_dict(after)
            x = vector(module)
            models.append(x)
        return {MODEL: torch.stack(models)}

    return run


def rows() -> Rows:
    assert len(problem()) == len(SIZES)
    some = course()

    def us(name: str, weights: str = "uniform", **fields: Any) -> Run:
        return lambda: ours(name, fields, some, weights)

    yield Row("FedAvg", theirs("FedAvgAggregator", some), us("fedavg"))
    by_size = theirs("FedAvgAggregator", some, client_weights_mode="sample_size")
    yield Row("FedAvg, sample_size", by_size, us("fedavg", "size"))
    yield Row("FedProx", theirs("FedAvgAggregator", some, "FedProxTrainer", mu=1.0), us("fedprox", mu=1.0))
    momentum = theirs("FedAvgMAggregator", some, server_momentum_param_1=0.6)
    yield Row("FedAvgM", momentum, us("fedavgm", beta1=0.6), note="without a rate of the server")
    opt = {
        "server_learning_rate": 0.1, "server_adapt_param": 1e-3, "server_momentum_param_1": 0.9,
        "server_momentum_param_2": 0.99,
    }  # fmt: skip
    field = {"server_lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    for name, ours_name in (("FedAdam", "fedadam"), ("FedYogi", "fedyogi"), ("FedAdagrad", "fedadagrad")):
        yield Row(
            name, theirs(f"{name}Aggregator", some, **opt), us(ours_name, v0="tau2", **field),
            note="v begins at tau^2, as the paper asks; ours with v0=tau2, by default at 0",
        )  # fmt: skip
