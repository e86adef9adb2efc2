"""What private rounds cost, against another library and against counting by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from undrift.round.accounting import Counted, Sampled, epsilon

accounting = pytest.importorskip("dp_accounting")
NOBODY = np.zeros(0, dtype=np.int64)


def spent(rate: float, noise: float, rounds: int, delta: float) -> float:
    ours = Sampled(rate, noise, delta)
    for t in range(rounds):
        ours.add(t, NOBODY)
    return ours.epsilon


@pytest.mark.parametrize(
    ("rate", "noise", "rounds", "delta"),
    [(0.1, 1.0, 100, 1e-5), (0.01, 0.8, 1000, 1e-6), (1.0, 5.0, 20, 1e-5), (0.3, 2.0, 50, 1e-4)],
)
def test_epsilon_is_that_of_dp_accounting(rate: float, noise: float, rounds: int, delta: float) -> None:
    add_or_remove = accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    theirs = accounting.rdp.RdpAccountant(range(2, 257), add_or_remove)
    exact = accounting.pld.PLDAccountant(add_or_remove, value_discretization_interval=1e-3)
    event = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(noise))
    ours = spent(rate, noise, rounds, delta)
    assert ours == pytest.approx(theirs.compose(event, rounds).get_epsilon(delta), rel=1e-6)
    tight = exact.compose(event, rounds).get_epsilon(delta)  # by numbers, another way
    assert tight <= ours <= 1.25 * tight


@pytest.mark.filterwarnings("ignore:overflow", "ignore:divide by zero")
@pytest.mark.parametrize("rate", [0.1, 1.0])
@pytest.mark.parametrize("noise", [1e-170, 1e-150, 1e-9])
def test_next_to_no_noise_is_never_no_cost(rate: float, noise: float) -> None:
    ours = Sampled(rate, noise, 1e-5)
    ours.add(0, NOBODY)
    assert ours.epsilon > 1e15
    assert np.isnan(epsilon(np.array([2.0, 3.0]), np.array([1.0, np.nan]), 1e-5))


def test_epsilon_grows_with_every_round_and_is_nothing_before_the_first() -> None:
    grown = [spent(0.1, 1.0, rounds, 1e-5) for rounds in range(6)]
    assert grown[0] == 0.0 and all(a < b for a, b in itertools.pairwise(grown))


def test_a_known_cohort_costs_much_more_than_a_secret_one() -> None:
    """For a client of whom is known that it was in 10 of 100 rounds, sampling hides nothing."""
    known = accounting.rdp.RdpAccountant().compose(accounting.GaussianDpEvent(1.0), 10).get_epsilon(1e-5)
    assert spent(0.1, 1.0, 100, 1e-5) < 8.0 < 17.0 < known


def test_a_tree_costs_what_a_client_moves_its_nodes() -> None:
    """Against matrices: node by round, and round by client; the worst case moves every update in one direction."""
    clients, tree, rounds, noise = 7, 12, 30, 1.7
    random = np.random.default_rng(0)
    ours, parts = Counted(clients, tree, noise, 1e-5), []
    for t in range(rounds):
        parts.append(np.sort(random.choice(clients, 2, replace=False)))
        ours.add(t, parts[-1])
        n = t + 1
        took_part = np.array([[i in part for part in parts] for i in range(clients)], dtype=float)  # [N, n]
        nodes = []
        for first in range(0, n, tree):
            for end in range(1, min(tree, n - first) + 1):
                row = np.zeros(n)
                row[first + end - (end & -end) : first + end] = 1
                nodes.append(row)
        moved = took_part @ np.array(nodes).T / noise
        worst = float((moved**2).sum(1).max())
        assert float(ours.spent.max()) == pytest.approx(worst, rel=1e-12)
        if n == rounds:
            exact = accounting.pld.PLDAccountant()
            exact.compose(accounting.GaussianDpEvent(worst**-0.5))
            assert exact.get_epsilon(1e-5) <= ours.epsilon * 1.001 <= 1.15 * exact.get_epsilon(1e-5)


def test_one_round_of_a_client_costs_a_trees_height() -> None:
    ours = Counted(1, 64, 1.0, 1e-5)
    for t in range(64):
        ours.add(t, np.array([0]) if t == 0 else NOBODY)
    assert torch.equal(ours.spent, torch.tensor([7.0], dtype=torch.float64))  # log2(64) + 1 nodes
