"""A deployed client holds the model and its samples, and nothing of the server's state."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.small import CPU, data, simulation
from undrift.algorithms.gradma_s import GradMAS
from undrift.data.batches import Plan
from undrift.data.federation import Federation, federate
from undrift.deploy.client import TRAIN, Client
from undrift.deploy.messages import Letter
from undrift.deploy.remote import Remote
from undrift.deploy.server import Deployment
from undrift.oracle.net import Net
from undrift.round.order import first_state
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation

SLOTS, CLIENTS = 100, 120
NAMES = [str(id) for id in range(CLIENTS)]


class Alive(TorchDispatchMode):
    """How many bytes of the tensors that were made inside were alive at once, at most; the meta device has no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.held = 0, {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self.held = {key: held for key, held in self.held.items() if not held[0].expired()}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.held.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, sum(size for _, size in self.held.values()))
        return made


class Kept:
    """Keeps the letters that it is given, and reaches nobody."""

    def __init__(self) -> None:
        self.letters: dict[str, Letter] = {}

    def exchange(self, letters: Mapping[str, Letter]) -> Iterator[tuple[str, Letter | str]]:
        self.letters |= letters
        yield from dict.fromkeys(letters, "not connected").items()


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 330), nn.Tanh(), nn.Linear(330, 330), nn.Tanh(), nn.Linear(330, 3))


def federation() -> Federation:
    return federate(data((4,) * CLIENTS), "sites", CLIENTS, 0, CPU)


def server() -> Simulation:
    return simulation(GradMAS(slots=SLOTS), wide(), federation(), cohort=2, dtype=torch.float32)


def test_a_client_holds_none_of_the_servers_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Alive() as there:
        run = server()
    entries = len(run.net.start()[0])
    assert entries >= 100_000 and there.most > 4 * SLOTS * entries, "the server holds its memory"
    post = Kept()
    Deployment(run, Remote(post, NAMES, "a1", 1, lambda line: None), lambda visits: None).rounds(1)
    name, letter = next(iter(post.letters.items()))
    assert letter.fact("exchange", str) == TRAIN

    seen: list[str] = []

    def watched(alg: Any, net: Net, x: Tensor, *more: Any) -> Any:
        seen.append(x.device.type)
        return first_state(alg, net, x, *more)

    def refused(*given: Any, **more: Any) -> None:
        raise AssertionError("a client makes no simulation")

    monkeypatch.setattr(Simulation, "__init__", refused)
    for path, module in [*sys.modules.items()]:
        if path.startswith("undrift.") and getattr(module, "first_state", None) is first_state:
            monkeypatch.setattr(module, "first_state", watched)
    with Alive() as here:
        net, settings = Net(wide()), Settings(2, Plan(8, 3, 0, persistent=True), 0)
        client = Client(name, GradMAS(slots=SLOTS), net, federation(), settings, CPU, tmp_path)
        answer = client.answer(letter)
    assert set(seen) == {"meta"} and answer.arrays
    assert entries < here.most / 4 < 20 * entries, f"{here.most / 4 / entries:.1f} models"
