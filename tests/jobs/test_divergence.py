"""A run that diverges is noticed, ends, and keeps its best model; the defaults and the documented commands learn."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import undrift
from tests.small import QUICK, model_for, timeless
from tests.test_docs import ROOT, commands
from undrift import cli
from undrift.core.names import names
from undrift.dataparallel.methods import METHODS
from undrift.pipeline.pipe_config import CHOICES as PIPE_CHOICES

WILD = QUICK | {
    "model": "mlp",
    "algorithm": "fedavgm",
    "set": {"lr": 1.0},
    "rounds": 60,
    "eval_every": 2,
    "checkpoint_every": 4,
}
CHANGED = {
    "scaffold": 100,
    "fedavgslm": 30,
    "fedavgslm-z": 50,
    "mifam": 50,
    "fedmlbm": 100,
}  # rounds after which other defaults were seen to fail
WITH_US = "digits", "synthetic-sites"
LONG = "resnet164", "vgg16-bn", "1000000"  # commands with these take hours


def accuracies(records: list[dict[str, Any]]) -> dict[int, float]:
    return {r["round"]: r["accuracy"] for r in records if r["accuracy"] is not None}


def learned(records: list[dict[str, Any]], classes: int) -> bool:
    """Whether the last score is far above chance and near the best: on the clients' own samples if it is known, else on test."""
    scores = [
        s for r in records if (s := r.get("own_dice", r.get("own_accuracy", r.get("dice", r["accuracy"])))) is not None
    ]
    return scores[-1] > 0.85 * max(scores) and scores[-1] > 2 / max(classes, 5)


def test_a_run_that_diverges_warns_ends_and_keeps_its_best_model(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="diverged and ends; the model of round .* kept .*lr=0.25 in place of 1"):
        result = undrift.run(WILD, out=tmp_path / "run")
    assert result.stopped == "diverged" and len(result.records) < 60
    seen = accuracies(result.records)
    assert seen[result.model_round] == max(seen.values()) > result.records[-1]["accuracy"]
    alone = undrift.run(WILD, rounds=result.model_round)  # ends before anything goes wrong
    assert all(torch.equal(result.model[n], t) for n, t in alone.model.items())
    kept = load_file(tmp_path / "run/model.safetensors")
    assert all(torch.equal(kept[n], t) for n, t in result.model.items())
    (last, *_) = sorted((tmp_path / "run/checkpoint").glob("*.json"), reverse=True)
    assert json.loads(last.read_text())["stopped"] == "diverged"
    again = undrift.run(out=tmp_path / "run", resume=True, rounds=80)  # it has ended, and stays so
    assert again.stopped == "diverged" and len(again.records) == len(result.records)
    assert again.model_round == result.model_round and again.model.keys() == result.model.keys()
    assert all(torch.equal(again.model[n], t) for n, t in result.model.items())


def test_the_best_model_survives_a_kill(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="diverged"):
        whole = undrift.run(WILD)

    class Killed(Exception):
        pass

    def kill(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == len(whole.records) - 1:
            raise Killed

    with pytest.raises(Killed):
        undrift.run(WILD, out=tmp_path / "run", progress=kill)
    with pytest.warns(UserWarning, match="diverged"):
        resumed = undrift.run(out=tmp_path / "run", resume=True)
    assert resumed.model_round == whole.model_round and len(resumed.records) == len(whole.records)
    assert all(torch.equal(resumed.model[n], t) for n, t in whole.model.items())


def test_three_rounds_without_a_finite_update_end_a_run_and_one_is_told() -> None:
    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        return loss * (torch.nan if torch.is_grad_enabled() else 1.0)

    with pytest.warns(UserWarning, match="finite") as told:
        result = undrift.run(QUICK, loss=broken, eval_every=100, rounds=10)
    messages = [str(warning.message) for warning in told if "finite" in str(warning.message)]
    assert messages[0] == "round 1: no client's update was finite"
    assert "3 rounds in a row: the run has diverged" in messages[1] and len(messages) == 2
    assert result.stopped == "diverged" and len(result.records) == 3


def test_a_loss_that_explodes_and_stays_finite_ends_a_run() -> None:
    def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - torch.nn.functional.one_hot(targets, 10)).square().mean(1)

    with pytest.warns(UserWarning, match=r"the loss on the test set is .*e\+.*, after .* at first"):
        result = undrift.run(QUICK, model="logreg", loss=squares, set={"lr": 1.0}, eval_every=1, rounds=60)
    assert result.stopped == "diverged" and len(result.records) < 60
    assert all(math.isfinite(record["loss"]) for record in result.records)
    assert result.model_round < len(result.records)


def test_a_round_in_which_nobody_answers_is_no_divergence() -> None:
    """The run goes on; it is warned of once, when it was so three times in a row."""
    settings = QUICK | {"cohort": 1, "dropout_rate": 0.9, "rounds": 12}
    with pytest.warns(UserWarning, match="nobody has answered, 3 rounds in a row") as said:
        result = undrift.run(settings)
    assert len(said) == 1
    assert sum(r["dropped"] == r["clients"] for r in result.records) > 5
    assert result.stopped == "rounds" and result.model_round == 12


def test_a_run_that_learns_keeps_its_last_model(tmp_path: Path) -> None:
    settings = QUICK | {"rounds": 12, "eval_every": 1, "out": tmp_path / "run"}
    result = undrift.run(**settings)
    assert result.stopped == "rounds" and result.model_round == 12
    assert timeless(result.records)[-1]["round"] == 12


def test_the_command_says_what_to_try(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "run --clients 12 --cohort 4 --steps 2 --batch 8 --algorithm fedavgm --set lr=4 --rounds 60 --eval-every 2"
    with pytest.warns(UserWarning, match="finite|diverged"):
        assert cli.main([*words.split(), "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "diverged, so the model is that of round" in said and "try a lower rate, such as lr=1 in place of 4" in said


@pytest.mark.parametrize("name", CHANGED)
def test_defaults_learn_that_did_not(name: str) -> None:
    result = undrift.run(algorithm=name, execution="stacked", rounds=CHANGED[name])
    assert result.stopped == "rounds" and learned(result.records, 10) and result.accuracy > 0.85


@pytest.mark.system
@pytest.mark.parametrize("name", names("algorithms"))
def test_the_defaults_of_every_method_learn(name: str) -> None:
    own = {"own_test": 0.2} if name == "local" else {}  # the server's model stays as it was
    result = undrift.run(algorithm=name, execution="stacked", model=model_for(name, "mlp"), **own)
    assert result.stopped == "rounds" and learned(result.records, 10)


OTHERS = [("dp", name) for name in METHODS] + [("pipe", name) for name in PIPE_CHOICES["method"]]


@pytest.mark.parametrize(
    ("command", "method"),
    [pytest.param(*each, marks=() if each[1] in ("def", "dsp") else pytest.mark.system) for each in OTHERS],
)
def test_the_defaults_of_the_other_commands_learn(command: str, method: str, tmp_path: Path) -> None:
    check_command(f"{command} --method {method}", tmp_path / "run")


def training_commands() -> list[tuple[str, str]]:
    """The documented commands that train, from their settings alone and on data that come with the package."""
    found = {}
    for where, line in commands():
        words = shlex.split(line)
        trains = words[0] in ("run", "dp", "dataparallel", "pipe") or words[:2] == ["deploy", "local"]
        other = {"--resume", "--schedule", "--data"} & set(words) or ".toml" in line or "my_algorithm" in line
        dataset = words[words.index("--dataset") + 1] if "--dataset" in words else "digits"
        if trains and not other and dataset in WITH_US and not set(LONG) & set(words):
            found[line] = where, line
    return list(found.values())


def test_there_are_commands_that_train() -> None:
    found = [line for _, line in training_commands()]
    assert len(found) > 40 and any("--local fedmim" in line for line in found)
    assert {line.split()[0] for line in found} >= {"run", "dataparallel", "pipe", "deploy"}


def check_command(line: str, out: Path) -> None:
    words = shlex.split(line)
    if "--out" in words:
        del words[words.index("--out") : words.index("--out") + 2]
    assert cli.main([*words, "--out", str(out)]) == 0
    records = [json.loads(each) for each in (out / "rounds.jsonl").read_text().splitlines()]
    assert learned(records, 10), [r["accuracy"] for r in records if r["accuracy"] is not None]


def test_a_documented_command_learns_that_diverged(tmp_path: Path) -> None:
    line = next(line for _, line in training_commands() if "--local fedmim" in line)
    check_command(f"{line} --execution stacked", tmp_path / "run")


@pytest.mark.system
@pytest.mark.parametrize(("where", "line"), training_commands())
def test_a_documented_command_learns(where: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_command(line, tmp_path / "run")
