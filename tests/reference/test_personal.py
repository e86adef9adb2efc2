"""The methods that leave every client a model of its own, against plain references, and their exact relations."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference import plain_personal as plain
from tests.small import CPU, SIZES, federation
from undrift.algorithms.base import Cohort
from undrift.algorithms.pulled import pull
from undrift.core.layout import Layout
from undrift.data.batches import Plan
from undrift.jobs.registry import algorithm_class
from undrift.oracle.net import Net
from undrift.simulate.evaluate import accuracy
from undrift.simulate.personal_scores import personal_models
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation

N = len(SIZES)
PLAIN = {
    "local": plain.Local, "softpull": plain.SoftPull, "ft": plain.FT, "apfl": plain.APFL, "per-fedavg": plain.PerFedAvg,
    "pfedme": plain.PFedMe, "fedsm": plain.FedSM, "fedsm-extra": plain.FedSMExtra, "ensemble": plain.Ensemble,
    "ditto": plain.Ditto, "fedper": plain.FedPer, "fedrep": plain.FedRep, "fedbabu": plain.FedBABU, "fedbn": plain.FedBN,
}  # fmt: skip
EPOCH, STEPS = Plan(batch=7, epochs=1), Plan(batch=4, steps=3)
ADAM = dict(optimizer="adam", lr=0.02)


class Case(NamedTuple):
    name: str
    about: str
    fields: dict[str, Any]
    plan: Plan = EPOCH
    weights: str = "uniform"
    cohort: int = N
    norm: bool = False
    sampling: str = "fixed"

    def __str__(self) -> str:
        return f"{self.name}, {self.about}"


CASES = [
    Case("local", "sgd", dict(lr=0.1)),
    Case("local", "adam, batch norm", ADAM, norm=True),
    Case("softpull", "adam", dict(lam=0.6) | ADAM, STEPS),
    Case("softpull", "sgd, some clients, batch norm", dict(lam=0.8, lr=0.1), STEPS, cohort=3, norm=True),
    Case("softpull", "one client a round", dict(lam=0.3, lr=0.1), STEPS, cohort=1),
    Case("ft", "sgd", dict(lr=0.1, begin=2)),
    Case("ft", "adam, by size, batch norm", dict(begin=2) | ADAM, weights="size", norm=True),
    Case("ft", "adam, kept", dict(begin=2, keep_moments=True) | ADAM),
    Case("ft", "adam, kept, one tuned later", dict(begin=2, keep_moments=True) | ADAM, cohort=4, norm=True),
    Case("apfl", "sgd", dict(lr=0.1, lam=0.4), STEPS),
    Case("apfl", "adam, by size, batch norm", dict(lam=0.7) | ADAM, weights="size", norm=True),
    Case("apfl", "adaptive", dict(lr=0.2, lam=0.5, adaptive=True, lam_lr=0.5), cohort=4),
    Case("per-fedavg", "first order", dict(lr=0.1, alpha=0.3), STEPS),
    Case("per-fedavg", "Hessian-free, by size", dict(lr=0.1, alpha=0.3, hessian_free=True), STEPS, "size"),
    Case("pfedme", "plain", dict(lr=0.05, lam=4.0, inner_lr=0.1, inner_steps=3), STEPS, cohort=4),
    Case("pfedme", "beta, by size", dict(lr=0.05, lam=3.0, inner_lr=0.1, inner_steps=2, server_lr=0.7), weights="size"),
    Case("pfedme", "reset, decayed", dict(lr=0.05, lam=4.0, inner_lr=0.1, inner_steps=2, reset=True, theta_decay=0.5)),
    Case("fedsm", "per batch, sgd", dict(lr=0.1, lam=0.6, selector_mode="per_batch", selector_lr=0.1), STEPS),
    Case("fedsm", "per batch, adam, by size", dict(selector_mode="per_batch", selector_lr=0.01) | ADAM, weights="size"),
    Case("fedsm", "uniform selector", dict(selector_weights="uniform", selector_lr=0.01) | ADAM, weights="size"),
    Case("fedsm", "synced, sgd, some clients", dict(lr=0.1, selector_lr=0.2), cohort=4),
    Case("fedsm", "synced, adam, by size, batch norm", dict(selector_lr=0.01, lam=0.5) | ADAM, weights="size", norm=True),
    Case("fedsm-extra", "sgd", dict(lr=0.1, selector_lr=0.1, begin=2), STEPS),
    Case("fedsm-extra", "adam, by size, batch norm", dict(selector_lr=0.01, begin=2) | ADAM, weights="size", norm=True),
    Case("ensemble", "adam, by size", dict(selector_lr=0.01, begin=2, lam=0.5) | ADAM, weights="size"),
    Case("ensemble", "sgd, batch norm", dict(lr=0.1, selector_lr=0.1, begin=1), norm=True),
    Case("ditto", "sgd, by size", dict(lr=0.1, lam=0.7), STEPS, "size"),
    Case("ditto", "adam, some clients, batch norm", dict(lam=2.0) | ADAM, STEPS, cohort=4, norm=True),
    Case("ditto", "adam, kept", dict(lam=0.5, keep_moments=True) | ADAM, cohort=4),
    Case("fedper", "sgd, some clients, by size", dict(lr=0.1), EPOCH, "size", cohort=4),
    Case("fedper", "adam, batch norm", ADAM, STEPS, norm=True),
    Case("fedrep", "sgd, some clients", dict(lr=0.1, head_steps=2), STEPS, cohort=4),
    Case("fedrep", "adam, by size, batch norm", dict(head_steps=1) | ADAM, weights="size", norm=True),
    Case("fedbabu", "sgd, head", dict(lr=0.1, begin=2), STEPS),
    Case("fedbabu", "adam, all, batch norm", dict(begin=2, tunes="all") | ADAM, STEPS, norm=True),
    Case("fedbn", "sgd, some clients, by size", dict(lr=0.1), EPOCH, "size", cohort=4, norm=True),
    Case("fedbn", "adam", ADAM, STEPS, norm=True),
]  # fmt: skip
ABSENT = [  # in replayed rounds the places of clients that are not there are empty
    Case("softpull", "whoever comes", dict(lam=0.6, lr=0.1), STEPS, cohort=4, sampling="bernoulli"),
    Case("ft", "whoever comes", dict(begin=2, keep_moments=True) | ADAM, STEPS, cohort=3, sampling="bernoulli"),
    Case("fedsm-extra", "whoever comes", dict(lr=0.1, selector_lr=0.1, begin=2), STEPS, cohort=4, sampling="bernoulli"),
]


def model(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    between = (
        [nn.BatchNorm1d(4)] if norm else []
    )  # no bias before it: Adam would make steps of a gradient that is rounding
    return nn.Sequential(nn.Linear(5, 4, bias=not norm), *between, nn.Tanh(), nn.Linear(4, 3)).double()


def selector(outputs: int) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, outputs)).double()


def simulation(name: str, fields: dict[str, Any], case: Case, execution: str = "stacked") -> Simulation:
    """A run; `replayed` is a form of `stacked` that a GPU has, here without one."""
    alg = algorithm_class(name)(**fields)
    sizes = tuple(max(n, 4) for n in SIZES) if case.norm else SIZES  # a mini-batch of one sample has no variance
    net = Net(model(case.norm), dtype=torch.float64)
    for other, (_, outputs) in alg.networks(N).items():
        net.add_network(other, Net(selector(outputs), dtype=torch.float64))
    how = "stacked" if execution == "replayed" else execution
    settings = Settings(case.cohort, case.plan, 0, case.weights, execution=how, sampling=case.sampling)
    run = Simulation(alg, net, federation(sizes), settings, {"accuracy": accuracy}, CPU)
    run.replays = execution == "replayed"
    return run


def batches(run: Simulation) -> dict[int, list[list[int]]]:
    """The rows of the next round's mini-batches."""
    part = run.attendance(run.t)
    table = run.data.table(run.settings.plan, 0, run.t, part.ids, run.position[part.ids])
    return {
        int(i): [table.index[s, k, : table.count[s, k]].tolist() for k in range(table.steps[s])]
        for s, i in enumerate(part.ids)
    }


def reference(run: Simulation, case: Case) -> plain.Personal:
    data = run.data.train
    assert data.held is not None
    chosen = run.net.networks["selector"].original if run.net.networks else None
    defaults = {"lam": 0.7, "head_steps": 2, "selector_mode": "full_batch_synced"}
    return PLAIN[case.name](
        run.net.original, data.held.double(), data.targets, run.data.sizes.tolist(), chosen,
        **(defaults | case.fields), weights=case.weights,
    )  # fmt: skip


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("execution", ["stacked", "pool"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_plain_reference(case: Case, execution: str) -> None:
    agree(case, execution)


@pytest.mark.parametrize("execution", ["stacked", "debug", "replayed"])
@pytest.mark.parametrize("case", ABSENT, ids=str)
def test_rounds_of_whoever_comes_equal_the_plain_reference(case: Case, execution: str) -> None:
    agree(case, execution)


def agree(case: Case, execution: str) -> None:
    """The algorithm does what the plain reference does."""
    run = simulation(case.name, case.fields, case, execution)
    theirs, entries = reference(run, case), run.net.layout.entries
    began = run.state.x.clone()
    for t in range(4):
        theirs.play(t, batches(run))
        run.rounds(1)
        assert (run.replay is not None) == (execution == "replayed")
        if case.name != "local":  # whose server's model stays
            close(run.state.x[:entries], plain.weights(theirs.G))
            if case.name in (
                "softpull",
                "fedsm",
                "fedsm-extra",
                "ensemble",
                "apfl",
                "ft",
                "ditto",
                "fedper",
                "fedrep",
                "fedbabu",
                "fedbn",
            ):
                close(run.state.buffers, plain.statistics(theirs.G))
        if case.name not in ("ft", "fedbabu") or t >= case.fields["begin"]:
            for i, served in enumerate(personal_models(run)):
                seen = i in theirs.seen or "clients.ids" not in run.tensors()
                if seen:
                    close(served.x[:entries], theirs.serves(i))
                if seen and case.name in ("local", "softpull", "apfl", "fedsm", "ditto", "fedbn"):
                    close(served.buffers, plain.statistics(theirs.own[i]))
        if run.net.networks:
            s = run.alg.selector(run.state.companion).x[: run.net.networks["selector"].layout.entries]
            close(s, plain.weights(theirs.S))
    if case.name != "local":
        assert (run.state.x - began).norm() > 1e-3


def both(a: str, b: str, one: dict[str, Any], two: dict[str, Any], case: Case, rounds: int = 3) -> list[Simulation]:
    runs = [simulation(a, one, case), simulation(b, two, case)]
    for _ in range(rounds):
        for run in runs:
            run.round()
    return runs


def own(run: Simulation) -> Tensor:
    return torch.stack([served.x for served in personal_models(run)])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_softpull_between_averaging_and_local(optimizer: str) -> None:
    base = dict(lr=0.05, optimizer=optimizer)
    case = Case("softpull", "", {})
    averaging, fedavg = both("softpull", "fedavg", dict(lam=1 / N) | base, dict(keep_moments=True) | base, case)
    close(averaging.state.x, fedavg.state.x)
    close(own(averaging), fedavg.state.x.expand(N, -1))
    alone, local = both("softpull", "local", dict(lam=1.0) | base, base, case)
    assert torch.equal(own(alone), own(local))
    assert (own(alone) - own(averaging)).norm() > 1e-3


def test_softpull_keeps_the_mean_and_contracts() -> None:
    v = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    even = torch.full((5, 1), 0.2, dtype=torch.float64)
    cohort = Cohort(torch.arange(5), torch.arange(5), even, even, 0.1, 5, Layout((), ()))
    for lam in (0.2, 0.5, 0.9, 1.0):
        after = pull(v, lam, cohort)
        close(after.mean(0), v.mean(0))
        close(after - v.mean(0), (5 * lam - 1) / 4 * (v - v.mean(0)))
    some = cohort._replace(there=torch.tensor([[1.0], [1.0], [1.0], [0.0], [0.0]], dtype=torch.float64))
    three = cohort._replace(ids=torch.arange(3), weight=even[:3])
    close(pull(v, 0.6, some)[:3], pull(v[:3], 0.6, three))


def test_fedsm_streams() -> None:
    base, case = dict(optimizer="adam", lr=0.02), Case("fedsm", "", {}, weights="size")
    fedsm, fedavg = both("fedsm", "fedavg", dict(lam=0.6) | base, dict(keep_moments=True) | base, case)
    close(fedsm.state.x, fedavg.state.x)
    fedsm, local = both("fedsm", "local", dict(lam=1.0) | base, base, case)
    close(own(fedsm), own(local))
    extra, again = both("fedsm-extra", "fedsm", dict(begin=9) | base, base, case)
    assert torch.equal(own(extra), own(again)) and torch.equal(extra.state.x, again.state.x)
    uniform = Case("fedsm", "", {})
    (run,) = [simulation("fedsm", dict(lam=1 / N) | base, uniform)]
    run.round()
    close(own(run), run.state.x.expand(N, -1))  # the same start, so after one round the streams agree


def test_apfl_at_its_ends() -> None:
    base, case = dict(optimizer="adam", lr=0.02), Case("apfl", "", {})
    one, local = both("apfl", "local", dict(lam=1.0) | base, base, case)
    close(own(one), own(local))
    zero, fedavg = both("apfl", "fedavg", dict(lam=0.0) | base, dict(keep_moments=True) | base, case)
    close(zero.state.x, fedavg.state.x)
    close(own(zero), zero.state.x.expand(N, -1))


def test_per_fedavg_and_pfedme_at_their_ends() -> None:
    case = Case("", "", {}, STEPS)
    plain_, fedavg = both("per-fedavg", "fedavg", dict(alpha=0.0, split=False, lr=0.1), dict(lr=0.1), case)
    close(plain_.state.x, fedavg.state.x)
    still, _ = both("pfedme", "fedavg", dict(lam=0.0, lr=0.1), {}, case)
    assert torch.equal(still.state.x, simulation("pfedme", {}, case).state.x)
    fields = dict(lam=2.0, lr=0.5, inner_lr=0.1, inner_steps=1, reset=True)
    once, fedavg = both("pfedme", "fedavg", fields, dict(lr=0.1), case)
    close(once.state.x, fedavg.state.x)
    exact, meta = both("ft", "fedavg", dict(begin=99, lr=0.1), dict(lr=0.1), case)
    assert torch.equal(exact.state.x, meta.state.x) and torch.equal(own(exact), exact.state.x.expand(N, -1))


@pytest.mark.parametrize("cohort", [N, 4])
@pytest.mark.parametrize("personal", ["softpull", "ft", "apfl", "per-fedavg", "pfedme"])
def test_fedsm_takes_any_personalisation(personal: str, cohort: int) -> None:
    """Its models are those of the method alone."""
    base = dict(lr=0.05, optimizer="momentum", keep_moments=True)
    fields = {"softpull": dict(lam=0.6), "ft": dict(begin=2), "apfl": dict(lam=0.4), "per-fedavg": dict(alpha=0.2),
              "pfedme": dict(lam=2.0, inner_lr=0.1, inner_steps=2)}[personal]  # fmt: skip
    case = Case("fedsm", "", {}, cohort=cohort)
    ours, alone = both("fedsm", personal, dict(personal=personal) | fields | base, fields | base, case, 4)
    if personal != "softpull" or cohort == N:  # a newcomer begins at x, which is another one there
        close(own(ours), own(alone))
    if personal != "softpull":
        close(ours.state.x, alone.state.x)


@pytest.mark.parametrize("name", ["ft", "fedsm-extra", "ensemble", "fedsm"])
@pytest.mark.parametrize("at", [1, 3])
def test_resumes_inside_either_phase(name: str, at: int) -> None:
    case = Case(name, "", {})
    fields = dict(optimizer="adam", lr=0.02, begin=2)
    whole, first, second = (simulation(name, fields, case) for _ in range(3))
    for _ in range(4):
        whole.round()
    for _ in range(at):
        first.round()
    second.restore({k: v.clone() for k, v in first.tensors().items()}, first.t)
    for _ in range(4 - at):
        second.round()
    kept = second.tensors()
    assert kept.keys() == whole.tensors().keys()
    assert all(torch.equal(kept[k], v) for k, v in whole.tensors().items())


@pytest.mark.parametrize("mode", ["per_batch", "full_batch_synced"])
@pytest.mark.parametrize("norm", [False, True])
def test_bytes_are_two_models_and_the_selector(mode: str, norm: bool) -> None:
    case = Case("fedsm", "", {}, norm=norm)
    run = simulation("fedsm", dict(selector_mode=mode, optimizer="adam", lr=0.01), case)
    model = 8 * (run.net.layout.entries + run.net.buffer_layout.entries)
    chooser = 8 * run.net.networks["selector"].layout.entries
    expected = N * (2 * model + (1 if mode == "per_batch" else 3) * chooser)
    for _ in range(2):
        record = run.round()
        assert (record.bytes_down, record.bytes_up) == (expected, expected)


@pytest.mark.parametrize("name", ["ft", "fedsm", "fedsm-extra", "ensemble"])
@pytest.mark.parametrize("execution", ["stacked", "replayed"])
def test_what_a_second_phase_needs_is_sent_once_to_each_client(name: str, execution: str) -> None:
    """Also to those that are invited later than in its first round, and after a resume."""
    fields = dict(begin=1, lr=0.1) | (dict(personal="ft") if name == "fedsm" else {})
    case = Case(name, "", {}, cohort=2, norm=True)
    run, again = (simulation(name, fields, case, execution) for _ in range(2))
    model, chooser = 8 * (run.net.layout.entries + run.net.buffer_layout.entries), 0
    if run.net.networks:
        chooser = 8 * run.net.networks["selector"].layout.entries
    once = model * (1 if name in ("ft", "fedsm") else N + 1)
    have: set[int] = set()
    run.rounds(1)
    for t in range(1, 7):
        ids = set(run.sampling.invite(t)[0].tolist())
        if t == 4:
            again.restore({k: v.clone() for k, v in run.tensors().items()}, t)
            run = again
        (record,) = run.rounds(1)
        assert record.bytes_down == len(ids - have) * once + 2 * chooser
        have |= ids
    assert len(have) > 2, "somebody came later"


def test_bytes_of_fedsm_extra() -> None:
    run = simulation("fedsm-extra", dict(begin=1, lr=0.1), Case("fedsm-extra", "", {}))
    model, chooser = 8 * run.net.layout.entries, 8 * run.net.networks["selector"].layout.entries
    first, second, third = (run.round() for _ in range(3))
    assert (first.bytes_down, first.bytes_up) == (2 * N * model, 2 * N * model)
    assert (second.bytes_down, second.bytes_up) == (N * ((N + 1) * model + chooser), N * chooser)
    assert (third.bytes_down, third.bytes_up) == (N * chooser, N * chooser)


def test_centralized_is_plain_training_on_everything() -> None:
    """torch.optim.SGD on all samples in one hand, batch after batch; rounds are only a way of counting."""
    case = Case("centralized", "momentum", dict(lr=0.1, optimizer="momentum", momentum=0.9), STEPS)
    run = simulation("centralized", case.fields, case)
    assert run.data.clients == 1 and int(run.data.sizes[0]) == sum(SIZES)
    module, data = copy.deepcopy(run.net.original), run.data.train
    assert data.held is not None
    met: set[int] = set()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for _ in range(4):
        for rows in batches(run)[0]:
            optimizer.zero_grad()
            F.cross_entropy(module(data.held[rows].double()), data.targets[rows]).backward()
            optimizer.step()
            met |= set(rows)
        run.round()
        close(run.state.x[: run.net.layout.entries], plain.weights(module))
    assert len(met) > max(SIZES)
