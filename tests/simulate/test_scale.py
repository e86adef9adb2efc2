"""Very many clients: nothing in a round or a checkpoint grows with how many there are."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.small import CPU, simulation
from undrift.algorithms.fedavg import FedAvg
from undrift.data.federation import federate
from undrift.data.load import load_dataset
from undrift.simulate.simulation import Simulation

CLIENTS = 100_000


def many(clients: int, **settings: Any) -> Simulation:
    """FedAvg on resampled digits, a cohort of five."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    federation = federate(load_dataset("digits"), "resample:4", clients, 0, CPU)
    return simulation(FedAvg(), module, federation, cohort=5, steps=1, dtype=torch.float32, **settings)


class Largest(TorchDispatchMode):
    """The most elements that any new tensor has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:  # from_numpy: nothing is made or moved
            return made
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(made) if isinstance(t, torch.Tensor))])
        return made


def largest_in_a_round(run: Simulation) -> tuple[int, int]:
    """Elements of the largest tensor, and bytes that Python and numpy took, in the third round."""
    run.round()
    run.round()
    with Largest() as largest:
        run.round()
    tracemalloc.start()
    run.round()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return largest.numel, peak


def test_a_round_makes_nothing_of_the_number_of_clients() -> None:
    few, very_many = (largest_in_a_round(many(n, eval_every=10**9)) for n in (1000, CLIENTS))
    assert 5 * 650 <= few[0] == very_many[0] and very_many[1] < few[1] + CLIENTS / 2
    bernoulli = many(CLIENTS, eval_every=10**9, sampling="bernoulli")  # asks every client, so this must be seen
    assert largest_in_a_round(bernoulli)[0] >= CLIENTS > very_many[0]


def test_the_last_round_scores_a_bounded_number_of_clients() -> None:
    run = many(CLIENTS)
    with Largest() as largest:
        more = run.round(last=True).more
    assert 10_000 * 4 <= largest.numel < CLIENTS  # ten thousand clients with four samples each
    assert more["absent_loss"] > 0 and 0 <= more["client_accuracy_p10"] <= more["client_accuracy_p90"] <= 1


def test_a_checkpoint_grows_with_those_who_took_part_and_not_with_all() -> None:
    sizes = []
    for clients in (1000, CLIENTS):
        run = many(clients, eval_every=10**9)
        for _ in range(3):
            run.round()
        sizes.append(sum(t.nbytes for t in run.tensors().values()))
        again = many(clients, eval_every=10**9)
        again.restore(run.tensors(), run.t)
        assert (again.position == run.position).all() and 10 < again.position.sum() <= 15
        assert torch.equal(again.round() and again.state.x, run.round() and run.state.x)
    assert abs(sizes[0] - sizes[1]) < 200  # a client may be drawn twice


LARGE = """
import json, undrift
result = undrift.run(
    algorithm="gradma-s", model="logreg", partition="resample:20", clients=12_000, cohort=7_000, rounds=3, steps=2,
    eval_every=3, execution="stacked", set={"slots": 10_000},
)
print(json.dumps(result.records[-1]))
"""


@pytest.mark.system
def test_gradma_s_remembers_ten_thousand_clients(count: Any) -> None:
    """A memory of 10,000 rows fills up, and each round's programme with all of them is solved.

    It has a process of its own, because Python keeps the six gigabytes that it takes.
    """
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    last = json.loads(done.stdout.splitlines()[-1])
    solved = 3 - int(last["qp_failed"])
    count("GradMA-S with 10,000 slots: programmes solved", tried=3, survived=solved, lost=3 - solved, silent=0)
    assert last["qp_failed"] == 0 and last["evictions"] > 0 and last["accuracy"] > 0.5
