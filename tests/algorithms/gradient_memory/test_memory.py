"""GradMA's memory: its relation to FedAvgM, its invariants, and its products kept up to date."""

from __future__ import annotations

import time

import pytest
import torch

from tests.small import data, path, simulation
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.fedavgm import FedAvgM
from undrift.algorithms.gradient_memory.cone import gram
from undrift.algorithms.gradient_memory.memory import Memory, mem_red
from undrift.algorithms.gradma_s import GradMAS
from undrift.data.federation import federate

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_r16_gradma_s_without_slots_is_fedavgm_bit_for_bit(dtype: torch.dtype) -> None:
    ours = path(simulation(GradMAS(slots=0, beta1=0.7, server_lr=0.9), dtype=dtype), 6)
    assert torch.equal(ours, path(simulation(FedAvgM(beta1=0.7, server_lr=0.9), dtype=dtype), 6))


def test_r16_constraints_hold_and_inactive_ones_leave_fedavgm() -> None:
    run = simulation(GradMAS(slots=6, beta1=0.9), cohort=2)
    active = 0.0
    for _ in range(12):
        active += run.round().more["qp_active"]
        state = run.state.server
        held = state.memory.rows[state.memory.ids >= 0]
        assert (held @ state.m / held.norm(dim=1) / state.m.norm()).min() >= -1e-9
    assert active > 0
    # Clients with the same samples have no conflict: every constraint is inactive and the momentum is FedAvgM's.
    twins = data((40,))
    twins = type(twins)(
        "twins",
        *(twins.x_train[[*range(40)] * 3], twins.y_train[[*range(40)] * 3], twins.x_test, twins.y_test, 3),
        sites=torch.arange(3).repeat_interleave(40).numpy(),
    )
    fed = federate(twins, "sites", 3, 0, torch.device("cpu"))
    ours = simulation(GradMAS(slots=3, beta1=0.5), fed=fed, cohort=2, batch=40)
    theirs = simulation(FedAvgM(beta1=0.5), fed=fed, cohort=2, batch=40)
    torch.testing.assert_close(path(ours, 5), path(theirs, 5), **EXACT)


@pytest.mark.parametrize("slots", [3, 4, 6])
@pytest.mark.parametrize("order", ["id", "sampling"])
def test_r18_memory_invariants(slots: int, order: str) -> None:
    run, counts, evictions = simulation(GradMAS(slots=slots, order=order), cohort=3), [0] * 6, 0
    for _ in range(12):
        ids, _ = run.sampling.invite(run.t)
        run.round()
        memory = run.state.server.memory
        held = [i for i in memory.ids.tolist() if i >= 0]
        assert len(held) == len(set(held)) <= slots and set(ids.tolist()) <= set(held)
        for i in ids.tolist():
            counts[i] += 1
        if slots == 6:
            assert memory.evictions == 0
            uses = dict(zip(memory.ids.tolist(), memory.uses.tolist(), strict=True))
            assert all(uses[i] == counts[i] for i in held)
    assert slots == 6 or memory.evictions > evictions


def test_r19_the_auxiliary_sequence_of_gradma() -> None:
    """u_t = (x_t - beta x_{t-1}) / (1 - beta), u_0 = x_0: u_{t+1} - u_t = -eta_g/(1 - beta) (d + m~_{t+1} - m_{t+1})."""
    beta, rate = 0.9, 0.8
    run = simulation(GradMAS(slots=6, beta1=beta, server_lr=rate), cohort=2)
    x, projected = [run.state.x], [run.state.server.m]
    for _ in range(12):
        run.round()
        x.append(run.state.x)
        projected.append(run.state.server.m)
    u = [x[0]] + [(x[t] - beta * x[t - 1]) / (1 - beta) for t in range(1, len(x))]
    moved = 0.0
    for t in range(12):
        start = simulation(FedAvg(), cohort=2)
        start.state, start.t = start.state._replace(x=x[t]), t
        start.position = _positions(t)
        start.round()
        d = x[t] - start.state.x
        m = beta * projected[t] + d
        torch.testing.assert_close(u[t + 1] - u[t], -rate / (1 - beta) * (d + projected[t + 1] - m), **EXACT)
        moved += float((projected[t + 1] - m).norm())
    assert moved > 1e-6


def _positions(rounds: int):  # type: ignore[no-untyped-def]
    counting = simulation(FedAvg(), cohort=2)
    for _ in range(rounds):
        counting.round()
    return counting.position


def test_the_gram_matrix_kept_up_to_date_is_the_one_from_scratch() -> None:
    """Only the cohort's rows are recomputed; in float32 it stays within 1e-5 of a new one, relative to the rows' lengths."""
    run = simulation(GradMAS(slots=4, beta2=0.9), cohort=3, dtype=torch.float32)
    for _ in range(60):
        run.round()
    memory = run.state.server.memory
    scratch = gram(memory.rows.double(), memory.rows.double())
    size = scratch.diagonal().sqrt()
    assert ((memory.products[0].double() - scratch) / size / size[:, None]).abs().max() < 1e-5
    tensorwise = simulation(GradMAS(slots=4, beta2=0.9, qp_scope="tensor"), cohort=3)
    for _ in range(10):
        tensorwise.round()
    memory = tensorwise.state.server.memory
    torch.testing.assert_close(memory.products.sum(0), gram(memory.rows, memory.rows), **EXACT)


def test_an_absent_clients_constraint_never_fades() -> None:
    """beta_2 scales a column, which the programme does not feel; after 500 rounds nothing has underflowed (spec C-3)."""
    alg = GradMAS(slots=3, beta2=0.1)
    run = simulation(alg, cohort=1, dtype=torch.float32)
    run.round()
    memory = run.state.server.memory
    aged = memory._replace(age=memory.age + 500)
    run.state = run.state._replace(server=run.state.server._replace(memory=aged))
    old = memory.rows[memory.ids >= 0][0]
    for _ in range(3):
        run.round()
        state = run.state.server
        if old.equal(state.memory.rows[0]):
            assert (old @ state.m) / old.norm() / state.m.norm() > -1e-5
    assert state.memory.age.max() > 400


def test_many_newcomers_find_a_row_in_a_full_memory_at_once() -> None:
    full = Memory.empty(4000, torch.zeros(1), 0)
    full, place = mem_red(full, torch.arange(4000))
    assert place.tolist() == list(range(4000))
    full, _ = mem_red(full, torch.arange(1000, 4000))  # 0 .. 999 are the least used
    begin = time.process_time()
    after, place = mem_red(full, torch.arange(5000, 7000))
    assert time.process_time() - begin < 2  # looking through all rows for each took a minute
    assert place.tolist() == list(range(2000)) and int(after.evictions) == 2000
    assert after.since[:2000].tolist() == list(range(4001, 6001)) and after.uses[:2000].tolist() == [1] * 2000
