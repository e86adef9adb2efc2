"""Exact relations of FedProx, FedAvgM and SCAFFOLD to FedAvg and to plain SGD, by their numbers (float64)."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from tests.small import SIZES, federation, path, simulation, tiny_mlp
from undrift.algorithms.base import LocalSGD
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.fedavgm import FedAvgM
from undrift.algorithms.fedprox import FedProx, Proximal
from undrift.algorithms.gradma_s import GradMAS, ServerMemory
from undrift.algorithms.scaffold import ControlVariates, Scaffold

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def test_r1_fedprox_without_a_penalty_or_with_one_step_is_fedavg() -> None:
    torch.testing.assert_close(path(simulation(FedProx(mu=0.0)), 4), path(simulation(FedAvg()), 4), **EXACT)
    torch.testing.assert_close(
        path(simulation(FedProx(mu=5.0), steps=1), 4), path(simulation(FedAvg(), steps=1), 4), **EXACT
    )


def test_r2_fedavgm_without_momentum_is_fedavg() -> None:
    torch.testing.assert_close(path(simulation(FedAvgM(beta1=0.0)), 4), path(simulation(FedAvg()), 4), **EXACT)


def test_fedavgm_has_its_closed_form() -> None:
    """x_T = x_0 - eta_g sum_t (1 - beta^(T-t)) / (1 - beta) d_t."""
    run = simulation(FedAvgM(beta1=0.6, server_lr=0.7))
    x0 = run.net.without_padding(run.state.x, "model")
    points = torch.cat([x0[None], path(run, 5)])
    m, ds = torch.zeros_like(x0), []
    for t in range(5):  # d_t from m_{t+1} = beta m_t + d_t and x_{t+1} = x_t - eta_g m_{t+1}
        new = (points[t] - points[t + 1]) / 0.7
        ds.append(new - 0.6 * m)
        m = new
    closed = x0 - 0.7 * sum((1 - 0.6 ** (5 - t)) / 0.4 * d for t, d in enumerate(ds))
    torch.testing.assert_close(points[-1], closed, **EXACT)


def test_r3_gradient_units_equal_parameter_units_at_constant_rate_and_steps() -> None:
    param, grad = (simulation(FedAvgM(momentum_units=units)) for units in ("param", "grad"))
    torch.testing.assert_close(path(param, 5), path(grad, 5), **EXACT)


def test_r3_with_changing_steps_gradient_units_rescale_the_momentum() -> None:
    """m_{t+1} = beta (K_t / K_{t-1}) m_t + d, seen with cohorts whose mean number of steps changes."""
    run, mean = simulation(FedAvgM(beta1=0.5, momentum_units="grad"), epochs=1, cohort=2), []
    x, m, d_all = [run.state.x], torch.zeros_like(run.state.x), []
    for _ in range(4):
        ids, _ = run.sampling.invite(run.t)
        mean.append(run.settings.plan.steps_of(run.data.sizes[ids.numpy()]).mean())
        fedavg = simulation(FedAvg(), epochs=1, cohort=2)
        fedavg.state, fedavg.t = fedavg.state._replace(x=run.state.x), run.t
        before = fedavg.state.x
        fedavg.round()
        d_all.append(before - fedavg.state.x)
        run.round()
        x.append(run.state.x)
    assert len(set(mean)) > 1
    for t, d in enumerate(d_all):
        m = 0.5 * (mean[t] / mean[t - 1] if t else 1.0) * m + d
        torch.testing.assert_close(x[t] - x[t + 1], m, **EXACT)


def plain_sgd(batches: list[tuple[torch.Tensor, torch.Tensor]], lr: float) -> torch.Tensor:
    module = copy.deepcopy(tiny_mlp()).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_r4_one_client_is_sgd() -> None:
    run = simulation(FedAvg(), fed=federation((33,)), cohort=1, batch=11)
    x, y = run.data.train.held, run.data.train.targets
    assert x is not None
    batches = []
    for t in range(4):
        table = run.data.table(run.settings.plan, 0, t, torch.tensor([0]).numpy(), torch.tensor([3 * t]).numpy())
        batches += [(x[rows].double(), y[rows]) for rows in table.index[0]]
    torch.testing.assert_close(path(run, 4)[-1], plain_sgd(batches, 0.1), **EXACT)


def test_r4_one_step_of_everybody_is_centralised_sgd_with_the_mean_gradient() -> None:
    run = simulation(FedAvg(server_lr=0.5), cohort=len(SIZES), steps=1, batch=100)
    module, fed = tiny_mlp().double(), run.data
    x, y = fed.train.held, fed.train.targets
    assert x is not None
    found = path(run, 3)
    for t in range(3):
        total = 0.0
        for i in range(len(SIZES)):
            rows = fed.members[fed.start[i] : fed.start[i] + fed.sizes[i]]
            total = total + F.cross_entropy(module(x[rows].double()), y[rows]) / len(SIZES)
        grads = torch.autograd.grad(total, list(module.parameters()))
        with torch.no_grad():
            for p, g in zip(module.parameters(), grads, strict=True):
                p -= 0.5 * 0.1 * g
        torch.testing.assert_close(found[t], torch.cat([p.detach().flatten() for p in module.parameters()]), **EXACT)


def test_r5_scaffold() -> None:
    """c is the mean of all c_i; round 0 is FedAvg; with one client the corrections cancel."""
    run = simulation(Scaffold(lr=0.1), cohort=2)
    first = path(run, 1)
    torch.testing.assert_close(first, path(simulation(FedAvg(lr=0.1), cohort=2), 1), **EXACT)
    for _ in range(6):
        run.round()
        rows = run.clients.columns[0][: len(run.clients.row)]
        torch.testing.assert_close(run.state.companion.c, rows.sum(0) / len(SIZES), **EXACT)
    assert len(run.clients.row) > 2 and run.state.companion.c.norm() > 1e-3
    one = federation((33,))
    alone, sgd = simulation(Scaffold(lr=0.1), fed=one, cohort=1), simulation(FedAvg(lr=0.1), fed=one, cohort=1)
    torch.testing.assert_close(path(alone, 4), path(sgd, 4), **EXACT)


def test_r40_size_weights_are_uniform_weights_for_equal_clients() -> None:
    equal = federation((12, 12, 12, 12))
    size, uniform = (path(simulation(FedAvg(), fed=equal, weights=w), 3) for w in ("size", "uniform"))
    torch.testing.assert_close(size, uniform, **EXACT)
    size, uniform = (path(simulation(FedAvg(), weights=w), 3) for w in ("size", "uniform"))
    assert (size - uniform).abs().max() > 1e-4


def test_any_worker_part_joins_any_server_part() -> None:
    """Parts are composed, not copied: proximal or controlled clients with a remembering server, made on the spot."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Proximal_Memory(Proximal, ServerMemory):
        pass

    @dataclass(frozen=True)
    class Controlled_Memory(ControlVariates, ServerMemory):
        pass

    @dataclass(frozen=True)
    class Plain_Memory(LocalSGD, ServerMemory):
        pass

    memory = path(simulation(Plain_Memory(slots=6)), 4)
    assert torch.equal(memory, path(simulation(GradMAS(slots=6)), 4))
    assert torch.equal(memory, path(simulation(Proximal_Memory(mu=0.0, slots=6)), 4))
    assert (memory - path(simulation(Proximal_Memory(mu=1.0, slots=6)), 4)).abs().max() > 1e-4
    assert (memory - path(simulation(Controlled_Memory(slots=6)), 4)).abs().max() > 1e-4
