"""NVFlare's simulator for benchmarks/rivals.py: its FedAvg controller, and an executor that trains a client.

The simulator keeps a process for every client, which would be a hundred. So there are COHORT clients, all of which take part in
every round, each with another client's samples from round to round. The controller's waiting time is as short as it can be,
and models are not written to disk.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import rivals
import torch
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.api import FedJob


class TimedFedAvg(FedAvg):  # type: ignore[misc]
    """FedAvg that waits before a round until it is asked for one."""

    def __init__(self, model_name: str, address: str) -> None:
        start = {name: value.numpy() for name, value in rivals.built(model_name).state_dict().items()}
        super().__init__(
            num_clients=rivals.COHORT, num_rounds=10**9, persistor_id="", model=start, task_check_period=0.005
        )
        self.model_name, self.address = model_name, address

    def run(self) -> None:
        self.pipe, self.left, self.seconds = Client(self.address), 0, list[float]()
        self.pipe.send(rivals.version("NVFlare"))
        super().run()

    def sample_clients(self, *given: Any) -> Any:
        if not self.left:
            asked = self.pipe.recv()
            if asked is None:
                raise KeyboardInterrupt  # the run has no other end before its last round
            self.left, self.seconds = asked, []
        self.began = time.perf_counter()
        return super().sample_clients(*given)

    def save_model(self, model: FLModel) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.left -= 1
        if not self.left:
            self.pipe.send(rivals.Turn(self.seconds, 0, rivals.loss_of(model.params, self.model_name)))


class Local(Executor):  # type: ignore[misc]
    """A client's local steps."""

    def __init__(self, model_name: str, device: str) -> None:
        super().__init__()
        self.model_name, self.device = model_name, device

    def execute(self, task: str, given: Shareable, context: FLContext, abort: Signal) -> Shareable:
        torch.set_num_threads(1)
        received = FLModelUtils.from_shareable(given)
        x, y = rivals.ready(self.model_name)
        module = rivals.built(self.model_name).to(self.device)
        module.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
        site = int(context.get_identity_name().rpartition("-")[2]) - 1
        me = (site + rivals.COHORT * received.current_round) % rivals.CLIENTS
        inputs, targets = x[me].to(self.device), y[me].to(self.device)
        rivals.train(module, inputs, targets, torch.randperm(rivals.SAMPLES).to(self.device))
        after = {name: value.cpu().numpy() for name, value in module.state_dict().items()}
        return FLModelUtils.to_shareable(FLModel(params_type="FULL", params=after))


def serve(model: str, device: str, pipe: Connection) -> None:
    """Pass what is asked on to the controller, which the simulator builds in a process or a thread of its own."""
    folder = tempfile.mkdtemp()
    address = os.path.join(folder, "controller")
    socket.setdefaulttimeout(300)  # seconds until the simulator is given up
    with Listener(address) as listener:
        if not os.fork():
            job = FedJob("fedavg", min_clients=rivals.COHORT)
            job.to_server(TimedFedAvg(model, address))
            job.to_clients(Local(model, device))
            job.simulator_run(
                os.path.join(folder, "workspace"), n_clients=rivals.COHORT, threads=rivals.COHORT, log_config="error"
            )
            os._exit(0)
        controller = listener.accept()
    pipe.send(controller.recv())
    while (count := pipe.recv()) is not None:
        controller.send(count)
        pipe.send(controller.recv())
    controller.send(None)
