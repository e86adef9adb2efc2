"""pfl-research: its algorithms' `run` on its simulated backend, which is handed our cohorts and samples.

Its updates are float32 whatever the model is, so that equal is equal to float32's rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
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
    descend,
    gradient,
    network,
    ours,
    played,
    scaffold,
    torch_adam,
    vector,
)

PACKAGE = "pfl"


def theirs(kind: type, course: Course, params: type = NNAlgorithmParams, central: Any = None, **settings: Any) -> Run:
    def run() -> Path:
        module = network()
        module.loss = lambda a, b: F.cross_entropy(module(a), b.long())
        module.metrics = lambda a, b: {}
        optimizer = central(module.parameters()) if central else torch.optim.SGD(module.parameters(), lr=1.0)
        order = iter([(t, i) for t, round in enumerate(course.rounds) for i in sorted(round)])

        def user(turn: tuple[int, int]) -> Dataset:
            t, i = turn
            return Dataset(raw_data=list(course.rounds[t][i]), user_id=str(i))

        models = []

        class Watch(TrainingProcessCallback):  # type: ignore[misc]
            def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
                models.append(vector(module))
                return False, Metrics()

        backend = SimulatedBackend(training_data=FederatedDataset(user, lambda: next(order)), val_data=None)
        training = NNTrainHyperParams(
            local_num_epochs=course.passes, local_learning_rate=LR, local_batch_size=course.batch
        )
        about = params(
            central_num_iterations=len(course.rounds), evaluation_frequency=10**9,
            train_cohort_size=len(course.rounds[0]), val_cohort_size=0, **settings,
        )  # fmt: skip
        kind().run(about, backend, PyTorchModel(module, torch.optim.SGD, optimizer), training, None, [Watch()])
        return {MODEL: torch.stack(models)}

    return run


def shared_gradients() -> tuple[Local, Server]:
    """SCAFFOLD, option I, with -grad f_i(x) for c_i, and where all c_i are the same tensors, which hold the last gradient."""
    _, server = scaffold()

    def local(memory: State, x: Tensor, i: int, batches: list[Batch]) -> Tensor:
        c, whole = (
            memory.get("c", torch.zeros_like(x)),
            (torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])),
        )
        new = -gradient(x, whole)
        c_i = new if i in memory else torch.zeros_like(x)
        memory[i], memory["moved", i] = new, new - c_i
        return descend(x, batches, lambda _: c - c_i)

    return local, server


def rows() -> Rows:
    some = course()

    def us(name: str, **fields: Any) -> Run:
        return lambda: ours(name, fields, some)

    yield Row("FedAvg", theirs(FederatedAveraging, some), us("fedavg"))
    momentum = theirs(FederatedAveraging, some, central=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.6))
    yield Row("FedAvgM: SGD on the server", momentum, us("fedavgm", server_lr=0.7, beta1=0.6))
    adam = theirs(FederatedAveraging, some, central=lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-3))
    yield Row(
        "FedAdam: Adam on the server", adam, us("fedadam", server_lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3),
        variants={"PyTorch's Adam, with bias correction. The paper has none": lambda: played(some, server=torch_adam())},
        line="the user's choice of torch.optim.Adam",
    )  # fmt: skip
    yield Row("FedProx", theirs(FedProx, some, FedProxParams, mu=1.0), us("fedprox", mu=1.0))
    sign = "the control variates have the other sign, and the correction has not: drift is amplified"
    kept = "; the stored c_i of all users are the same tensors, which the next user's gradient overwrites"
    for option, first in ((1, True), (2, False)):
        storage = {"user_state_storage": InMemoryUserStateStorage(), "population": CLIENTS}
        yield Row(
            f"SCAFFOLD, option {option}",
            theirs(SCAFFOLD, some, SCAFFOLDParams, use_gradient_as_control_variate=first, **storage),
            us("scaffold", option=option),
            faults={sign + kept * first: lambda first=first: played(
                some, *(shared_gradients() if first else scaffold(sign=-1.0)))},
            line="pfl/algorithm/scaffold.py: model.get_model_difference(...) is y_i - x, where c_i needs x - y_i"
            + "; without clone=True it is a view of the model's own buffer" * first,
        )  # fmt: skip
