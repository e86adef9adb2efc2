"""Attacks on private deployments: searched noise, cohorts known in advance, cost that falls, messages that tell too much."""

from __future__ import annotations

import json
import secrets
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from torch import Tensor

flwr = pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict  # noqa: E402

import undrift  # noqa: E402
from tests.deploy.test_flower import Nodes, identity, planned  # noqa: E402, F401
from tests.deploy.test_own_files import Sites, labelled  # noqa: E402
from tests.deploy.test_own_files import planned as planned_with_files  # noqa: E402
from undrift.core.errors import BadRunFolder  # noqa: E402
from undrift.core.run_files import checkpoint_files  # noqa: E402
from undrift.data.load import load_dataset  # noqa: E402
from undrift.deploy.client import ECHOED  # noqa: E402
from undrift.deploy.flower import from_records, server_app  # noqa: E402
from undrift.deploy.privacy import Ledger, key_stream  # noqa: E402
from undrift.deploy.settings import Plan  # noqa: E402
from undrift.jobs.run import build_simulation  # noqa: E402
from undrift.jobs.verify import verify  # noqa: E402
from undrift.round.accounting import Sampled  # noqa: E402


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)


def private(out: Path, **settings: Any) -> Plan:
    given = {"cohort": 2, "sampling": "bernoulli", "privacy_clip": 0.5, "privacy_noise": 2.0}
    return planned(out, **(given | settings))


class Watched(Nodes):
    """Nodes whose messages are kept."""

    def __init__(self, plan: Plan, root: Path) -> None:
        super().__init__(plan.run.clients, plan.flat(), root)
        self.down: list[Message] = []
        self.up: list[Message] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        answers = super().send_and_receive(sent, timeout=timeout)
        self.down += sent
        self.up += answers
        return answers


def serve(plan: Plan, root: Path) -> Watched:
    nodes = Watched(plan, root)
    server_app()(nodes, Context(1, 1, {}, RecordDict(), plan.flat()))  # type: ignore[arg-type]
    return nodes


def records(plan: Plan) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(plan.deploy.out) / "rounds.jsonl").read_text().splitlines()]


def asked(plan: Plan) -> list[tuple[int, str]]:
    lines = (Path(plan.deploy.out) / "clients.jsonl").read_text().splitlines()
    return [(visit["round"], visit["client"]) for visit in map(json.loads, lines)]


def model(plan: Plan) -> Tensor:
    return torch.cat([t.flatten() for t in load_file(Path(plan.deploy.out) / "model.safetensors").values()])


# Noise.
def search(noisy: Tensor, longest: float, draw: Callable[[int], Tensor], seeds: Iterable[int]) -> int | None:
    """The attack: which seed's noise leaves a sum that clients could have sent?"""
    return next((seed for seed in seeds if torch.linalg.vector_norm(noisy - draw(seed)) <= longest), None)


def torch_noise(seed: int) -> Tensor:
    return torch.randn(2000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_noise_that_can_be_searched_is_found_and_that_of_a_deployment_is_not(tmp_path: Path) -> None:
    """A generator of PyTorch uses 32 bits of its seed: whatever stands above them, few seeds have to be tried."""
    clipped = torch.nn.functional.normalize(torch.ones(2000, dtype=torch.float64), dim=0)
    old = clipped + torch_noise(617 + (secrets.randbits(30) << 32))
    assert search(old, 1.001, torch_noise, range(1000)) == 617
    new = clipped + Ledger(tmp_path / "privacy.json", False).normal(torch.tensor(0), 2000)
    assert search(new, 1.001, torch_noise, range(1000)) is None


def test_noise_comes_from_the_operating_system_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, key = Ledger(tmp_path / "privacy.json", False), torch.tensor(7)
    drawn = [ledger.normal(key, 100_001) for _ in range(2)]
    assert drawn[0].dtype == torch.float64 and not torch.equal(*drawn)
    assert stats.kstest(drawn[0].numpy(), "norm").pvalue > 1e-4
    for sample in drawn:
        assert sample.mean() == pytest.approx(0, abs=0.02) and sample.std() == pytest.approx(1, abs=0.02)
        assert float((sample.abs() > 3).double().mean()) == pytest.approx(0.0027, abs=0.001)
    asked_for: list[int] = []

    def system(count: int) -> bytes:
        asked_for.append(count)
        return bytes(count)

    monkeypatch.setattr(secrets, "token_bytes", system)
    monkeypatch.setattr(torch, "randn", None)
    monkeypatch.setattr(torch, "Generator", None)
    assert torch.equal(ledger.normal(key, 10), ledger.normal(key + 1, 10)) and asked_for == [32, 32]  # 256 bits


def test_two_runs_with_the_same_settings_have_different_noise(tmp_path: Path) -> None:
    plans = [private(tmp_path / f"out{n}", cohort=3, rounds=1, seed=5) for n in range(2)]
    for plan in plans:
        serve(plan, tmp_path / "nodes")
    apart = model(plans[0]) - model(plans[1])
    assert apart.std() == pytest.approx(2**0.5 * 2.0 * 0.5 / 3, rel=0.15)  # two noises of sigma C / (q N)


def test_the_words_are_those_of_chacha20() -> None:
    """Against the first words of RFC 8439's zero key."""
    words = torch.cat(list(key_stream(bytes(32), 0, 2)))
    assert words.numpy().tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


# Cohorts.
def test_nobody_who_knows_the_seed_knows_the_cohorts(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(clients=6, cohort=2, rounds=8, seed=3)
    plans = [private(tmp_path / f"out{n}", **settings) for n in range(2)]
    nodes = [serve(plan, tmp_path / "nodes") for plan in plans]
    run = build_simulation(plans[0].run, plans[0].alg, load_dataset("digits"), "logreg", torch.device("cpu"))
    by_seed = [(t + 1, str(id)) for t in range(8) for id in run.attendance(t).ids]
    first, second = (asked(plan) for plan in plans)
    assert first != by_seed and second != by_seed and first != second
    for plan, watched in zip(plans, nodes, strict=True):
        secret = json.loads((Path(plan.deploy.out) / "privacy.json").read_text())["secret"]
        letters = [
            from_records(message.content) for message in watched.down if message.metadata.message_type == "train"
        ]
        assert letters
        everything = repr(letters) + repr([c.run_config for c in watched.contexts.values()])
        assert secret not in everything and repr(bytes.fromhex(secret))[2:-1] not in everything


def test_the_secret_is_the_servers_alone_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(clients=6, cohort=2, rounds=3)
    serve(private(tmp_path / "out", **settings), tmp_path / "nodes")
    file = tmp_path / "out" / "privacy.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = json.loads(file.read_text())["secret"]
    again = private(tmp_path / "out", **(settings | {"rounds": 6}), resume=True)
    serve(again, tmp_path / "nodes")
    assert json.loads(file.read_text())["secret"] == secret and stat.S_IMODE(file.stat().st_mode) == 0o600
    run = build_simulation(again.run, again.alg, load_dataset("digits"), "logreg", torch.device("cpu"))
    run.draw_from(Ledger(file, resume=True))
    assert asked(again) == [(t + 1, str(id)) for t in range(6) for id in run.attendance(t).ids]


@pytest.mark.parametrize("sampling", ["bernoulli", "fixed"])
def test_cohorts_from_the_secret_are_as_large_and_as_fair_as_they_should_be(sampling: str, tmp_path: Path) -> None:
    alg = "fedavg" if sampling == "bernoulli" else "dp-ftrl"
    plan = private(tmp_path / "out", clients=20, cohort=5, sampling=sampling, algorithm=alg)
    run = build_simulation(plan.run, plan.alg, load_dataset("digits"), "logreg", torch.device("cpu"))
    run.draw_from(Ledger(tmp_path / "privacy.json", False))
    cohorts = [run.attendance(t).ids for t in range(800)]
    sizes, often = np.array([len(c) for c in cohorts]), np.bincount(np.concatenate(cohorts), minlength=20)
    assert sizes.mean() == pytest.approx(5, abs=0.4) and sizes.std() == pytest.approx(
        0 if sampling == "fixed" else 1.94, abs=0.25
    )
    assert (abs(often - 200) < 65).all()  # five standard deviations
    for cohort in cohorts:
        assert (np.diff(cohort) > 0).all()


# The cost.
def test_epsilon_goes_on_where_it_was(tmp_path: Path) -> None:
    serve(private(tmp_path / "out", rounds=2), tmp_path / "nodes")
    plan = private(tmp_path / "out", rounds=4, resume=True)
    serve(plan, tmp_path / "nodes")
    expected = Sampled(2 / 3, 2.0, 1e-5)
    for t, record in enumerate(records(plan)):
        expected.add(t, np.zeros(0, np.int64))
        assert record["epsilon"] == pytest.approx(expected.epsilon, rel=1e-12)
    assert len(records(plan)) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"privacy_noise": 20.0}, {"privacy_clip": 0.1}, {"privacy_delta": 1e-2}, {"privacy_quantile": 0.5},
        {"privacy_clip": 0.0, "privacy_noise": 0.0}, {"cohort": 1}, {"sampling": "fixed", "algorithm": "dp-ftrl"},
    ],
)  # fmt: skip
def test_a_resumed_run_is_as_private_as_it_was(change: dict[str, Any], tmp_path: Path) -> None:
    serve(private(tmp_path / "out", rounds=1), tmp_path / "nodes")
    name = next(iter(change))
    with pytest.raises(BadRunFolder, match=f"holds another run: its ({name}|algorithm) is") as refusal:
        serve(private(tmp_path / "out", rounds=2, resume=True, **change), tmp_path / "nodes")
    assert "\n" not in str(refusal.value)


def test_going_back_to_an_earlier_checkpoint_gives_nothing_back(tmp_path: Path) -> None:
    """What was sent was sent: rounds that are repeated cost again."""
    plan = private(tmp_path / "out", rounds=3)
    serve(plan, tmp_path / "nodes")
    before, ledger = records(plan)[-1]["epsilon"], Ledger(tmp_path / "out" / "privacy.json", resume=True)
    damaged = checkpoint_files(tmp_path / "out")[-1]
    damaged.write_bytes(b"rubbish")
    assert "went back from round 3 to round 2" in verify(tmp_path / "out", back=True).advice
    serve(private(tmp_path / "out", rounds=3, resume=True), tmp_path / "nodes")
    four = Sampled(2 / 3, 2.0, 1e-5)
    for t in range(4):
        four.add(t, np.zeros(0, np.int64))
    assert before < records(plan)[-1]["epsilon"] == pytest.approx(four.epsilon, rel=1e-12)
    again = Ledger(tmp_path / "out" / "privacy.json", resume=True)
    again.carry_over(four, 3)  # as the next resume would
    assert again.rounds == 4 and torch.equal(again.words(2, 5), ledger.words(3, 5))  # dice that were not thrown before


def test_without_its_ledger_a_run_does_not_go_on(tmp_path: Path) -> None:
    serve(private(tmp_path / "out", rounds=1), tmp_path / "nodes")
    (tmp_path / "out" / "privacy.json").unlink()
    with pytest.raises(BadRunFolder, match="says what the run has spent"):
        serve(private(tmp_path / "out", rounds=2, resume=True), tmp_path / "nodes")


def test_a_promise_that_would_give_one_client_away_is_remarked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for delta, remarked in ((0.5, True), (0.01, False)):
        serve(private(tmp_path / str(delta), rounds=1, privacy_delta=delta), tmp_path / "nodes")
        assert ("take it well below 1 / clients" in capsys.readouterr().out) == remarked


def test_with_an_older_ledger_a_run_does_not_go_on(tmp_path: Path) -> None:
    """Cohorts that clients know of would be drawn again."""
    serve(private(tmp_path / "out", rounds=1), tmp_path / "nodes")
    older = (tmp_path / "out" / "privacy.json").read_bytes()
    serve(private(tmp_path / "out", rounds=3, resume=True), tmp_path / "nodes")
    (tmp_path / "out" / "privacy.json").write_bytes(older)
    with pytest.raises(BadRunFolder, match=r"knows of 1 rounds, and the checkpoint of 3: it is an older copy"):
        serve(private(tmp_path / "out", rounds=4, resume=True), tmp_path / "nodes")


def test_a_deployed_run_is_not_simulated_on(tmp_path: Path) -> None:
    """A simulation knows nothing of the secret, the ledger and the clients."""
    serve(private(tmp_path / "out", rounds=1), tmp_path / "nodes")
    with pytest.raises(BadRunFolder, match="holds a deployed run, which goes on with undrift deploy"):
        undrift.run(out=tmp_path / "out", resume=True, rounds=2)


# The messages.
def test_a_client_sends_its_update_and_nothing_else(tmp_path: Path) -> None:
    plan = private(tmp_path / "out", cohort=3, rounds=2)
    nodes = serve(plan, tmp_path / "nodes")
    trained = [from_records(m.content) for m in nodes.up if m.metadata.message_type == "train"]
    assert len(trained) == 6
    for letter in trained:
        assert letter.facts.keys() == set(ECHOED)  # no loss, no counts, no seconds
        assert {name for name, array in letter.arrays.items() if np.prod(array.shape)} == {"up.d"}
    last = records(plan)[-1]
    assert last["train_loss"] is None and last["gradients"] == 0 and last["client_seconds"] == 0
    public = serve(planned(tmp_path / "public", cohort=3, rounds=1), tmp_path / "nodes")
    answers = [from_records(m.content) for m in public.up if m.metadata.message_type == "train"]
    assert {"loss", "samples", "seconds", "gradients"} <= answers[0].facts.keys()


def test_what_a_client_tells_all_the_same_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from undrift.deploy import client, messages

    answer = client.Client.answer

    def talkative(self: client.Client, letter: messages.Letter) -> messages.Letter:
        found = answer(self, letter)
        told: dict[str, messages.Fact] = {"loss": 1e30, "samples": 10**12, "seconds": "?", "gradients": -1}
        return messages.Letter(found.facts | told, found.arrays)

    monkeypatch.setattr(client.Client, "answer", talkative)
    plan = private(tmp_path / "out", cohort=3, rounds=1)
    serve(plan, tmp_path / "nodes")
    assert records(plan)[0]["dropped"] == 0 and records(plan)[0]["train_loss"] is None


def test_a_client_with_a_file_reports_that_it_fits_and_not_how_much_it_has(tmp_path: Path) -> None:
    plan = planned_with_files(tmp_path, cohort=3, sampling="bernoulli", privacy_clip=0.5, privacy_noise=2.0)
    nodes = Sites(plan, tmp_path, labelled())
    seen: list[Message] = []
    send = nodes.send_and_receive

    def watch(messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        answers = send(messages, timeout=timeout)
        seen.extend(answers)
        return answers

    nodes.send_and_receive = watch  # type: ignore[method-assign]
    server_app()(nodes, Context(1, 1, {}, RecordDict(), plan.flat()))  # type: ignore[arg-type]
    reports = [from_records(m.content) for m in seen if m.metadata.message_type == "query"]
    assert [(r.facts["samples"], r.facts["classes"]) for r in reports] == [(1, 3)] * 3
    assert [r["dropped"] for r in records(plan)] == [0, 0, 0]


class Deaf(Watched):
    """Nodes that say their names and fail at everything else."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        named = all(message.metadata.message_type == "query" for message in sent)
        self.failing = set() if named else set(self.contexts)
        return super().send_and_receive(sent, timeout=timeout)


def test_a_missing_answer_counts_as_nothing_and_the_noise_is_there_all_the_same(tmp_path: Path) -> None:
    plan = private(tmp_path / "out", cohort=3, rounds=1)
    server_app()(Deaf(plan, tmp_path), Context(1, 1, {}, RecordDict(), plan.flat()))  # type: ignore[arg-type]
    run = build_simulation(plan.run, plan.alg, load_dataset("digits"), "logreg", torch.device("cpu"))
    moved = run.net.layout.join(load_file(tmp_path / "out" / "model.safetensors"), run.state.x)
    apart = run.net.without_padding(moved - run.state.x, "model")
    assert apart.std() == pytest.approx(2.0 * 0.5 / 3, rel=0.1) and records(plan)[0]["dropped"] == 3


@pytest.mark.parametrize("algorithm", ["dp-ftrl", "fedcm", "fedadam"])
def test_other_methods_and_adaptive_clipping_run_privately_too(algorithm: str, tmp_path: Path) -> None:
    quantile = 0.0 if algorithm == "dp-ftrl" else 0.5
    plan = private(tmp_path / "out", algorithm=algorithm, rounds=2, privacy_quantile=quantile)
    serve(plan, tmp_path / "nodes")
    again = private(tmp_path / "out", algorithm=algorithm, rounds=3, privacy_quantile=quantile, resume=True)
    serve(again, tmp_path / "nodes")
    spent = [record["epsilon"] for record in records(again)]
    assert len(spent) == 3 and 0 <= spent[0] <= spent[1] <= spent[2] and spent[2] > 0
    assert all(("clip" in record) == bool(quantile) for record in records(again))


@pytest.mark.system
def test_real_processes_keep_the_secret_and_the_settings(tmp_path: Path) -> None:
    """No file of a node, and no log, holds the secret; a resumed run cannot become less private, and goes on otherwise."""

    settings = "--algorithm fedavg --model logreg --clients 2 --cohort 2 --sampling bernoulli --privacy-clip 0.5"

    def local(logs: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "undrift", "deploy", "local", str(tmp_path / logs), *shlex.split(settings)]
        command += ["--out", str(tmp_path / "out"), *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    begun = local("first", "--rounds", "1", "--privacy-noise", "1.5")
    assert begun.returncode == 0, begun.stderr
    secret = json.loads((tmp_path / "out" / "privacy.json").read_text())["secret"]
    holders = [
        f for f in tmp_path.rglob("*") if f.is_file() and not f.is_symlink() and secret.encode() in f.read_bytes()
    ]
    assert holders == [tmp_path / "out" / "privacy.json"]
    changed = local("second", "--rounds", "2", "--privacy-noise", "15", "--resume")
    assert changed.returncode != 0 and "its privacy_noise is 1.5, not 15.0" in changed.stderr + changed.stdout
    again = local("third", "--rounds", "2", "--privacy-noise", "1.5", "--resume")
    assert again.returncode == 0, again.stderr
    spent = [json.loads(line)["epsilon"] for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    assert len(spent) == 2 and spent[0] < spent[1]
