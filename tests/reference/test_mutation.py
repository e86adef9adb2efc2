"""The reference tests notice a wrong sign: each + and - of every file of the algorithms is flipped, one at a time.

A flipped sign must part from a reference in at least one case, or raise. What is left out is named below with its reason;
a new file, function or sign is in by being there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.reference import (
    plain,
    signs,
    test_algorithms,
    test_asynchronous,
    test_exchanges_and_objectives,
    test_personal,
)
from undrift.algorithms.base import Cohort, Up
from undrift.algorithms.gradient_memory import cone
from undrift.algorithms.gradient_memory.cone3 import project_three
from undrift.algorithms.gradma_s import GradMAS
from undrift.core.forms import plain_forms
from undrift.core.layout import Layout
from undrift.jobs.registry import algorithm_class

BYTES = "a count of bytes, which the tests of bytes check"
LAST = "a dimension, not a sign: of two dimensions the last one is the second, and of one what is behind it"
CHEAPER = "which side of a matrix is the longer one: both ways give the same, one of them at a lower cost"

# Signs that are not flipped: file, function and expression.
DENIED = {
    (
        "algorithms/domo", "FusedMomentum.bytes_down",
        "invited * (nbytes(down.x) + nbytes(down.b)) + (invited - returning) * nbytes(down.M)",
    ): BYTES,
    ("algorithms/domo", "FusedMomentum.bytes_down", "nbytes(down.x) + nbytes(down.b)"): BYTES,
    ("algorithms/domo", "FusedMomentum.bytes_down", "invited - returning"): BYTES,
    ("algorithms/fedmim", "MultiStepInertia.bytes_down", "nbytes(down.x) + nbytes(down.a) * (1 if one else 2)"): BYTES,
    (
        "algorithms/fedsm", "WithSelector.bytes_down",
        "self.inner.bytes_down(down.inner, invited, returning, clients) + invited * nbytes(down[1:])",
    ): BYTES,
    ("algorithms/fedsm_extra", "ExtraRound.bytes_down", "(clients + 1) * nbytes(down.x) + nbytes(down.statistics)"): BYTES,
    ("algorithms/fedsm_extra", "ExtraRound.bytes_down", "clients + 1"): BYTES,
    (
        "algorithms/fedsm_extra", "ExtraRound.bytes_down",
        "invited * nbytes((down.s, down.s_statistics)) + (invited - returning) * once",
    ): BYTES,
    ("algorithms/fedsm_extra", "ExtraRound.bytes_down", "invited - returning"): BYTES,
    ("algorithms/fedsm_extra", "ExtraRound.buffers_down", "invited - returning"): BYTES,
    ("algorithms/ft", "FineTuning.bytes_down", "invited - returning"): BYTES,
    ("algorithms/ft", "FineTuning.buffers_down", "invited - returning"): BYTES,
    ("algorithms/softpull", "SoftlyPulled.bytes_down", "invited - returning"): BYTES,
    ("algorithms/sparseloco", "SparseUploads.unpack", "size - 1"): "a bound that only a hostile client's places pass",
    (
        "algorithms/streaming_diloco", "Fragments.bytes_down",
        "nbytes(down.turn) + self.length(down.x) * down.x.element_size()",
    ): BYTES,
    (
        "algorithms/streaming_diloco", "Fragments.bytes_down",
        "returning * once + (invited - returning) * nbytes(down)",
    ): BYTES,
    ("algorithms/streaming_diloco", "Fragments.bytes_down", "invited - returning"): BYTES,
    ("algorithms/ensemble", "Weighed.objective", "-1 in model(s, inputs).softmax(-1)"): LAST,
    ("algorithms/fedsm", "WithSelector.client_init", "-1 in ids.to(down.s.dtype).unsqueeze(-1)"): LAST,
    ("algorithms/fedsm", "WithSelector.step_selector", "-1 in -1:"): (
        "a dimension, which only Muon reads; test_optimise runs the selector with it, alone and stacked"
    ),
    ("algorithms/fedsm_extra", "ThenSelector.objective", "-1 in known.view(len(inputs), -1).argmin(-1)"): LAST,
    ("algorithms/gradient_memory/memory", "Memory.remember", "-1 in self.age[place].unsqueeze(-1)"): LAST,
    ("algorithms/moon", "Contrastive.objective", "-1 in dim=-1"): LAST,
    ("algorithms/optimise/muon", "orthogonal", "-2 in matrices.shape[-2]"): CHEAPER,
    ("algorithms/optimise/muon", "orthogonal", "-1 in matrices.shape[-1]"): CHEAPER,
    ("algorithms/personal", "put", "-1 in positions(rows, -2).unsqueeze(-1)"): LAST,
    ("algorithms/personal", "put", "-1 in match.sum(-1, keepdim=True)"): LAST,
    ("algorithms/personal", "put", "-1 in new.shape[-1]"): LAST,
    ("algorithms/personal", "put", "-1 in cohort.there.transpose(-1, -2)"): LAST,
    ("algorithms/fedsm", "WithSelector", "-1.0 in gamma: float = -1.0"): (
        "a default that stands for a threshold to be tuned: no run depends on it, and it is in no function"
    ),
    ("algorithms/fedsm_extra", "ExtraRound.local_step", "work.k + 1"): "a count of the selector's steps, which nobody reads",
    ("algorithms/gradient_memory/cone", "lawson_hanson", "-tolerance - 2e-15 * z.max()"): (
        "what round-off adds to a tolerance: it decides whether one more column is tried that changes nothing"
    ),
    ("algorithms/gradient_memory/cone", "lawson_hanson", "1 + z.max()"): (
        "round-off again: of columns whose multipliers fall to zero together, those that leave with the first one"
    ),
    ("algorithms/personal", "Personal.remarks", "rounds - 1"): "words to the user about a second phase that is not reached",
}  # fmt: skip


# The cases.
def agrees(case: test_personal.Case, execution: str) -> str:
    test_personal.agree(case, execution)
    return ""


def in_plain_forms(compare: Callable[[], str]) -> str:
    """The same without faster forms."""
    with plain_forms():
        return compare()


def problem(seed: int, m: int, d: int, kind: str = "random") -> tuple[Tensor, Tensor]:
    """A vector [d] and rows [m, d] in float64; of `antipodal` ones the first two are so, but for one part in 10,000."""
    random = torch.Generator().manual_seed(seed)
    p, rows = (torch.randn(*shape, d, dtype=torch.float64, generator=random) for shape in ((), (m,)))
    if kind == "antipodal":
        side = torch.randn(d, dtype=torch.float64, generator=random)
        side = side - (side @ rows[0]) / (rows[0] @ rows[0]) * rows[0]
        rows[1] = -rows[0] + 1e-4 * rows[0].norm() * side / side.norm()
        p = p - 9 * side / side.norm()
    return p, rows


def projected(
    count: int, m: int, d: int, kind: str = "random", rho: float = 0.0, dtype: torch.dtype = torch.float64
) -> str:
    """The projection of some vectors against scipy's."""
    for seed in range(count):
        p, rows = (t.to(dtype) for t in problem(seed, m, d, kind))
        exact, _ = plain.project(p.double().numpy(), list(rows.double().numpy()), rho)
        found = cone.project(p, rows, rho=rho)
        gap = np.linalg.norm(found.u.double().numpy() - exact) / float(p.norm())
        if not found.solved or not gap <= (1e-8 if dtype == torch.float64 else 1e-5):
            return f"problem {seed}: {gap:.3g} apart"
    return ""


def searched(seeds: tuple[int, ...], m: int = 16) -> str:
    """The sets of columns that the active-set method tries on its way, against the book's; columns leave one by one."""
    for seed in seeds:
        random = np.random.default_rng(seed)
        A = random.normal(size=(m, m)) @ np.diag(0.6 ** np.arange(m)) @ random.normal(size=(m, m))
        A = A / np.linalg.norm(A, axis=0) * np.exp(random.normal(size=m))
        G, b, tried = A.T @ A, -A.T @ random.normal(size=m), list[set[int]]()

        def multipliers(passive: np.ndarray, G: Any = G, b: Any = b, tried: Any = tried) -> np.ndarray:
            tried.append(set(np.flatnonzero(passive).tolist()))
            return np.asarray(np.linalg.solve(G[np.ix_(passive, passive)], -b[passive]))

        z, solved = cone.lawson_hanson(m, lambda z, G=G, b=b: G @ z + b, multipliers, 1e-12)  # type: ignore[misc]
        exact, visited = plain.active_sets(G, b)
        if not solved or tried != visited or not np.allclose(z, exact, rtol=1e-6, atol=1e-8):
            return f"problem {seed}: {tried} instead of {visited}"
    return ""


def by_columns(count: int, rho: float) -> str:
    """The solver of badly conditioned problems against scipy's, where both can be compared: on good ones."""
    for seed in range(count):
        p, rows = problem(seed, 4, 10)
        exact, _ = plain.project(p.numpy(), list(rows.numpy()), rho)
        _, u, solved = cone.by_columns(p, rows, rows.norm(dim=1).numpy(), rho, 1e-9)
        gap = np.linalg.norm(u.numpy() - exact) / float(p.norm())
        if not solved or not gap <= 1e-9:
            return f"problem {seed}: {gap:.3g} apart"
    return ""


def with_ridge() -> str:
    """The solver of columns that are nothing but last digits, against scipy's or, where it is needed, by what it breaks."""
    for m, d in ((4, 10), (12, 6)):
        for seed in range(6):
            p, rows = problem(seed, m, d)
            exact, _ = plain.project(p.numpy(), list(rows.numpy()), 0.0)
            unit, q = (rows / rows.norm(dim=1, keepdim=True)).numpy(), (p / p.norm()).numpy()
            z, off = cone.with_ridge(unit @ unit.T, unit @ q)
            slack = unit @ (q + z @ unit)
            broken = np.where(z > 0, np.abs(slack), -slack).max()
            gap = np.linalg.norm(p.numpy() + float(p.norm()) * (z @ unit) - exact) / float(p.norm())
            if not gap <= 1e-13 or not abs(off - broken) <= 1e-13:
                return f"problem {seed}: {gap:.3g} apart, off by {off:.3g}, not {broken:.3g}"
    for seed in range(5):  # thirty columns in five dimensions, but for a millionth
        random = np.random.default_rng(seed)
        plane = random.normal(size=(5, 40))
        unit = random.normal(size=(30, 5)) @ plane + 1e-6 * random.normal(size=(30, 40))
        q = random.normal(size=5) @ random.normal(size=(5, 40)) - unit.mean(0)
        unit, q = unit / np.linalg.norm(unit, axis=1, keepdims=True), q / np.linalg.norm(q)
        _, off = cone.with_ridge(unit @ unit.T, unit @ q)
        if not off <= 1e-7:
            return f"problem {seed}: off by {off:.3g}"
    return ""


def projected_at_once(lead: tuple[int, ...], rho: float, dtype: torch.dtype) -> str:
    """The projection on three rows, of [*lead] vectors at once, against scipy's; with a margin, one margin for each."""
    made = [problem(seed, 3, 12) for seed in range(int(np.prod(lead)))]
    p, rows = torch.stack([p for p, _ in made]).to(dtype), torch.stack([rows for _, rows in made]).to(dtype)
    margin = torch.full((*lead, 1), rho, dtype=torch.float64) if rho else 0.0
    u, _ = project_three(p.view(*lead, 12), rows.view(*lead, 3, 12).unbind(-2), margin)
    for one, columns, found in zip(p.double(), rows.double(), u.view(-1, 12).double(), strict=True):
        exact, _ = plain.project(one.numpy(), list(columns.numpy()), rho)
        gap = np.linalg.norm(found.numpy() - exact) / float(one.norm())
        if not gap <= (1e-10 if dtype == torch.float64 else 1e-5):
            return f"{gap:.3g} apart"
    return ""


def failures() -> str:
    """Opposite updates and a margin: a programme without a solution in each of three rounds, and its count."""
    alg, x = GradMAS(rho=0.5, slots=2), torch.zeros(6, dtype=torch.float64)
    layout = Layout(("a", "b"), (torch.Size((4,)), torch.Size((2,))))
    state, each = alg.server_init(x, 2, layout), torch.full((2, 1), 0.5, dtype=torch.float64)
    cohort = Cohort(torch.arange(2), torch.arange(2), each, each, 0.1, 2, layout)
    d = torch.arange(1.0, 7.0, dtype=torch.float64)
    for t in range(1, 4):
        _, state = alg.server_step(state, x, d, Up(torch.stack([d, -d])), cohort)
        if int(alg.facts(state)["qp_failed"]) != t:
            return f"{alg.facts(state)['qp_failed']} failures instead of {t}"
    return ""


def file_of(algorithm: str) -> str:
    return signs.file_of(algorithm_class(algorithm.rpartition("+")[2]))  # of a pair the server's


@cache
def probes() -> list[signs.Probe]:
    """Every case of the references in each way to run it; rare ways come with an algorithm's first case."""
    found: list[signs.Probe] = []

    def add(case: Any, algorithm: str, way: str, compare: Callable[[], str], turn: int) -> None:
        found.append(signs.Probe(f"{case}, {way}", file_of(algorithm), case.fields, compare, turn))

    for way in ("replayed", "stacked"):
        for case in test_algorithms.ABSENT:
            add(case, case.algorithm, way, partial(test_algorithms.first_disagreement, case, way), 0)
        for one in test_personal.ABSENT:
            add(one, one.name, way, partial(agrees, one, way), 0)
    for compare, cases in (
        (test_algorithms.first_disagreement, test_algorithms.CASES),
        (test_exchanges_and_objectives.first_disagreement, test_exchanges_and_objectives.CASES),
        (test_asynchronous.first_disagreement, test_asynchronous.CASES),
    ):
        for turn, case in in_turn(cases, [case.algorithm for case in cases]):
            for later, way in enumerate(("stacked", "pool")):
                add(case, case.algorithm, way, partial(compare, case, way), turn + later)
            if turn == 0 and case.algorithm in ("gradma-s", "gradma-w"):
                plainly = partial(in_plain_forms, partial(compare, case, "stacked"))
                add(case, case.algorithm, "plain forms", plainly, 0)
    for turn, one in in_turn(test_personal.CASES, [one.name for one in test_personal.CASES]):
        for later, way in enumerate(("stacked", "pool")):
            add(one, one.name, way, partial(agrees, one, way), turn + later)
    return found


def in_turn(cases: list[Any], algorithms: list[str]) -> list[tuple[int, Any]]:
    """Each case with the number of cases that its algorithm has before it."""
    return [(algorithms[:n].count(name), case) for n, (name, case) in enumerate(zip(algorithms, cases, strict=True))]


@cache
def projections() -> list[signs.Probe]:
    general, three = "algorithms/gradient_memory/cone", "algorithms/gradient_memory/cone3"
    small, wide = torch.float32, torch.float64
    asked: list[tuple[str, Callable[[], str]]] = [
        (general, partial(projected, 4, 1, 6)),
        (general, partial(projected, 30, 8, 6)),
        (general, partial(projected, 10, 4, 10, rho=0.0625)),
        (general, partial(projected, 10, 4, 12, "antipodal")),
        (general, partial(projected, 10, 4, 12, "antipodal", dtype=small)),
        (general, partial(projected, 10, 4, 12, "antipodal", 1e-5)),
        (general, partial(by_columns, 10, 0.0625)),
        (general, with_ridge),
        (general, partial(searched, (0, 150, 316, 357))),
        ("algorithms/gradma_s", failures),
        *(
            (three, partial(projected_at_once, lead, rho, dtype))
            for lead in ((5,), (2, 5))
            for rho, dtype in ((0.0, wide), (0.0, small), (0.0625, wide))
        ),
    ]
    return [
        signs.Probe(f"projection {n}", file, {}, form)
        for n, (file, compare) in enumerate(asked)
        for form in (compare, partial(in_plain_forms, compare))
    ]


MUTATED = {
    file: [site for site in signs.sites(file) if site.key not in DENIED] for file in signs.files() if signs.sites(file)
}


@pytest.mark.parametrize("file", [file for file, of in MUTATED.items() if of])
def test_a_flipped_sign_is_noticed(file: str) -> None:
    """By a case in which an unchanged copy agrees, made in the same way: otherwise it would be noticed for nothing."""
    verdict = signs.judge(file, MUTATED[file], signs.ranked(file, [*projections(), *probes()]))
    assert not verdict.spoilt
    assert not verdict.unnoticed, "\n".join(f"{site}: {why}" for site, why in verdict.unnoticed.items())


def test_no_sign_is_denied_without_being_there() -> None:
    """Each one that is denied is one sign and not several."""
    found = Counter(site.key for file in signs.files() for site in signs.sites(file))
    assert {key: found[key] for key in DENIED} == dict.fromkeys(DENIED, 1)
    assert all(DENIED.values())


def test_every_file_is_looked_at() -> None:
    """Every file with a sign is mutated, or all that it has is denied."""
    for path in (signs.ROOT / "algorithms").rglob("*.py"):
        file = str(path.relative_to(signs.ROOT).with_suffix(""))
        of = signs.sites(file)
        assert not of or MUTATED[file] or all(site.key in DENIED for site in of)
    assert {"algorithms/optimise/adam", "algorithms/fedsm_extra", "algorithms/ensemble"} <= MUTATED.keys()


def test_a_flipped_sign_is_put_back() -> None:
    site = next(site for site in signs.sites("algorithms/base") if site.function == "Average.server_step")
    run = partial(test_algorithms.first_disagreement, test_algorithms.CASES[0], "stacked")
    with signs.flipped(site):
        assert run()
    assert not run()
