"""Uploads are added up as they arrive: the server's memory does not grow with its clients, and a large model fits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr")

from tests.deploy.test_client import Alive
from tests.deploy.test_many import resident
from tests.deploy.test_processes import planned, records, until
from tests.small import federation as small_federation
from tests.small import simulation
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.scaffold import Scaffold
from undrift.core.trees import Nothing
from undrift.core.vec import mean
from undrift.deploy.join import node_config, node_words
from undrift.deploy.local import federation
from undrift.deploy.messages import Letter, check_finite, encode
from undrift.deploy.remote import Remote
from undrift.deploy.server import Deployment
from undrift.deploy.sums import Total
from undrift.kernels import register  # noqa: F401

WIDE = 60_000  # inputs: 180,003 parameters


class Answering:
    """Clients without samples: each answers with numbers of its own, when its answer is asked for."""

    def __init__(self, entries: int, up: tuple[str, ...] = ("up.d",)) -> None:
        self.entries, self.up = entries, up

    def exchange(self, letters: Mapping[str, Letter]) -> Iterator[tuple[str, Letter | str]]:
        for name, letter in letters.items():
            facts = {fact: letter.facts[fact] for fact in ("run", "client", "round", "exchange")}
            facts |= {"samples": 2, "seconds": 0.0, "gradients": 1, "loss": 1.0, "steps": 1, "anew": False}
            values = torch.full((self.entries,), float(name))
            yield name, Letter(facts, {up: encode(values) for up in self.up} | {"buffers": encode(torch.zeros(0))})


def most_alive(clients: int, **settings: Any) -> tuple[float, Tensor]:
    """Vectors as long as the model that a round with so many clients holds at once, and the model after it."""
    fed = small_federation((2,) * clients, features=WIDE)
    run = simulation(
        FedAvg(),
        nn.Linear(WIDE, 3),
        fed,
        cohort=clients,
        steps=1,
        batch=2,
        dtype=torch.float32,
        eval_every=9,
        **settings,
    )
    names, x = [str(id) for id in range(clients)], run.state.x.clone()
    remote = Remote(Answering(run.net.layout.entries), names, "a1", 1, lambda line: None)
    deployment = Deployment(run, remote, lambda visits: None)
    with Alive() as here:
        deployment.rounds(1)
    return here.most / 4 / len(x), x - run.state.x


def test_memory_does_not_grow_with_the_clients() -> None:
    """Where they weigh differently it does: there every upload is kept."""
    (few, _), (many, moved) = most_alive(3), most_alive(15)
    assert many <= few + 0.1 and many < 9
    assert torch.allclose(moved[: 3 * WIDE], torch.tensor(7.0))  # the mean of 0 to 14
    assert most_alive(15, weights="size")[0] > 15


def test_a_sum_is_not_changed_by_the_order_in_which_uploads_arrive() -> None:
    form, x = torch.empty(1000, device="meta"), torch.zeros(1000)
    each = [torch.randn(1000, generator=torch.Generator().manual_seed(n)) * 10.0 ** (n % 5) for n in range(20)]
    found = []
    for order in (each, each[::-1], each[7:] + each[:7]):
        total = Total()
        for up in order:
            total.add(up)
        found.append(total.rows(form, x, 20))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert found[0].shape == (20, 1000) and found[0].stride(0) == 0  # one vector in memory
    torch.testing.assert_close(found[0][0].double(), torch.stack(each).double().mean(0), rtol=1e-6, atol=1e-6)
    assert Total().rows(Nothing(), x, 3) == Nothing()


def test_an_upload_is_added_without_another_one_in_memory() -> None:
    up = torch.ones(8_000_000)
    total = Total()
    total.add(up)
    with Alive() as here:
        total.add(up)
        check_finite(up)
    assert here.most < up.numel()
    assert torch.equal(total.sum, torch.full_like(up, 2.0, dtype=torch.float64))


def test_the_mean_of_rows_that_are_one_vector_is_that_vector() -> None:
    v = torch.randn(1, 8_000_000).expand(50, -1)  # as rows of their own they would take 1.6 GB
    weight = torch.rand(50, 1)
    with Alive() as here:
        found = mean(v, weight / weight.sum())
    assert here.most < 3 * v.shape[1] * 4
    torch.testing.assert_close(found, v[0])


@pytest.mark.parametrize("alg", [FedAvg(), Scaffold()])
def test_answers_that_are_refused_are_not_in_the_sum(alg: Any) -> None:
    run = simulation(alg, fed=small_federation((2,) * 4), cohort=4, steps=1, batch=2, dtype=torch.float32)
    up = ("up.d",) if isinstance(alg, FedAvg) else ("up.d", "up.dc")

    class OneIsNot(Answering):
        def exchange(self, letters: Mapping[str, Letter]) -> Iterator[tuple[str, Letter | str]]:
            for name, answer in super().exchange(letters):
                assert isinstance(answer, Letter)
                spoilt = {up[-1]: encode(torch.full((self.entries,), torch.nan))} if name == "2" else {}
                yield name, Letter(answer.facts, answer.arrays | spoilt)

    remote, x = (
        Remote(OneIsNot(39, up), list("0123"), "a1", 1, lambda line: None),
        run.net.without_padding(run.state.x, "model"),
    )
    (record,) = Deployment(run, remote, lambda visits: None).rounds(1)
    assert record.dropped == 1
    torch.testing.assert_close(x - run.net.without_padding(run.state.x, "model"), torch.full_like(x, 4 / 3))


LARGE = """
import resource, sys, torch
from torch import nn
from tests.deploy.test_sums import Answering
from undrift.deploy.run import deploy
from undrift.deploy.settings import Plan

class Counting(Answering):
    def __init__(self): super().__init__(7000 * 7100 + 7100 * 50)

plan = Plan.of({
    "algorithm": "fedavg", "dataset": "own", "names": "0,1,2", "clients": 3, "cohort": 3, "rounds": 1, "shape": "7000",
    "classes": 50, "model": "tests.deploy.test_sums:large", "steps": 1, "out": sys.argv[1], "device": "cpu",
})
samples = dict.fromkeys(plan.names, 2)
deploy(plan, Counting(), lambda: 3, samples, print)
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def large(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model with 50 million parameters."""
    return nn.Sequential(nn.Linear(7000, 7100, bias=False), nn.ReLU(), nn.Linear(7100, classes, bias=False))


@pytest.mark.system
def test_fifty_million_parameters_from_three_clients_take_less_than_4_gb(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"peak (\d+)", done.stdout)
    assert found is not None and int(found[1]) * 1024 < 4e9, done.stdout
    (record,) = (json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines())
    assert record["dropped"] == 0 and record["wire_up"] > 3 * 4 * 50_000_000
    print(done.stdout)


@pytest.mark.system
def test_fifty_million_parameters_in_a_federation_of_real_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that runs on the server together: the gate, Flower's SuperLink and the run."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    names, x = ["0", "1", "2"], np.random.default_rng(0).normal(size=(2, 7000)).astype(np.float32)
    for name in names:
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.array([0, 49]))
    plan = planned(
        tmp_path / "out", clients=3, rounds=1, dataset="own", partition="own", names=",".join(names), shape="7000",
        classes=50, model="tests.deploy.test_sums:large", steps=1, timeout=900.0,
    )  # fmt: skip
    with federation(names) as here:
        for client, name in enumerate(names):
            states, file = here.home / "states" / name, tmp_path / f"{name}.npz"
            config = node_config(name=name, state_dir=states, data=file, allow="tests")
            here.start(f"client-{client}", *node_words(here.folder(client), f"{here.host}:{here.port}", config))
        run = here.run(plan)
        most = [0]

        def over() -> bool:
            most.append(resident(here.home, ["superlink"]))
            return run.poll() is not None and not here.server_apps()

        until(over, here)
        assert [r["dropped"] for r in records(plan)] == [0], here.log("run")
    print(f"{max(most) / 1e9:.2f} GB on the server")
    assert records(plan)[0]["wire_up"] > 3 * 4 * 50_000_000 and 0.2e9 < max(most) < 4e9
