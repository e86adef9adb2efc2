"""Whatever an algorithm or a model raises names the client and the stage, in every execution."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.small import path, simulation
from undrift.algorithms.base import Average, LocalSGD
from undrift.algorithms.fedprox import FedProx
from undrift.algorithms.gradma import GradMA
from undrift.algorithms.scaffold import Scaffold
from undrift.core.errors import ClientFailed
from undrift.core.forms import Form


@dataclass(frozen=True)
class Breaks(LocalSGD, Average):
    """Fails for a client with many samples in its second step, or before it."""

    stage: str = "local_step"

    def fails(self, stage: str, samples: Tensor, k: Tensor) -> None:
        if stage == self.stage and bool(((samples > 7) & (k == 1)).any()):
            raise ZeroDivisionError("a fault of the method's own")

    def local_step(self, down: Any, client: Any, work: Any, oracle: Any) -> Any:
        self.fails("local_step", oracle.samples, work.k)
        return super().local_step(down, client, work, oracle)

    def local_end(self, down: Any, client: Any, work: Any) -> Any:
        if self.stage == "local_end":
            raise ZeroDivisionError("a fault of the method's own")
        return super().local_end(down, client, work)


@pytest.mark.parametrize("execution", ["stacked", "pool", "debug"])
def test_a_failure_names_the_client_and_the_stage(execution: str) -> None:
    run = simulation(Breaks(), cohort=6, steps=3, batch=8, execution=execution)
    guilty = [i for i, n in enumerate(run.data.sizes.tolist()) if n >= 8]
    with pytest.raises(ClientFailed, match=rf"client ({'|'.join(map(str, guilty))}), local_step 1: ZeroDivisionError"):
        run.round()
    with pytest.raises(ClientFailed, match=r"client \d, local_end: ZeroDivisionError: a fault of the method's own"):
        simulation(Breaks(stage="local_end"), cohort=6, execution=execution).round()


def test_a_failure_in_replayed_rounds_is_looked_for_in_a_plain_one() -> None:
    run = simulation(Breaks(), cohort=6, steps=3, batch=8)
    run.replays = True
    with (
        pytest.warns(UserWarning, match="could not be replayed"),
        pytest.raises(ClientFailed, match=r"client \d, local_step 1"),
    ):
        run.rounds(3)
    assert run.t == 0 and not run.replays


def test_debug_uses_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any faster form a failure, stacked rounds fail and debug rounds do not."""

    def fail(*given: Any, **named: Any) -> Any:
        raise AssertionError("a faster form was called")

    ours = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("undrift.")]
    forms = {id(f): f for names in ours for f in names.values() if type(f) is Form}
    runs = [simulation(GradMA(slots=6), execution=execution) for execution in ("debug", "stacked")]
    for run in runs:
        run.ask(run.work(run.attendance(0)), run.who(run.attendance(0)))  # the model is checked before the first round
    for form in forms.values():
        monkeypatch.setattr(form, "forms", [(when, fail) for when, _ in form.forms])
    runs[0].round()
    with pytest.raises(ClientFailed, match="a faster form was called"):
        runs[1].round()


@pytest.mark.parametrize(
    "alg", [Scaffold(lr=0.1), FedProx(optimizer="adam", keep_moments=True)], ids=["scaffold", "adam"]
)
def test_debug_equals_the_others_to_rounding(alg: Any) -> None:
    debug, stacked = (path(simulation(alg, execution=e, epochs=1.5), 4) for e in ("debug", "stacked"))
    torch.testing.assert_close(debug, stacked, rtol=1e-11, atol=1e-12)
