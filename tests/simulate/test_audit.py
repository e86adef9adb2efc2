"""An audit of the privacy that runs claim: can it be seen in the final models whether a client was there?

Half of many runs have a client whose update always points in one direction and is as long as allowed (a canary); in the others
the same client has nothing to say, which is the same as its not being there. Whoever looks at a final model guesses by how far
it went in that direction. How well the guesses do bounds epsilon from below, with Clopper and Pearson's bounds of 97.5 % each.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from tests.small import CPU, simulation
from undrift.data.federation import Federation, federate
from undrift.data.from_user import dataset_from
from undrift.jobs.registry import algorithm_class
from undrift.round.private import Privacy, make_accountant
from undrift.simulate.packed import Pack
from undrift.simulate.simulation import Simulation

CLIENTS, FEATURES, CLASSES, EACH = 24, 5, 3, 4
DELTA = 1e-5


class Audit(NamedTuple):
    claimed: float
    found: float  # a lower bound of epsilon


def federations() -> dict[bool, Federation]:
    """With and without the canary, client 0: it alone has the last feature, or nothing but zeros."""
    random = np.random.default_rng(0)
    clients = [(np.zeros((EACH, FEATURES)), np.zeros(EACH, np.int64)) for _ in range(2)]
    clients[0][0][:, -1] = 1.0
    for _ in range(CLIENTS - 1):
        x = random.normal(size=(EACH, FEATURES))
        x[:, -1] = 0.0
        clients.append((x, random.integers(0, CLASSES, EACH)))
    both = federate(dataset_from((clients, clients[-1])), "sites", CLIENTS + 1, 0, CPU)
    members = both.members.view(CLIENTS + 1, EACH)
    fewer = dataclasses.replace(both, start=both.start[:-1], sizes=both.sizes[:-1])

    def dealt(canary: Tensor) -> Federation:
        return dataclasses.replace(fewer, members=torch.cat([canary, members[2:].flatten()]))

    return {True: dealt(members[0]), False: dealt(members[1])}


def model() -> nn.Module:
    linear = nn.Linear(FEATURES, CLASSES, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


def guesses(name: str, cohort: int, noise: float, runs: int, rounds: int) -> tuple[Tensor, Tensor, Simulation]:
    """How far the canary's weights went, in runs with it and in runs without."""
    data, how = federations(), Privacy(0.5, noise, DELTA, 0.0, float(cohort), 1)
    alg = algorithm_class(name)(lr=10.0, **({"beta1": 0.0} if name == "dp-ftrl" else {}))
    made = [
        simulation(
            alg, model(), data[r % 2 == 0], cohort=cohort, steps=1, batch=EACH, seed=r, sampling="bernoulli",
            privacy=how, eval_every=rounds + 1, dtype=torch.float32,
        )
        for r in range(runs)
    ]  # fmt: skip
    pack = Pack(made)
    while made[0].t < rounds:
        pack.scored_rounds(rounds - made[0].t, False)
    canary = torch.tensor([1 / CLASSES - 1, *(1 / CLASSES for _ in range(CLASSES - 1))])
    far = torch.stack([-(run.net.layout.split(run.state.x)["weight"][:, -1] @ canary) / canary.norm() for run in made])
    return far[0::2], far[1::2], made[0]


def lower_bound(there: Tensor, gone: Tensor, delta: float) -> float:
    """Epsilon is at least this: the threshold is chosen on one half of the runs and judged on the other."""

    def bound(threshold: Tensor, some: Tensor, others: Tensor) -> float:
        right, wrong = int((some > threshold).sum()), int((others > threshold).sum())
        least = stats.beta.ppf(0.025, right, len(some) - right + 1) if right else 0.0
        most = stats.beta.ppf(0.975, wrong + 1, len(others) - wrong) if wrong < len(others) else 1.0
        return float(np.log(max(least - delta, 1e-300) / most))

    half = len(there) // 2
    thresholds = torch.cat([there[:half], gone[:half]])
    best = max(thresholds, key=lambda threshold: bound(threshold, there[:half], gone[:half]))
    return max(0.0, bound(best, there[half:], gone[half:]))


def audit(name: str, cohort: int, claimed: float, noise: float, runs: int, rounds: int = 5) -> Audit:
    there, gone, run = guesses(name, cohort, noise, runs, rounds)
    accountant = make_accountant(run.alg, Privacy(0.5, claimed, DELTA, 0.0, float(cohort), 1), CLIENTS)
    for t in range(rounds):
        accountant.add(t, np.arange(CLIENTS))  # for dp-ftrl: everybody in every round
    return Audit(accountant.epsilon, lower_bound(there, gone, DELTA))


def test_private_runs_in_a_pack_are_the_same_alone() -> None:
    how = Privacy(0.5, 1.0, DELTA, 0.0, 3.0, 3)

    def make(seed: int) -> Simulation:
        settings = dict(cohort=3, seed=seed, sampling="bernoulli", privacy=how, eval_every=9)
        run = simulation(algorithm_class("dp-ftrl")(lr=0.1, tree=2), None, data, **settings)  # type: ignore[arg-type]
        run.data = dataclasses.replace(run.data, train=data.train)
        return run

    data = federations()[True]
    alone, packed = ([make(seed) for seed in range(3)] for _ in range(2))
    for run in alone:
        for _ in range(4):
            run.round()
    pack = Pack(packed)
    while packed[0].t < 4:
        pack.scored_rounds(4 - packed[0].t, False)
    for one, other in zip(alone, packed, strict=True):
        torch.testing.assert_close(one.state.x, other.state.x)
        assert one.accountant is not None and other.accountant is not None
        assert torch.equal(one.accountant.spent, other.accountant.spent)


SETTINGS = [("fedavg", 12, 2.0), ("fedavg", 24, 3.0), ("dp-ftrl", 24, 8.0)]


@pytest.mark.parametrize(("name", "cohort", "noise"), SETTINGS[:1])
def test_a_small_audit(name: str, cohort: int, noise: float) -> None:
    honest, cheating = (audit(name, cohort, noise, really, 160) for really in (noise, noise / 10))
    print(honest, cheating)
    assert honest.found <= honest.claimed
    assert cheating.found > 1.0


@pytest.mark.system
@pytest.mark.parametrize(("name", "cohort", "noise"), SETTINGS)
def test_a_thousand_runs_tell_no_more_than_they_claim_and_with_too_little_noise_they_do(
    name: str, cohort: int, noise: float
) -> None:
    honest, cheating = (audit(name, cohort, noise, really, 1000) for really in (noise, noise / 10))
    print(honest, cheating)
    assert honest.found <= honest.claimed
    assert cheating.found > cheating.claimed == honest.claimed
