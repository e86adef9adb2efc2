"""Exact relations between the methods, by their numbers: float64, the same cohorts and mini-batches on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import undrift.algorithms.gradma_w as gradma_w
from tests.small import SIZES, federation, path, simulation, tiny_mlp
from undrift.algorithms.domo import DOMO
from undrift.algorithms.domo_s import DOMOS
from undrift.algorithms.fedadagrad import FedAdagrad
from undrift.algorithms.fedadam import FedAdam
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.fedavglm import FedAvgLM
from undrift.algorithms.fedavglm_z import FedAvgLMZ
from undrift.algorithms.fedavgm import FedAvgM
from undrift.algorithms.fedavgslm import FedAvgSLM
from undrift.algorithms.fedavgslm_z import FedAvgSLMZ
from undrift.algorithms.fedcm import FedCM
from undrift.algorithms.feddyn import FedDyn
from undrift.algorithms.fedmim import FedMIM
from undrift.algorithms.fedprox import FedProx
from undrift.algorithms.fedproxm import FedProxM
from undrift.algorithms.fedsam import FedSAM
from undrift.algorithms.fedyogi import FedYogi
from undrift.algorithms.gradma import GradMA
from undrift.algorithms.gradma_s import GradMAS
from undrift.algorithms.gradma_w import GradMAW
from undrift.algorithms.mifa import MIFA
from undrift.algorithms.mifam import MIFAM
from undrift.algorithms.mofedsam import MoFedSAM
from undrift.simulate.simulation import Simulation

N = len(SIZES)
EXACT = {"rtol": 1e-10, "atol": 1e-12}
ALL: dict[str, Any] = dict(cohort=N)
UNEQUAL: dict[str, Any] = dict(epochs=1, batch=4)  # K_i from 1 to 9
FALLING: dict[str, Any] = dict(epochs=1, batch=4, lr_decay=0.8, lr_drops=(2,), lr_drop=0.5)


def same(one: Any, other: Any, rounds: int = 4, **settings: Any) -> None:
    """Both algorithms walk the same path."""
    torch.testing.assert_close(
        path(simulation(one, **settings), rounds), path(simulation(other, **settings), rounds), **EXACT
    )


def different(one: Any, other: Any, rounds: int = 4, **settings: Any) -> None:
    """Otherwise a relation would hold for nothing."""
    assert not torch.allclose(
        path(simulation(one, **settings), rounds), path(simulation(other, **settings), rounds), rtol=1e-6
    )


def models(run: Simulation, rounds: int) -> Tensor:
    """x_0 to x_T."""
    return torch.cat([run.net.without_padding(run.state.x, "model")[None], path(run, rounds)])


def fedavg_update(run: Simulation, **settings: Any) -> Tensor:
    """The mean update that FedAvg would see in the next round of this run."""
    other = simulation(FedAvg(lr=run.alg.lr), **settings)
    other.state, other.t, other.position = other.state._replace(x=run.state.x), run.t, run.position.copy()
    other.round()
    return run.state.x - other.state.x


def full_gradient(x: Tensor, run: Simulation) -> Tensor:
    """The mean over clients of their full gradients at x, by autograd on the module."""
    module, fed = tiny_mlp().double(), run.data
    torch.nn.utils.vector_to_parameters(run.net.without_padding(x, "model"), module.parameters())
    held = fed.train.held
    assert held is not None
    total = torch.zeros((), dtype=torch.float64)
    for i in range(fed.clients):
        rows = fed.members[fed.start[i] : fed.start[i] + fed.sizes[i]]
        total = total + F.cross_entropy(module(held[rows].double()), fed.train.targets[rows]) / fed.clients
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(module.parameters()))])
    return F.pad(gradient, (0, run.net.layout.padding))


class Heard:
    """An oracle that writes down what it answers."""

    def __init__(self, oracle: Any, log: list[Tensor]) -> None:
        self.oracle, self.log = oracle, log
        self.layout = oracle.layout

    def grad(self, *arguments: Any, **options: Any) -> Tensor:
        g: Tensor = self.oracle.grad(*arguments, **options)
        self.log.append(g)
        return g


class HeardMIM(FedMIM):
    log: list[Tensor] = []

    def local_step(self, down: Any, client: Any, work: Any, oracle: Any) -> Any:
        return super().local_step(down, client, work, Heard(oracle, self.log))


class HeardFusion:
    """DOMO's gradients, its buffers after each step, and what goes up."""

    log: list[Tensor] = []
    b: list[Tensor] = []
    d: list[Tensor] = []

    def local_step(self, down: Any, client: Any, work: Any, oracle: Any) -> Any:
        moved = super().local_step(down, client, work, Heard(oracle, self.log))  # type: ignore[misc]
        self.b.append(moved.opt.b)
        return moved

    def local_end(self, down: Any, client: Any, work: Any) -> Any:
        up, client = super().local_end(down, client, work)  # type: ignore[misc]
        self.d.append(up.d)
        return up, client


class HeardDOMO(HeardFusion, DOMO):
    pass


class HeardDOMOS(HeardFusion, DOMOS):
    pass


@pytest.fixture(autouse=True)
def empty_logs() -> None:
    for log in (HeardMIM.log, HeardFusion.log, HeardFusion.b, HeardFusion.d):
        log.clear()


def test_r2_without_momentum_fedproxm_is_fedprox_and_mifam_is_mifa() -> None:
    same(FedProxM(mu=0.5, beta1=0.0, server_lr=0.8), FedProx(mu=0.5, server_lr=0.8), **FALLING)
    same(MIFAM(beta1=0.0, server_lr=0.8), MIFA(server_lr=0.8), **FALLING)
    different(FedProxM(mu=0.5, beta1=0.5), FedProx(mu=0.5))
    different(MIFAM(beta1=0.5), MIFA())


@pytest.mark.parametrize("form", ["paper", "scaled"])
def test_r6_feddyns_h_is_the_mean_of_all_clients(form: str) -> None:
    run = simulation(FedDyn(alpha=0.3, form=form), cohort=2, weights="size")
    for _ in range(6):
        run.round()
        rows = run.clients.columns[0][: len(run.clients.row)]
        torch.testing.assert_close(run.state.companion.h, rows.sum(0) / N, **EXACT)
    assert len(run.clients.row) > 2 and run.state.companion.h.norm() > 1e-3


def test_r6_feddyns_two_forms_are_one() -> None:
    for settings in ({}, FALLING, {"weights": "size"}):
        same(FedDyn(alpha=0.3, weight_decay=0.01), FedDyn(alpha=0.3, form="scaled", weight_decay=0.01), 6, **settings)


def test_r6_feddyns_first_round_is_fedprox_on_the_clients() -> None:
    """On the server h / alpha is then (S/N) of the mean update."""
    dyn, prox = models(simulation(FedDyn(alpha=0.4), **UNEQUAL), 1), models(simulation(FedProx(mu=0.4), **UNEQUAL), 1)
    torch.testing.assert_close(dyn[1] - dyn[0], (1 + 3 / N) * (prox[1] - prox[0]), **EXACT)


def test_r8_mifa_with_everybody_is_fedavg_and_mifam_fedavgm() -> None:
    same(MIFA(server_lr=0.8), FedAvg(server_lr=0.8), **ALL | FALLING)
    same(MIFA(wait=True), FedAvg(), **ALL | UNEQUAL)
    same(MIFAM(beta1=0.6), FedAvgM(beta1=0.6), **ALL | FALLING)
    different(MIFA(), FedAvg())


def test_r8_mifas_first_round_is_damped_and_D_is_the_mean_of_all_last_updates() -> None:
    first, plain = models(simulation(MIFA(), **UNEQUAL), 1), models(simulation(FedAvg(), **UNEQUAL), 1)
    torch.testing.assert_close(first[1] - first[0], 3 / N * (plain[1] - plain[0]), **EXACT)
    for alg in (MIFA(server_lr=0.7), MIFAM(beta1=0.5), MIFA(wait=True)):
        run = simulation(alg, cohort=2)
        for _ in range(8):
            run.round()
            rows = run.clients.columns[0][: len(run.clients.row)]
            torch.testing.assert_close(run.state.companion.D, rows.sum(0) / N, **EXACT)
        assert len(run.clients.row) > 3


def test_r8_mifa_that_waits_stays_until_everybody_has_answered() -> None:
    run = simulation(MIFA(wait=True), cohort=3)
    start, moved = run.state.x, 0
    for _ in range(12):
        run.round()
        met = len(run.clients.row)
        assert torch.equal(run.state.x, start) == (met < N)
        moved += met == N
    assert 1 <= moved < 12


def test_r11_client_momentum_and_sharpness_vanish() -> None:
    same(FedCM(alpha=1.0), FedAvg(), **FALLING)
    same(FedSAM(radius=0.0), FedAvg(), **FALLING)
    same(MoFedSAM(radius=0.0, alpha=0.3), FedCM(alpha=0.3), **FALLING)
    same(MoFedSAM(radius=0.2, alpha=1.0), FedSAM(radius=0.2), **FALLING)
    different(MoFedSAM(radius=0.2, alpha=0.3), FedCM(alpha=0.3))


def test_r12_the_first_steps_of_adam_and_yogi_coincide_from_v_zero() -> None:
    same(FedAdam(), FedYogi(), 1, **UNEQUAL)
    different(FedAdam(), FedYogi(), 3, **UNEQUAL)
    same(FedAdam(beta1=0.0, beta2=0.0), FedAdagrad(), 1, **UNEQUAL)  # also Adagrad's: v = d^2


def test_r12_fedadam_without_memory_normalises_each_coordinate() -> None:
    """C-5: for FedAdam only; eta_g d / (|d| + tau) in every round."""
    run = simulation(FedAdam(beta1=0.0, beta2=0.0, server_lr=0.3, tau=0.01), **UNEQUAL)
    for _ in range(4):
        d, x = fedavg_update(run, **UNEQUAL), run.state.x
        run.round()
        torch.testing.assert_close(x - run.state.x, 0.3 * d / (d.abs() + 0.01), **EXACT)


def test_r13_fedavglm_of_one_client_is_momentum_sgd() -> None:
    run = simulation(FedAvgLM(momentum=0.8, weight_decay=0.01), fed=federation((33,)), cohort=1, batch=11)
    held, y = run.data.train.held, run.data.train.targets
    assert held is not None
    module = tiny_mlp().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01)
    found = path(run, 4)
    for t in range(4):
        table = run.data.table(run.settings.plan, 0, t, torch.tensor([0]).numpy(), torch.tensor([3 * t]).numpy())
        for rows in table.index[0]:
            optimizer.zero_grad()
            F.cross_entropy(module(held[rows].double()), y[rows]).backward()
            optimizer.step()
        torch.testing.assert_close(found[t], torch.cat([p.detach().flatten() for p in module.parameters()]), **EXACT)


def test_r13_fedavglm_of_everybody_with_one_step_is_centralised_momentum_sgd() -> None:
    run = simulation(FedAvgLM(momentum=0.7), cohort=N, steps=1, batch=100)
    x, b = run.state.x, torch.zeros_like(run.state.x)
    for _ in range(5):
        b = 0.7 * b + full_gradient(x, run)
        x = x - 0.1 * b
        run.round()
        torch.testing.assert_close(run.state.x, x, **EXACT)


def test_r13_local_momentum_of_zero_or_over_one_step_changes_nothing() -> None:
    for settings in (UNEQUAL, FALLING):
        same(FedAvgLM(momentum=0.0), FedAvg(), **settings)
        same(FedAvgLMZ(momentum=0.0), FedAvg(), **settings)
        server = FedAvgM(beta1=0.6, server_lr=0.8, momentum_units="grad")
        same(FedAvgSLM(momentum=0.0, beta1=0.6, server_lr=0.8), server, **settings)
        same(FedAvgSLMZ(momentum=0.0, beta1=0.6, server_lr=0.8), server, **settings)
    same(FedAvgLMZ(momentum=0.9), FedAvg(), steps=1)
    different(FedAvgLM(momentum=0.9), FedAvg(), steps=1)


def test_r17_with_one_step_from_the_servers_model_the_projection_does_nothing() -> None:
    for scope in ("global", "tensor"):
        same(GradMAW(prev="global", qp_scope=scope), FedAvg(), steps=1)
        same(GradMA(prev="global", qp_scope=scope, beta1=0.6), GradMAS(qp_scope=scope, beta1=0.6), steps=1)
    different(GradMAW(prev="last_local", lr=1.0), FedAvg(lr=1.0), 8, steps=1, batch=2, cohort=N)
    different(GradMAW(prev="global"), FedAvg(), steps=3)


class Seen:
    """Every projection of a run: p, the three rows, the result."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []
        solve = gradma_w.project_three_parts

        def record(p: Tensor, M: list[Tensor], segments: list[slice], rho: float = 0.0) -> tuple[Tensor, Tensor]:
            u, active = solve(p, M, segments, rho)
            self.calls.append((p, torch.stack(M, -2), u))
            return u, active

        patch.setattr(gradma_w, "project_three_parts", record)

    def last_round(self, run: Simulation, steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        run.round()
        return self.calls[-steps:]


@pytest.mark.parametrize("kind", [GradMAW, GradMA])
def test_r17_at_the_first_step_from_the_servers_model_g_is_left_bit_for_bit(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, run = Seen(monkeypatch), simulation(kind(prev="global"))
    for _ in range(4):
        p, M, u = seen.last_round(run, 3)[0]
        assert torch.equal(u, p) and torch.equal(M[..., 0, :], p) and torch.equal(M[..., 1, :], p)
        assert not M[..., 2, :].any()


@pytest.mark.parametrize("batch", [4, 100])
def test_c4_at_the_second_step_the_first_two_rows_are_one(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """x_i^{k-1} is x_t then; at the third step no longer.

    With small batches the gradients are the same bit for bit. Larger ones may be summed in another order in each place of a
    stacked product: to the last bit.
    """
    seen, run = Seen(monkeypatch), simulation(GradMAW(lr=0.3), batch=batch)
    for _ in range(4):
        _, second, third = seen.last_round(run, 3)
        torch.testing.assert_close(second[1][..., 0, :], second[1][..., 1, :], rtol=0, atol=0 if batch == 4 else 1e-15)
        assert not torch.equal(third[1][..., 0, :], third[1][..., 1, :])


def test_c4_with_full_batches_the_second_step_is_orthogonal_to_the_first_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """M_3 = -eta_l M_2, so that the two leave only what is orthogonal to g_0."""
    seen, run = Seen(monkeypatch), simulation(GradMAW(prev="global", lr=0.2), batch=100)
    for _ in range(4):
        (g0, _, _), (p, M, u), _ = seen.last_round(run, 3)
        torch.testing.assert_close(M[..., 1, :], g0, **EXACT)  # the same samples, in another order
        torch.testing.assert_close(M[..., 2, :], -0.2 * g0, rtol=1e-10, atol=1e-14)
        cosine = (u * g0).sum(-1) / (u.norm(dim=-1) * g0.norm(dim=-1))
        assert float(cosine.abs().max()) < 1e-9
        assert float(((p * g0).sum(-1) / (p.norm(dim=-1) * g0.norm(dim=-1))).min()) > 0.1  # before, they agreed


def test_r20_fedmim_without_inertia_is_fedavg_and_with_one_step_fedcm() -> None:
    same(FedMIM(alpha=(0.0, 0.0), beta=(0.0,)), FedAvg(), **FALLING)
    same(FedMIM(alpha=(0.6, 0.0), beta=(0.0, 0.0)), FedCM(alpha=0.4), 5, **UNEQUAL)
    same(FedMIM(alpha=(0.6,), beta=(0.0,)), FedCM(alpha=0.4), 5, **UNEQUAL)
    different(FedMIM(alpha=(0.6,), beta=(0.5,)), FedCM(alpha=0.4))
    different(FedMIM(alpha=(0.6,), beta=(0.0,)), FedCM(alpha=0.4), **FALLING)  # delta is not rescaled, Delta is


@pytest.mark.parametrize(
    ("alpha", "beta"), [((0.5,), (0.4,)), ((0.6, 0.3), (0.9, 0.1)), ((0.3, 0.2, 0.1), (0.5, 0.4)), ((0.4,), (0.2, 0.1))]
)
def test_r20_lemmas_5_and_6_of_fedmim(alpha: tuple[float, ...], beta: tuple[float, ...]) -> None:
    """delta_{t+1} = A delta~_t + sum alpha_j delta_{t+1-j}, and u_{t+1} = u_t - K delta~_t."""
    rounds, K, eta, A = 6, 3, 0.1, 1 - sum(alpha)
    run = simulation(HeardMIM(alpha=alpha, beta=beta, lr=eta))
    x, mean = [run.state.x], []
    for _ in range(rounds):
        run.round()
        mean.append(eta * torch.stack(HeardMIM.log[-K:]).mean((0, 1)))  # delta~_t, over steps and clients
        x.append(run.state.x)
    zero = torch.zeros_like(x[0])

    def delta(t: int) -> Tensor:
        return (x[t - 1] - x[t]) / K if t >= 1 else zero

    def u(t: int) -> Tensor:
        return x[t] - K / A * sum((sum(alpha[j:]) * delta(t - j) for j in range(len(alpha))), zero)

    for t in range(rounds):
        inertia = sum((a * delta(t + 1 - j) for j, a in enumerate(alpha, 1)), zero)
        torch.testing.assert_close(delta(t + 1), A * mean[t] + inertia, **EXACT)
        torch.testing.assert_close(u(t + 1), u(t) - K * mean[t], **EXACT)


@pytest.mark.parametrize("nesterov", [False, True])
def test_r20_fedmim_of_one_client_with_one_step_is_heavy_ball_or_nesterov(nesterov: bool) -> None:
    a, eta = 0.6, 0.1
    alg = FedMIM(alpha=(a,), beta=(a if nesterov else 0.0,), lr=eta)
    run = simulation(alg, fed=federation((33,)), cohort=1, steps=1, batch=100)
    before = x = run.state.x
    for _ in range(6):
        ahead = x + a * (x - before)
        before, x = x, ahead - (1 - a) * eta * full_gradient(ahead if nesterov else x, run)
        run.round()
        torch.testing.assert_close(run.state.x, x, **EXACT)


@pytest.mark.parametrize("settings", [{}, UNEQUAL, FALLING, FALLING | {"weights": "size"}], ids=str)
def test_r21_domo_without_fusion(settings: dict[str, Any]) -> None:
    common: dict[str, Any] = dict(server_lr=0.8, weight_decay=0.01)
    for kind in (DOMO, DOMOS):
        same(
            kind(beta=0.0, momentum=0.6, beta1=0.7, **common), FedAvgSLMZ(momentum=0.6, beta1=0.7, **common), **settings
        )
        server = FedAvgM(beta1=0.7, momentum_units="grad", **common)
        same(kind(beta=0.0, momentum=0.0, beta1=0.7, **common), server, **settings)
        same(kind(beta=0.0, momentum=0.6, beta1=0.0, **common), FedAvgLMZ(momentum=0.6, **common), **settings)
        same(kind(beta=0.0, momentum=0.0, beta1=0.0, **common), FedAvg(**common), **settings)
        averaged = FedAvgSLM(momentum=0.6, beta1=0.7, **common)
        same(kind(beta=0.0, momentum=0.6, beta1=0.7, buffers="average", **common), averaged, **settings)


def test_r21_the_first_round_of_domo_does_not_depend_on_the_fusion() -> None:
    for kind in (DOMO, DOMOS):
        for beta in (0.3, 0.9):
            same(kind(beta=beta), FedAvgSLMZ(momentum=0.6), 1, **UNEQUAL)
            different(kind(beta=beta), FedAvgSLMZ(momentum=0.6), 2, **UNEQUAL)
    different(DOMO(), DOMOS(), 3)


@pytest.mark.parametrize("kind", [DOMO, DOMOS])
def test_r22_domos_momentum_inferred_from_models_is_the_servers(kind: Any) -> None:
    """Also where rate, steps and weights change: with the rate and steps of the round before."""
    run = simulation(kind(beta1=0.7, server_lr=0.6), **FALLING, weights="size")
    for _ in range(6):
        run.round()
        torch.testing.assert_close(run.state.companion.M, run.state.server.m, **EXACT)
    assert run.state.server.m.norm() > 1e-3


@pytest.mark.parametrize("kind", [HeardDOMO, HeardDOMOS])
def test_r22_domos_y_and_z_within_a_round(kind: Any) -> None:
    """What goes up is eta_l sum_k b; y_{t+1} - y_t and z_{k+1} - z_k follow the mean buffers and the mean gradients."""
    K, eta, eta_g, mu_s, mu_l = 3, 0.1, 0.7, 0.6, 0.5
    run = simulation(kind(lr=eta, server_lr=eta_g, beta1=mu_s, momentum=mu_l, beta=0.8))
    before = x = run.state.x
    for t in range(5):
        y = x if t == 0 else (x - mu_s * before) / (1 - mu_s)
        run.round()
        g, b = torch.stack(HeardFusion.log[-K:]), torch.stack(HeardFusion.b[-K:])  # [K, S, P]
        torch.testing.assert_close(HeardFusion.d[-1], eta * b.sum(0), **EXACT)  # from models and from buffers
        before, x = x, run.state.x
        rate = eta_g * eta / (1 - mu_s)
        torch.testing.assert_close((x - mu_s * before) / (1 - mu_s) - y, -rate * b.sum(0).mean(0), **EXACT)
        held = torch.cat([torch.zeros_like(b[:1]), b]).mean(1)  # mean b^(0), ..., b^(K)
        z = [y - rate * held[: k + 1].sum(0) - mu_l * rate / (1 - mu_l) * held[k] for k in range(K + 1)]
        for k in range(K):
            torch.testing.assert_close(z[k + 1] - z[k], -rate / (1 - mu_l) * g[k].mean(0), **EXACT)
