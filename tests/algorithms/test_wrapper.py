"""A wrapper forwards every function of the interface, also one that is added later."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.small import path, simulation
from undrift.algorithms import base, wrapper
from undrift.algorithms.base import Algorithm, Server, Worker
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.scaffold import Scaffold
from undrift.algorithms.wrapper import STATES, KeepMoments, WorkerWrapper, Wrapper, at_rate, innermost

NAMES = sorted(name for name in dir(Algorithm) if not name.startswith("_"))
FIELDS = {f.name for f in (*fields(Worker), *fields(Server))}
OWN = {  # what a wrapper does by itself, and why
    "at",  # it puts itself around what `inner` is in round t
    "check",  # it asks `inner`, and then the part beside it
    "varies",  # belongs to a class, not to what is wrapped
}


class Recorder:
    """Stands for an inner algorithm: returns what it was asked for."""

    def __getattr__(self, name: str) -> Any:
        if name in FIELDS or not inspect.isfunction(inspect.getattr_static(Algorithm, name)):
            return f"value of {name}"
        return lambda **given: (name, given)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in OWN])
def test_everything_is_forwarded(name: str) -> None:
    made = Wrapper(Recorder())  # type: ignore[arg-type]
    hook = inspect.getattr_static(Algorithm, name)
    if not inspect.isfunction(hook):
        assert getattr(made, name) == f"value of {name}"
        return
    given = {p: object() for p in inspect.signature(hook).parameters if p != "self"}
    assert getattr(made, name)(*given.values()) == (name, given)


def test_a_worker_part_forwards_all_but_its_fields() -> None:
    own = {name for name in vars(WorkerWrapper) if not name.startswith("_")}
    assert {n for n in dir(Worker) if not n.startswith("_")} - {f.name for f in fields(Worker)} - {"varies"} <= own


def test_states_are_known_by_the_names_of_arguments() -> None:
    hooks = [inspect.getattr_static(Algorithm, n) for n in NAMES]
    used = {p for hook in hooks if inspect.isfunction(hook) for p in inspect.signature(hook).parameters}
    assert set(STATES) <= used
    returned = {role for roles in wrapper.RETURNS.values() for role in roles if role}
    assert returned <= set(STATES) and set(wrapper.RETURNS) <= set(NAMES)


def test_wrapped_twice_it_is_the_same_algorithm() -> None:
    alg = Scaffold(lr=0.1)
    twice = Wrapper(Wrapper(alg))
    assert torch.equal(path(simulation(twice), 3), path(simulation(alg), 3))
    assert innermost(at_rate(twice, 0.05)).lr == 0.05 and twice.lr == 0.1


def test_moments_are_kept_by_a_wrapper_alone() -> None:
    alg = FedAvg(optimizer="momentum")
    kept, fresh = path(simulation(KeepMoments(alg)), 4), path(simulation(alg), 4)
    assert torch.equal(kept, path(simulation(FedAvg(optimizer="momentum", keep_moments=True)), 4))
    assert not torch.allclose(kept, fresh)


def test_the_interface_is_small() -> None:
    lines = inspect.getsource(base).splitlines()
    own = [name for kind in (Worker, Server) for name in {*vars(kind), *vars(kind)["__annotations__"]}]
    assert len(lines) <= 220 and len([name for name in own if not name.startswith("_")]) <= 25


def test_algorithms_know_nothing_of_machines() -> None:
    folder = Path(base.__file__).parent
    title = "On-device Personalization"  # of a paper
    words = re.compile(r"\b(kernels?|device|host|graphs?|cuda)\b")
    texts = {file: file.read_text().replace(title, "") for file in folder.rglob("*.py")}
    assert {str(file): found for file, text in texts.items() if (found := words.findall(text))} == {}
