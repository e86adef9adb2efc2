"""Runs packed into one program equal the same runs alone, and a sweep packs what it can."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests import small
from undrift.data.federation import Federation, federate
from undrift.errors import BadSetting
from undrift.registry import algorithm_class, names
from undrift.round import RoundRecord
from undrift.simulate.engine import Simulation
from undrift.simulate.packed import Pack, may_differ, structure

RUNS = 3  # and not as many as there are clients in a cohort, so that no dimension can be taken for another
STRUCTURE: dict[str, dict[str, Any]] = {
    "gradma-s": {"slots": 5},
    "gradma": {"slots": 5},
    "fedmim": {"alpha": (0.5, 0.2)},
}
VALUES = {"lr": 0.2, "weight_decay": 0.01, "server_lr": 0.9, "clip": 2.0}


def federations() -> list[Federation]:
    """The same samples dealt out under other seeds."""
    data = small.data()
    dealt = [federate(data, "dirichlet:0.5", 6, seed, small.CPU) for seed in range(RUNS)]
    return [dataclasses.replace(each, train=dealt[0].train, test=dealt[0].test) for each in dealt]


def algorithms(name: str, **fields: Any) -> list[Any]:
    """One a run, different in every real field that may differ."""
    kind = algorithm_class(name)
    start = kind(**{n: v for n, v in VALUES.items() if n in {f.name for f in dataclasses.fields(kind)}} | fields)
    made = []
    for r in range(RUNS):
        less = 1 - 0.1 * r
        other: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            value = getattr(start, field.name)
            if may_differ(kind, field):
                several = isinstance(value, tuple)
                other[field.name] = tuple(v * less for v in value) if several else value * less
        made.append(dataclasses.replace(start, **other))
    assert len({structure(alg) for alg in made}) == 1
    return made


Make = Callable[[], list[Simulation]]


def maker(algs: list[Any], module: Callable[[int], nn.Module] = small.tiny_mlp, **settings: Any) -> Make:
    def make() -> list[Simulation]:
        each = enumerate(zip(algs, federations(), strict=True))
        return [small.simulation(a, module(r), fed, seed=r, cohort=4, **settings) for r, (a, fed) in each]

    return make


def both(make: Make, rounds: int) -> list[tuple[Simulation, list[RoundRecord], Simulation, list[RoundRecord]]]:
    """Every run alone, and all of them packed."""
    alone, packed = make(), make()
    pack = Pack(packed)
    records: list[list[RoundRecord]] = [[] for _ in packed]
    while pack.simulations[0].t < rounds:
        made = pack.rounds(rounds - pack.simulations[0].t, last=True)
        for mine, more in zip(records, made, strict=True):
            assert more, "a run left the pack"
            mine += more
    assert pack.program is not None and pack.program.graphs, "nothing was packed"
    assert pack.program.state.x.shape[0] == RUNS
    plain = [[run.round(last=n + 1 == rounds) for n in range(rounds)] for run in alone]
    assert not torch.allclose(alone[0].state.x, alone[1].state.x, rtol=1e-3), "the runs must not be alike"
    return list(zip(alone, plain, packed, records, strict=True))


def agree(plain: Simulation, one: list[RoundRecord], packed: Simulation, two: list[RoundRecord]) -> float:
    """The largest difference between the two runs' tensors."""
    mine, other = plain.tensors(), packed.tensors()
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    for a, b in zip(one, two, strict=True):
        expected, found = ({n: v for n, v in r.as_dict().items() if n != "seconds"} for r in (a, b))
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            same = value if value is None else pytest.approx(value, rel=1e-8, abs=1e-11, nan_ok=True)
            assert found[name] == same, name
    return max(float((other[n].double() - t.double()).abs().max()) for n, t in mine.items() if t.numel())


@pytest.mark.parametrize("name", names("algorithms"))
def test_packed_runs_equal_the_same_runs_alone(name: str) -> None:
    make = maker(algorithms(name, **STRUCTURE.get(name, {})), eval_every=4)
    for run in both(make, 6):
        agree(*run)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "gradma-s", "gradma", "fedmim", "mime"])
@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 1.5, "lr_decay": 0.9},
        {"sampling": "bernoulli"},
        {"dropout_rate": 0.5, "weights": "size"},
        {"slow": (0.5, 0.4), "weights": "size", "lr_decay": 0.9},
        {"steps": 20},
    ],
    ids=str,
)
def test_ragged_rounds(name: str, settings: dict[str, Any]) -> None:
    slots = {"slots": 6} if "gradma" in name else {}
    for run in both(maker(algorithms(name, **slots), eval_every=5, **settings), 5):
        agree(*run)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mifa", {"wait": True}),
        ("fedmim+gradma-s", {"slots": 4, "qp_scope": "tensor", "order": "sampling"}),
        ("gradma-w", {"prev_first": "x0", "rho": 0.1}),
        ("fedprox", {"optimizer": "adam", "decay_biases": False}),
        ("domo", {"buffers": "average"}),
        ("fedadam", {"bias_correction": True, "v0": "tau2"}),
        ("scaffold", {"option": 1}),
    ],
    ids=str,
)
def test_options(name: str, fields: dict[str, Any]) -> None:
    for run in both(maker(algorithms(name, **fields), eval_every=4, lr_drops=(2,)), 5):
        agree(*run)


def test_batch_norm_and_dropout() -> None:
    def module(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 3))

    for run in both(maker(algorithms("moon"), module, eval_every=4), 5):
        agree(*run)


def test_constants_that_differ_are_refused() -> None:
    def module(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        made[0].requires_grad_(False)
        return made

    with pytest.raises(BadSetting, match="does not train"):
        Pack(maker(algorithms("fedavg"), module)()).rounds(1, False)


def test_a_run_with_an_answer_that_is_not_finite_leaves_as_it_was() -> None:
    """One client of the second run is spoiled: that run is as before the stretch, the others go on."""
    alone, packed = (maker(algorithms("scaffold"), eval_every=3)() for _ in range(2))
    pack = Pack(packed)
    assert all(pack.rounds(3, False))
    before = packed[1].tensors()
    spoilt = packed[1].state.x.clone()
    spoilt[0] = torch.nan
    good, packed[1].state = packed[1].state, packed[1].state._replace(x=spoilt)
    made = pack.rounds(3, False)
    assert [len(records) for records in made] == [3, 0, 3]
    packed[1].state = good
    assert all(torch.equal(t, packed[1].tensors()[name]) for name, t in before.items())
    rest = Pack([packed[0], packed[2]])
    rest.rounds(2, False)
    packed[1].rounds(1)
    for run, rounds in ((0, 8), (1, 4), (2, 8)):
        for _ in range(rounds):
            alone[run].round()
        for name, tensor in alone[run].tensors().items():
            torch.testing.assert_close(packed[run].tensors()[name], tensor, rtol=1e-9, atol=1e-11)
