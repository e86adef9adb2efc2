"""Robust rules against independent references in float64, with empty places, packed runs, and vectors near overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import optimize, stats

from undrift.core.errors import BadSetting, UnknownName
from undrift.round.aggregate import NAMES, describe, parse_rule

Array = NDArray[np.float64]


def krum(v: Array, w: Array, f: int, m: int) -> Array:
    scores = []
    for i in range(len(v)):
        others = sorted(float(((v[i] - v[j]) ** 2).sum()) for j in range(len(v)) if j != i)
        scores.append(sum(others[: len(v) - f - 2]))
    best = np.argsort(scores, kind="stable")[:m]
    return np.asarray((w[best, None] * v[best]).sum(0) / w[best].sum())


def geometric(v: Array, w: Array) -> Array:
    found = optimize.minimize(
        lambda z: float((w * np.linalg.norm(v - z, axis=1)).sum()),
        np.median(v, 0),
        method="BFGS",
        options={"gtol": 1e-9},
    )
    return np.asarray(found.x)


def bounded(v: Array, w: Array, largest: float) -> Array:
    return np.asarray(sum(w[i] * v[i] * min(1.0, largest / np.linalg.norm(v[i])) for i in range(len(v))))


REFERENCES: dict[str, Callable[[Array, Array], Array]] = {
    "median": lambda v, w: np.median(v, 0),
    "trimmed:0.2": lambda v, w: stats.trim_mean(v, 0.2),
    "trimmed:0": lambda v, w: v.mean(0),
    "krum:2": lambda v, w: krum(v, w, 2, 1),
    "krum:1:4": lambda v, w: krum(v, w, 1, 4),
    "geometric:300": geometric,
    "clip:0.8": lambda v, w: bounded(v, w, 0.8 * float(np.median(np.linalg.norm(v, axis=1)))),
    "bound:1.5": lambda v, w: bounded(v, w, 1.5),
}


def drawn(clients: int, seed: int, equal: bool) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    v = random.normal(size=(clients, 6)) + random.normal(size=6)
    v[::4] *= -7.0
    w = np.ones(clients) if equal else random.uniform(1, 9, clients)
    return v, w / w.sum()


def result(spec: str, v: Any, w: Any) -> torch.Tensor:
    """The mean that the server takes of what the rule leaves."""
    rule = parse_rule(spec)
    assert rule is not None
    v, w = torch.as_tensor(v), torch.as_tensor(w).unsqueeze(-1)
    return (rule(v, w) * w).sum(-2)


def test_every_rule_has_a_reference() -> None:
    assert {spec.partition(":")[0] for spec in REFERENCES} == set(NAMES)


@pytest.mark.parametrize("clients", [7, 8, 15])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("spec", REFERENCES)
def test_rules_equal_their_references(spec: str, equal: bool, clients: int) -> None:
    v, w = drawn(clients, clients, equal)
    expected = REFERENCES[spec](v, w)
    np.testing.assert_allclose(result(spec, v, w).numpy(), expected, rtol=1e-5 if "geo" in spec else 1e-12, atol=1e-6)
    if spec != "trimmed:0":
        assert np.linalg.norm(expected - w @ v) > 1e-2, "the reference is no more than the mean"


@pytest.mark.parametrize("spec", REFERENCES)
def test_empty_places_do_not_count_and_packed_runs_do_not_meet(spec: str) -> None:
    """Two runs with 9 and 7 clients in 10 places equal each of them by itself."""
    v, w = torch.full((2, 10, 6), 1e9, dtype=torch.float64), torch.zeros(2, 10, dtype=torch.float64)
    alone = []
    for run, clients in enumerate((9, 7)):
        mine = drawn(clients, run, False)
        v[run, :clients], w[run, :clients] = (torch.from_numpy(a) for a in mine)
        alone.append(result(spec, *mine))
    torch.testing.assert_close(result(spec, v, w), torch.stack(alone), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spec", [s for s in REFERENCES if s != "trimmed:0"] + ["geometric"])
@pytest.mark.parametrize("size", [-20.0, 1e30, "largest"])
def test_hostile_vectors_however_long_do_not_move_the_result_far(spec: str, size: Any, dtype: torch.dtype) -> None:
    v, _ = drawn(10, 3, True)
    honest = torch.from_numpy(v).to(dtype).abs() + 1
    hostile = honest.clone()
    hostile[:2] = torch.finfo(dtype).max if size == "largest" else size * honest[:2]
    found = result(spec, hostile, torch.full((10,), 0.1, dtype=dtype))
    low, high = honest[2:].min(0).values, honest[2:].max(0).values
    assert bool(found.isfinite().all())
    if not spec.startswith(("clip", "bound")):  # of a bound remains what the bound allows
        assert bool(((found >= low - 1e-3) & (found <= high + 1e-3)).all())
    else:
        assert float(found.norm()) <= float(honest[2:].norm(dim=1).max())


@pytest.mark.parametrize("spec", REFERENCES)
def test_no_value_is_asked_for(spec: str) -> None:
    """A tensor without memory has none; a GPU could not record a rule that needs one."""
    assert result(spec, torch.zeros(3, 7, 5, device="meta"), torch.zeros(3, 7, device="meta")).shape == (3, 5)


def test_ten_steps_come_close_to_the_geometric_median() -> None:
    v, w = drawn(15, 5, False)

    def mean_distance(z: Array) -> float:
        return float((w * np.linalg.norm(v - z, axis=1)).sum())

    assert mean_distance(result("geometric", v, w).numpy()) <= 1.001 * mean_distance(geometric(v, w))


def test_clients_that_all_send_zero_or_the_same() -> None:
    for v in (torch.zeros(5, 3), torch.full((5, 3), 2.0)):
        for spec in REFERENCES:
            expected = v[0] if not spec.startswith(("clip", "bound")) else None
            found = result(spec, v, torch.full((5,), 0.2))
            assert bool(found.isfinite().all())
            if expected is not None:
                torch.testing.assert_close(found, expected)


def test_one_or_two_clients_are_enough_to_go_on() -> None:
    for clients in (1, 2):
        v = torch.arange(1.0, 1 + clients).unsqueeze(-1)
        for spec in REFERENCES:
            found = float(result(spec, v, torch.full((clients,), 1 / clients)))
            assert 0 < found <= clients + 1e-6, (spec, found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("trimmed:0.5", "below 0.5"), ("trimmed:x", "takes trimmed:SHARE"), ("median:1", "takes median,"),
        ("krum:-1", "F of at least 0"), ("krum:1.5", "takes krum:FAULTY:CHOSEN"), ("krum:1:0", "M of at least 1"),
        ("geometric:0", "1 to 1000"), ("clip:0", "above 0"), ("clip:nan", "above 0"), ("bound:inf", "below 1e30"),
        ("mean:1", "takes mean,"), ("bound:1:2", "takes bound:LARGEST"),
    ],
)  # fmt: skip
def test_specs_that_make_no_sense_are_refused(text: str, reason: str) -> None:
    with pytest.raises(BadSetting, match=reason):
        parse_rule(text)


def test_a_mistyped_name_is_corrected_and_a_rule_reads_its_own_description() -> None:
    with pytest.raises(UnknownName, match="did you mean 'median'"):
        parse_rule("medain")
    for spec in REFERENCES:
        rule = parse_rule(spec)
        assert rule is not None and parse_rule(describe(rule)) == rule


@pytest.mark.parametrize("usual", [0.0, 1e-13, 1.0])
@pytest.mark.parametrize("longest", [100.0, 1e6, 1e30])
def test_no_vector_is_longer_than_the_bound_whatever_the_others_send(usual: float, longest: float) -> None:
    """Also where most clients send nothing, as of a vector that few of them change."""
    v = torch.zeros(4, 2)
    v[:, 0] = torch.tensor([usual, usual, usual, -longest])
    found = parse_rule("bound:10")(v, torch.full((4, 1), 0.25))  # type: ignore[misc]
    assert torch.equal(found[:3], v[:3])
    assert found[3].tolist() == pytest.approx([-10.0, 0.0])
