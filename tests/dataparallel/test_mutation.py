"""The references of the data-parallel methods notice a wrong sign: each + and - of their files is flipped, one at a time.

As in tests/reference/test_mutation.py, with simulated workers in float64. A new method is in by being listed.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.dataparallel.cases import LR, MOMENTUM, gradient, network, vector
from tests.reference import dp as plain
from tests.reference import signs
from undrift.compress import make_compressor
from undrift.dataparallel.def_ import Detached, GroupRates
from undrift.dataparallel.def_adamw import DetachedAdamW
from undrift.dataparallel.methods import FILES, METHODS, Method
from undrift.dataparallel.workers import SimulatedWorkers

WORKERS, STEPS, SEED, DECAY = 3, 8, 3, 0.05
BETAS, EPS = (0.8, 0.95), 1e-3
SIZES = [p.numel() for p in network().parameters()]
LAST = "a dimension, not a sign: what is split or joined has two dimensions, and the last one is the second"

# Signs that are not flipped: file, function and expression.
DENIED = {
    ("dataparallel/def_", "Detached.step", "-1 in torch.cat([dot(mean, c.kept), dot(c.kept, c.kept)], -1)"): LAST,
    ("dataparallel/def_", "Detached.estimate", "-1 in state.products.split(1, -1)"): LAST,
    (
        "dataparallel/def_",
        "Detached.step",
        "1.0 - MEMORY",
    ): "the factor of both products, of which only the ratio counts",
}


class Case(NamedTuple):
    """A method, what it is compressed with, and its reference's name."""

    method: Method
    wanted: str
    compressor: str = "rbgs"
    ratio: float = 7

    @property
    def lam(self) -> float | str:
        return self.method.lam if isinstance(self.method, Detached) else ""

    @property
    def tau(self) -> int:
        return self.method.average_every if isinstance(self.method, Detached) else 0

    def reference(self) -> tuple[list[Tensor], list[Tensor]]:
        """The paths of x and of the model that is returned."""
        x, g = vector(network()), partial(gradient, decay=DECAY)
        parts = [sum(SIZES)]
        mask = (
            plain.top_mask(parts, self.ratio)
            if self.compressor == "topk"
            else plain.block_mask(parts, self.ratio, SEED)
        )
        common: tuple[Any, ...] = (x, g, mask, WORKERS, STEPS, LR, MOMENTUM)
        bare = partial(gradient, decay=0.0)
        if self.wanted == "error_feedback":
            return plain.error_feedback(self.lam, *common, tau=self.tau)
        if self.wanted == "error_feedback_adamw":
            return plain.error_feedback_adamw(float(self.lam), x, bare, mask, WORKERS, STEPS, LR, BETAS, EPS, DECAY)
        if self.wanted in ("sgd", "adamw"):
            path = plain.sgd(x, g, WORKERS, STEPS, LR, MOMENTUM) if self.wanted == "sgd" else adamw(x)
            return path, path
        found: tuple[list[Tensor], list[Tensor]] = getattr(plain, self.wanted)(*common)
        return found

    def run(self) -> tuple[list[Tensor], list[Tensor]]:
        """The same on simulated workers."""
        together, method = SimulatedWorkers(WORKERS), self.method
        made = make_compressor(self.compressor, "flat", self.ratio, SEED, SIZES)
        state = method.start(vector(network()), together)
        z = state.x.expand(WORKERS, -1).clone()
        adam = dict(momentum=BETAS[0], momentum2=BETAS[1], epsilon=EPS, decay=DECAY) if method.decoupled else {}
        rates = [GroupRates(slice(0, sum(SIZES)), LR, **({"momentum": MOMENTUM} | adam))]
        xs, ys = [], []
        for t in range(STEPS):
            decay = 0.0 if method.decoupled else DECAY
            g = torch.stack([gradient(t, k, z[k], 0.0) for k in range(WORKERS)]).add_(z, alpha=decay)
            method.step(state, g, rates, t, made, together)
            method.point(state, z)
            xs.append(state.x.clone())
            ys.append(method.model(state, together).clone())
        return xs, ys

    def compare(self) -> str:
        """The first iteration that disagrees, or nothing."""
        wanted, found = self.reference(), self.run()
        pairs = [("x", wanted[0], found[0])]
        if self.method.returns == "y":
            pairs.append(("y", wanted[1], found[1]))
        for t in range(STEPS):
            for name, right, mine in pairs:
                gap = float((mine[t] - right[t]).norm() / right[t].norm())
                if not gap <= 1e-12:
                    return f"{name} in iteration {t}: {gap:.3g} apart"
        return ""


def adamw(x: Tensor) -> list[Tensor]:
    """torch.optim.AdamW on the mean gradient."""
    weight = x.clone().requires_grad_()
    optimizer, xs = torch.optim.AdamW([weight], LR, BETAS, EPS, DECAY), []
    for t in range(STEPS):
        here = weight.detach().clone()
        weight.grad = torch.stack([gradient(t, k, here, 0.0) for k in range(WORKERS)]).mean(0)
        optimizer.step()
        xs.append(weight.detach().clone())
    return xs


CASES: dict[str, Case] = {
    "sgd": Case(METHODS["sgd"], "sgd"),
    "adamw": Case(METHODS["adamw"], "adamw"),
    "ef": Case(METHODS["ef"], "error_feedback"),
    "saef": Case(METHODS["saef"], "error_feedback"),
    "saef, errors averaged": Case(Detached(1.0, "x", average_every=3), "error_feedback"),
    "psync": Case(METHODS["psync"], "csea"),
    "ef21": Case(METHODS["ef21"], "ef21"),
    "ef21, topk": Case(METHODS["ef21"], "ef21", "topk"),
    "ef21-sgdm": Case(METHODS["ef21-sgdm"], "ef21_sgdm"),
    "ef21-sgdm, topk": Case(METHODS["ef21-sgdm"], "ef21_sgdm", "topk"),
    "def": Case(METHODS["def"], "error_feedback"),
    "def, 0.3": Case(Detached(0.3), "error_feedback"),
    "def-a": Case(METHODS["def-a"], "error_feedback"),
    "def-adamw": Case(DetachedAdamW(0.3), "error_feedback_adamw"),
}
LISTED = sorted({module.__name__.removeprefix("undrift.").replace(".", "/") for module in FILES.values()})
SIGNED = [file for file in LISTED if signs.sites(file)]


@cache
def probes() -> list[signs.Probe]:
    return [signs.Probe(name, "", {}, case.compare) for name, case in CASES.items()]


@pytest.mark.parametrize("name", CASES)
def test_simulated_workers_equal_the_reference(name: str) -> None:
    assert not CASES[name].compare()


@pytest.mark.parametrize("file", SIGNED)
def test_a_flipped_sign_is_noticed(file: str) -> None:
    of = [site for site in signs.sites(file) if site.key not in DENIED]
    verdict = signs.judge(file, of, probes())
    assert not verdict.spoilt
    assert not verdict.unnoticed, "\n".join(f"{site}: {why}" for site, why in verdict.unnoticed.items())


def test_every_method_has_a_case_and_no_sign_is_denied_without_being_there() -> None:
    assert METHODS.keys() == FILES.keys() == {name.split(",")[0] for name in CASES}
    found = Counter(site.key for file in SIGNED for site in signs.sites(file))
    assert {key: found[key] for key in DENIED} == dict.fromkeys(DENIED, 1)
