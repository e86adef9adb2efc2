"""Small simulations for several ranks: `torchrun ... -m tests.simulate.ranks_cases FOLDER KIND` runs and saves them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import undrift
from tests.small import federation, simulation
from undrift.core import ranks
from undrift.core.names import names
from undrift.jobs import course
from undrift.jobs.registry import algorithm_class
from undrift.simulate.here import Pool, Stacked
from undrift.simulate.simulation import Simulation

ROUNDS = 3
OPTIMIZERS = ("nesterov", "adamw", "muon")


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


def build(case: str) -> Simulation:
    """The simulation that a case's name says: an algorithm and how it is run."""
    name, _, how = case.partition(" ")
    kind = algorithm_class(name)
    # `slots` of all clients, because a cohort of changing size may hold everybody
    fields: dict[str, Any] = {"slots": 0} if "slots" in kind.__dataclass_fields__ else {}
    if how in OPTIMIZERS:
        fields |= dict(optimizer=how, weight_decay=0.1, keep_moments=True, warm_steps=2)
    alg = kind(lr=0.1, **fields)
    ways: dict[str, dict[str, Any]] = {
        "": {"cohort": 5},
        "float32": {"cohort": 5, "dtype": torch.float32},
        "float32 pool": {"cohort": 5, "dtype": torch.float32, "execution": "pool"},
        "pool": {"cohort": 5, "execution": "pool"},
        "ragged": {"cohort": 6, "epochs": 1.5, "module": normed(), "weights": "size", "slow": (0.5, 0.3)},
        "ragged pool": {"cohort": 6, "epochs": 1.5, "module": normed(), "execution": "pool"},
        "auto": {"cohort": 5, "execution": "auto"},
        "chunk": {"cohort": 6, "chunk": 2},
        "changing": {"cohort": 2, "sampling": "bernoulli", "dropout_rate": 0.3},
        "broken": {"cohort": 6},
        "guarded": {"cohort": 6, "module": normed(), "aggregate": "geometric", "attack": "gauss:0.4:1"},
        "drifting": {"cohort": 5},
        **{name: {"cohort": 5} for name in OPTIMIZERS},
    }
    return simulation(alg, fed=federation(), **ways[how])


def cases(kind: str) -> list[str]:
    papers = ("fedavg", "scaffold", "gradma-s", "gradma", "fedmim", "mime")
    if kind == "few":  # more ranks than clients
        return [f"{name} changing" for name in papers] + ["scaffold broken", "mime ragged", "mime ragged pool"]
    ways = ("float32", "float32 pool", "pool", "ragged", "ragged pool", "changing", "broken")
    return (
        [name for name in names("algorithms") if name != "centralized"]  # whose one client cannot be shared
        + [f"{name} {way}" for name in papers for way in ways]
        + [
            "fedavg auto",
            "fedavg chunk",
            "fedavg drifting",
            "scaffold guarded",
            "mime guarded",
            "gradma nesterov",
            "fedprox adamw",
            "softpull muon",
        ]
    )


def outcome(case: str) -> dict[str, Any]:
    """What a case computes, and which clients this process trained and measured in each round."""
    run = build(case)
    if case.endswith("broken"):
        fed = run.data
        assert fed.train.held is not None
        fed.train.held[fed.members[fed.start[3] : fed.start[3] + fed.sizes[3]]] = float("nan")
    records, models, worked = [], [], []
    for _ in range(ROUNDS):
        WORKED.clear()
        records.append({k: v for k, v in run.round().as_dict().items() if k != "seconds"})
        models.append(run.state.x.clone())
        if case.endswith("drifting") and ranks.rank():  # a server that rounds otherwise, and much
            run.state = run.state._replace(x=run.state.x + 1e-3)
        worked.append([(what, list(ids)) for what, ids in WORKED])
    assert run.execution is not None
    tensors = {n: t.clone() for n, t in run.tensors().items()}
    return {
        "records": records, "models": torch.stack(models), "tensors": tensors,
        "worked": worked, "execution": run.execution.name,
    }  # fmt: skip


WORKED: list[tuple[str, list[int]]] = []  # what this process was given to do, and with whom


def watch_executions() -> None:
    for kind in (Stacked, Pool):
        for method, what in (("train", "train"), ("measure", "measure")):
            setattr(kind, method, _watched(getattr(kind, method), what))


def _watched(real: Any, what: str) -> Any:
    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        WORKED.append(("time" if options else what, arguments[-1].ids.tolist()))  # with a limit it is only timed
        return real(self, *arguments, **options)

    return watched


def stopped_clocks() -> tuple[str, int]:
    """How a run ends that is to stop after a moment, when time passes on rank 0 only."""
    if ranks.rank():
        course.time = SimpleNamespace(perf_counter=lambda: 0.0)  # type: ignore[assignment]
    result = undrift.run(rounds=10**6, stop_at="time=0.3s", clients=10, cohort=2, model="logreg", execution="stacked")
    return result.stopped, len(result.records)


if __name__ == "__main__":
    torch.set_num_threads(1)
    watch_executions()
    with ranks.join():
        found = {case: outcome(case) for case in cases(sys.argv[2])}
        found["stopped clocks"] = stopped_clocks()
        torch.save(found, Path(sys.argv[1]) / f"{ranks.rank()}.pt")
