"""NVFlare's controllers, whose clients are asked here and not over its network, and its helpers for clients in PyTorch."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.scaffold import Scaffold
from nvflare.app_opt.pt.ditto import PTDittoHelper
from nvflare.app_opt.pt.fedopt_ctl import FedOpt
from nvflare.app_opt.pt.fedproxloss import PTFedProxLoss
from nvflare.app_opt.pt.scaffold import PTScaffoldHelper
from torch import Tensor, nn

from audited.problem import (
    CLIENTS,
    LR,
    MODEL,
    OWN,
    SOME,
    Batch,
    Course,
    Path,
    Row,
    Rows,
    Run,
    course,
    network,
    ours,
    played,
    scaffold,
    torch_adam,
    vector,
)

PACKAGE = "nvflare"
Client = Callable[[int, FLModel, list[Batch]], FLModel]


def loaded(params: dict[str, Any]) -> nn.Module:
    module = network()
    module.load_state_dict({name: torch.as_tensor(value) for name, value in params.items()})
    return module


def arrays(module: nn.Module) -> dict[str, Any]:
    return {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}


def train(
    module: nn.Module, batches: list[Batch], extra: Callable[[nn.Module], Tensor | float] = lambda _: 0.0
) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    for x, y in batches:
        optimizer.zero_grad()
        (F.cross_entropy(module(x), y) + extra(module)).backward()
        optimizer.step()


def local(i: int, given: FLModel, batches: list[Batch], mu: float = 0.0) -> FLModel:
    """Plain steps, or with NVFlare's proximal term; the answer is a difference."""
    module, start = loaded(given.params), loaded(given.params)
    term = PTFedProxLoss(mu)
    train(module, batches, (lambda m: term(m, start)) if mu else (lambda _: 0.0))
    before = arrays(start)
    return FLModel(params={n: v - before[n] for n, v in arrays(module).items()}, params_type=ParamsType.DIFF)


def here(controller: type, course: Course, client: Client) -> type:
    """A controller whose clients are called."""

    class Here(controller):  # type: ignore[misc]
        def __init__(self, **settings: Any) -> None:
            super().__init__(num_rounds=len(course.rounds), persistor_id="", **settings)
            self.models: list[Tensor] = []
            self.fl_ctx, self.engine = FLContext(), None
            self._task_check_period = 0.0

        def load_model(self) -> FLModel:
            return FLModel(params=arrays(network()))

        def sample_clients(self, *_: object) -> list[str]:
            return [str(i) for i in sorted(course.rounds[len(self.models)])]

        def send_model_and_wait(self, targets: list[str], data: FLModel) -> list[FLModel]:
            answers = []
            for name in targets:
                answer = client(int(name), copy.deepcopy(data), course.steps(len(self.models), int(name)))
                answer.meta = (answer.meta or {}) | {"client_name": name}
                answers.append(answer)
            return answers

        def send_model(self, task_name: str, targets: list[str], data: FLModel, callback: Any) -> None:
            for answer in self.send_model_and_wait(targets, data):
                callback(answer)

        def save_model(self, model: FLModel) -> None:
            self.models.append(vector(loaded(model.params)))

        def get_num_standing_tasks(self) -> int:
            return 0

        def build_component(self, described: dict[str, Any]) -> Any:
            module, _, name = described["path"].rpartition(".")
            return getattr(__import__(module, fromlist=[name]), name)(**described["args"])

        def event(self, *_: object) -> None: ...

        info = debug = warning = fire_event_with_data = panic_event = event

    return Here


def theirs(controller: type, course: Course, client: Client = local, **settings: Any) -> Run:
    def run() -> Path:
        here_now = here(controller, course, client)(**copy.deepcopy(settings))
        if isinstance(here_now, Scaffold):
            here_now.start_round = 0
            Scaffold_initialize(here_now)
            here_now._run_rounds()
        else:
            here_now.model = here_now.load_model()
            here_now.run()
        return {MODEL: torch.stack(here_now.models)}

    return run


def Scaffold_initialize(controller: Any) -> None:
    """`Scaffold.initialize` without the engine of its parent."""
    controller.model = controller.load_model()
    controller._global_ctrl_weights = {n: v * 0 for n, v in controller.model.params.items()}


def scaffold_client() -> Client:
    """A client with NVFlare's helper, as its examples use it."""
    helpers: dict[int, PTScaffoldHelper] = {}

    def client(i: int, given: FLModel, batches: list[Batch]) -> FLModel:
        module, start = loaded(given.params), loaded(given.params)
        if i not in helpers:
            helpers[i] = PTScaffoldHelper()
            helpers[i].init(module)
        helper = helpers[i]
        helper._prepare_model(module)
        helper.load_global_controls(given.meta["scaffold_c_global"])
        c_global, c_local = helper.get_params()
        optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            helper.model_update(module, LR, c_global, c_local)
        helper.terms_update(module, LR, c_global, c_local, start)
        before = arrays(start)
        return FLModel(
            params={n: v - before[n] for n, v in arrays(module).items()}, params_type=ParamsType.DIFF,
            meta={"scaffold_c_diff": helper.get_delta_controls()},
        )  # fmt: skip

    return client


def ditto(course: Course, lam: float) -> Run:
    """FedAvg's controller; clients train a model of their own with PTDittoHelper's model, optimizer and proximal loss."""

    def run() -> Path:
        helpers: dict[int, PTDittoHelper] = {}
        folder = tempfile.TemporaryDirectory()

        def client(i: int, given: FLModel, batches: list[Batch]) -> FLModel:
            if i not in helpers:
                own = network()
                path = tempfile.mkdtemp(dir=folder.name)
                sgd = torch.optim.SGD(own.parameters(), lr=LR)
                helpers[i] = PTDittoHelper(nn.CrossEntropyLoss(), own, sgd, torch.device("cpu"), path, lam)
            helper, received = helpers[i], loaded(given.params)
            helper.load_model({n: torch.as_tensor(v) for n, v in given.params.items()})
            for x, y in batches:
                helper.optimizer.zero_grad()
                (helper.criterion(helper.model(x), y) + helper.prox_criterion(helper.model, received)).backward()
                helper.optimizer.step()
            helper.save_model()
            return local(i, given, batches)

        owns: list[Tensor] = []
        kind = here(FedAvg, course, client)

        class Watched(kind):  # type: ignore[misc, valid-type]
            def save_model(self, model: FLModel) -> None:
                super().save_model(model)
                owns.append(torch.stack([vector(helpers[i].model) for i in range(CLIENTS)]))

        controller = Watched()
        controller.model = controller.load_model()
        controller.run()
        folder.cleanup()
        return {MODEL: torch.stack(controller.models), OWN: torch.stack(owns)}

    return run


def rows() -> Rows:
    some, everybody = course(), course(everybody=True)

    def us(name: str, on: Course = some, own: Any = None, **fields: Any) -> Run:
        return lambda: ours(name, fields, on, own=own)

    yield Row(
        "FedAvg", theirs(FedAvg, some), us("fedavg"), note="weights are what clients report as their steps, or equal"
    )
    prox: Client = lambda i, given, batches: local(i, given, batches, 1.0)  # noqa: E731
    yield Row("FedProx: its loss", theirs(FedAvg, some, prox), us("fedprox", mu=1.0))
    constant = {"path": "torch.optim.lr_scheduler.ConstantLR", "args": {"factor": 1.0, "total_iters": 1}}
    sgd = {"path": "torch.optim.SGD", "args": {"lr": 0.7, "momentum": 0.6}}
    yield Row(
        "FedOpt, SGD", theirs(FedOpt, some, source_model=network(), optimizer_args=sgd, lr_scheduler_args=constant),
        us("fedavgm", server_lr=0.7, beta1=0.6), note="FedAvgM",
    )  # fmt: skip
    adam = {"path": "torch.optim.Adam", "args": {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3}}
    yield Row(
        "FedOpt, Adam", theirs(FedOpt, some, source_model=network(), optimizer_args=adam, lr_scheduler_args=constant),
        us("fedadam", server_lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3),
        variants={"PyTorch's Adam, with bias correction. The paper has none": lambda: played(some, server=torch_adam())},
        line="the user's choice of torch.optim.Adam",
    )  # fmt: skip
    yield Row("SCAFFOLD, all clients", theirs(Scaffold, everybody, scaffold_client()), us("scaffold", everybody))
    yield Row(
        "SCAFFOLD, some clients", theirs(Scaffold, some, scaffold_client()), us("scaffold"),
        faults={"c moves by the mean of the cohort's changes, where the paper divides their sum by all clients N":
                lambda: played(some, *scaffold(share=CLIENTS / SOME))},
        line="nvflare/app_common/workflows/scaffold.py: crtl_aggregation_helper.get_result() is added to c as it is",
    )  # fmt: skip
    yield Row(
        "Ditto: its helper", ditto(everybody, 0.5), us("ditto", everybody, own=lambda client: client.own.x, lam=0.5)
    )
