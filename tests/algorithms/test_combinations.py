"""Any worker part with any server part: every pair that fits runs, every other raises its error."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.small import path, simulation
from undrift.algorithms.base import Server, Worker
from undrift.core.errors import BadSetting, UnknownName
from undrift.core.names import names
from undrift.jobs.registry import algorithm_class, compose, half

ALGORITHMS = names("algorithms")


def different(kind: type[Any]) -> list[str]:
    """One name for each different part: that of the file it is defined in, or fedavg for the plain ones."""
    files = {half(n, kind).__module__.rpartition(".")[2].replace("_", "-") for n in ALGORITHMS}
    return sorted("fedavg" if file == "base" else file for file in files)


LOCALS, SERVERS = different(Worker), different(Server)
PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"


def fits(local: str, server: str) -> bool:
    needs, sends = algorithm_class(server).needs_single_updates, algorithm_class(local).sends_updates
    return sends or not needs


# Every third pair in turn in the ordinary suite, so that each part meets three or more others; all of them among the slow checks.
PAIRS = [
    pytest.param(local, server, marks=[] if (n + m) % 3 == 0 else [pytest.mark.system])
    for n, local in enumerate(LOCALS)
    for m, server in enumerate(SERVERS)
]


@pytest.mark.parametrize(("local", "server"), PAIRS)
def test_a_pair_runs_or_says_why_not(local: str, server: str) -> None:
    if fits(local, server):
        points = path(simulation(compose(local, server)(lr=0.05)), 2)
        assert torch.isfinite(points).all()
        assert (points[1] - points[0]).norm() > 0 or local == "local"  # where the server has nothing to follow
    else:
        with pytest.raises(BadSetting, match="own updates"):
            simulation(compose(local, server)(lr=0.05))


@pytest.mark.parametrize("server", ["fedavgm", "fedadam", "fedyogi", "fedadagrad", "domo", "dp-ftrl"])
@pytest.mark.parametrize(
    "local, fields", [("ft", {}), ("fedsm-extra", {}), ("ensemble", {}), ("fedsm", {"personal": "ft"})], ids=str
)
def test_a_frozen_model_is_frozen_whatever_the_server(local: str, fields: dict[str, Any], server: str) -> None:
    run = simulation(compose(local, server)(lr=0.05, begin=2, **fields), cohort=4)
    points = path(run, 6)
    assert (points[1] - points[0]).norm() > 0, "it moves while the models are trained"
    assert all(torch.equal(point, points[1]) for point in points[2:])


@pytest.mark.parametrize("local", LOCALS)
def test_no_part_hides_what_another_one_has(local: str) -> None:
    """A field of one part with the name of the other's function would take its place."""
    for server in SERVERS:
        compose(local, server)


def test_a_hidden_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half("fednova", Worker), "tau", lambda self: None, raising=False)
    with pytest.raises(BadSetting, match="'tau' is a field in one of fednova and fedadam and something else"):
        compose("fednova", "fedadam")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_its_two_parts(name: str) -> None:
    """Put together again from its parts, with its own defaults, it computes the same."""
    kind = algorithm_class(name)
    again = compose(name, name)
    fields = {f.name: getattr(kind(), f.name) for f in dataclasses.fields(kind)}
    assert torch.equal(path(simulation(kind()), 2), path(simulation(again(**fields)), 2))


def test_a_wrong_name_in_a_pair_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'fedmim'"):
        algorithm_class("fedmin+gradma-s")


def test_the_page_shows_every_pair() -> None:
    """docs/combinations.md is made by this table; a new method changes it on purpose."""
    header = "| clients \\ server | " + " | ".join(SERVERS) + " |"
    rows = [f"| {local} | " + " | ".join("yes" if fits(local, s) else "no" for s in SERVERS) + " |" for local in LOCALS]
    table = "\n".join([header, "|" + " --- |" * (len(SERVERS) + 1), *rows])
    assert table in PAGE.read_text(), f"put this table into {PAGE.name}:\n{table}"
