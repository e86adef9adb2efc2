"""Clients score the global and their own model on samples that they hold out, as a simulation does."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict

from tests.deploy.test_flower import Nodes, identity, planned, serve  # noqa: F401
from tests.deploy.test_own_files import Sites, labelled, simulator
from tests.deploy.test_own_files import planned as planned_with_files
from tests.deploy.test_own_files import serve as serve_files
from undrift.cli import main
from undrift.core.errors import BadSetting
from undrift.core.run_files import read_settings
from undrift.data.load import load_dataset
from undrift.deploy.flower import from_records, server_app, to_records
from undrift.deploy.messages import Fact, Letter
from undrift.deploy.scores import Best
from undrift.deploy.settings import Plan
from undrift.jobs.run import build_simulation


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)


def records(plan: Plan) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(plan.deploy.out) / "rounds.jsonl").read_text().splitlines()]


def same_scores(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name in theirs:
        if name.startswith("own_"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9), name
    found, expected = ours["sites"]["test"], theirs["sites"]["test"]
    assert found.keys() == expected.keys()
    for kind, metrics in expected.items():
        for metric, each in metrics.items():
            np.testing.assert_allclose(found[kind][metric], each, rtol=1e-9)


@pytest.mark.parametrize("name", ["fedavg", "softpull", "apfl", "ft", "per-fedavg", "pfedme", "local", "scaffold"])
def test_scores_are_the_simulators(name: str, tmp_path: Path) -> None:
    """Of all clients, also of those who have never taken part, with the server's reply to the last round of each."""
    plan = planned(tmp_path / "out", algorithm=name, own_test=0.2, eval_every=2, set={"lr": 0.05})
    serve(plan, tmp_path)
    run = build_simulation(plan.run, plan.alg, load_dataset("digits"), plan.run.model, torch.device("cpu"))
    alone = [run.round(last=t == 2).more for t in range(3)]
    ours = records(plan)
    assert ["own_accuracy" in record for record in ours] == [False, True, True]
    for t in (1, 2):
        same_scores(ours[t], alone[t])
    kinds = ours[2]["sites"]["test"]
    assert ("personal" in kinds) == run.alg.personalises
    if run.alg.personalises and name != "ft":  # which does not tune its clients' models yet
        assert kinds["personal"]["loss"] != kinds["global"]["loss"]


def test_scores_of_clients_with_files_are_the_simulators(tmp_path: Path) -> None:
    plan, files = planned_with_files(tmp_path, cohort=3, own_test=0.4, eval_every=1), labelled()
    serve_files(plan, Sites(plan, tmp_path, files))
    run = simulator(plan, files)()
    for record in records(plan):
        same_scores(record, run.round().more)
    assert read_settings(Path(plan.deploy.out))[0]["made"]["sites"] == plan.names  # for the report
    assert main(["report", plan.deploy.out, "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in plan.names)


class Says(Nodes):
    """Nodes of which client 1 changes what it says of its scores."""

    told: dict[str, Fact]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        answers = super().send_and_receive(messages, timeout=timeout)
        for answer in answers:
            letter = from_records(answer.content)
            if letter.facts.get("exchange") == "score" and letter.facts["client"] == "1":
                answer.content = to_records(Letter(letter.facts | self.told, {}))
        return answers


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"score.global.loss": "good"}, "must be a finite number"),
        ({"score.global.accuracy": float("nan")}, "must be a finite number"),
        ({"score.global.loss": 1e12}, "not between -1e+09 and 1e+09"),
        ({"score.global.accuracy": 1.5}, "not between 0 and 1"),
        ({"weight": -1.0}, "not between 0 and"),
        ({"weight": 1e300}, "not between 0 and"),
        ({"round": 7}, "its round is 7"),
    ],
)
def test_scores_that_cannot_be_are_refused(
    told: dict[str, Fact], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path / "out", rounds=1, own_test=0.2)
    nodes = Says(3, plan.flat(), tmp_path)  # type: ignore[arg-type]
    nodes.told = told
    server_app()(nodes, Context(1, 1, {}, RecordDict(), plan.flat()))  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "round 1: 1 is not scored: refused: " in said and reason in said
    (record,) = records(plan)
    assert np.isnan(record["sites"]["test"]["global"]["loss"]).tolist() == [False, True, False]
    assert np.isfinite(record["own_accuracy"])


def test_the_best_round_is_kept_and_a_run_that_grows_worse_ends(tmp_path: Path) -> None:
    """At a rate that is far too large; also when it is resumed in between."""
    settings: dict[str, Any] = dict(own_test=0.3, eval_every=1, cohort=3, patience=2, set={"lr": 40.0}, lr_decay=1.0)
    serve(planned(tmp_path / "out", rounds=2, **settings), tmp_path)
    plan = planned(tmp_path / "out", rounds=60, resume=True, **settings)
    serve(plan, tmp_path)
    scores = [record["own_accuracy"] for record in records(plan)]
    best = int(np.argmax(scores)) + 1
    assert len(scores) == best + 2 < 60
    with safe_open(tmp_path / "out" / "best.safetensors", "pt") as opened:
        facts = opened.metadata()
    assert facts["round"] == str(best) and float(facts["accuracy"]) == max(scores)
    run = build_simulation(plan.run, plan.alg, load_dataset("digits"), plan.run.model, torch.device("cpu"))
    for _ in range(best):
        run.round()
    kept = run.net.layout.join(load_file(tmp_path / "out" / "best.safetensors"), run.state.x)
    torch.testing.assert_close(kept, run.state.x, rtol=1e-6, atol=1e-8)


def test_a_lower_loss_is_better_and_a_round_without_scores_is_none() -> None:
    best = Best("loss", 2)
    assert [best.take(t, {"own_loss": v} if v else {}) for t, v in enumerate([3.0, 2.0, 0, 2.0], 1)] == [
        True, True, False, False
    ]  # fmt: skip
    assert best.round == 2 and best.enough and not Best("loss", 0).enough
    other = Best("loss", 2)
    other.restore(best.tensors())
    assert (other.score, other.round, other.enough) == (-2.0, 2, True)


def test_private_and_secure_runs_say_nothing_of_how_models_do(tmp_path: Path) -> None:
    for name, more in (
        ("secure", {"secure_bound": 16.0}),
        ("private", {"privacy_clip": 0.5, "privacy_noise": 8.0, "algorithm": "dp-ftrl"}),
    ):
        plan = planned(tmp_path / name, cohort=3, rounds=1, own_test=0.2, **more)
        serve(plan, tmp_path / name)
        assert not any(n.startswith("own_") for n in records(plan)[0])
        with pytest.raises(BadSetting, match="patience needs scores"):
            planned(tmp_path / name, cohort=3, own_test=0.2, patience=3, **more)
    with pytest.raises(BadSetting, match="patience needs scores"):
        planned(tmp_path, patience=3)
