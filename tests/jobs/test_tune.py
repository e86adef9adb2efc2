"""Successive halving: what goes on, what it costs, and files that other commands take."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from undrift import cli
from undrift.core.errors import BadSetting
from undrift.jobs.config import from_mapping
from undrift.jobs.plain_values import from_toml
from undrift.jobs.sweep import plan
from undrift.jobs.tune import halve, mean_score, trial_score, tune

SEARCH = """
dataset = "digits"
model = "logreg"
clients = 12
cohort = 4
steps = 2
batch = 8
rounds = 10
eval_every = 1
[sweep]
algorithms = ["fedavg", "fedavgm"]
[sweep.grid]
lr = [1e-7, 0.2]
[sweep.only.fedavgm]
beta1 = [0.5]
"""


def test_one_in_four_goes_on_and_64_cost_less_than_15_runs() -> None:
    asked: list[tuple[int, int]] = []

    def score(some: list[int], rounds: int) -> list[float | None]:
        asked.append((len(some), rounds))
        return [None if value == 63 else float(value) for value in some]

    assert halve(list(range(64)), 500, score) == 62, "what has no score is the worst"
    assert asked == [(64, 50), (16, 125), (4, 500)] and sum(n * rounds for n, rounds in asked) / 500 == 14.4


def test_among_equals_the_first_wins_and_a_single_one_needs_no_trial() -> None:
    assert halve([3, 1, 2], 10, lambda some, rounds: [0.0] * len(some)) == 3
    assert halve([3], 10, lambda some, rounds: pytest.fail("nothing to compare")) == 3


def test_what_is_picked_has_run_to_the_end_and_has_not_diverged() -> None:
    """Large rates lead after ten rounds and diverge later: the next best take their place, also where one alone goes on."""
    asked: list[tuple[list[float], int]] = []

    def score(some: list[float], rounds: int) -> list[float | None]:
        asked.append((some, rounds))
        return [None if value * rounds > 10 else value for value in some]

    assert halve([0.05, 0.5, 1.0], 100, score, (0.1, 1.0), 4) == 0.05
    assert asked == [([0.05, 0.5, 1.0], 10), ([1.0], 100), ([0.5], 100), ([0.05], 100)]
    assert halve([2.0, 3.0], 100, score, (0.1, 1.0), 4) is None, "everything diverges"


def test_a_trial_is_judged_by_where_it_ends() -> None:
    def line(best: float, last: float, stopped: str = "rounds") -> dict[str, object]:
        return {
            "stopped": stopped,
            "settings": {},
            "scores": {"val_accuracy": {"best": best, "round": 5, "last": last}},
        }

    assert trial_score(line(0.9, 0.1)) == 0.1, "it is the last model that a run leaves"
    assert trial_score(line(0.9, 0.1), take="best") == 0.9
    assert trial_score(line(0.9, 0.8, "diverged")) is None
    assert mean_score([line(0.9, 0.8), line(0.9, 0.6)]) == pytest.approx(0.7)
    assert mean_score([line(0.9, 0.8), line(0.9, 0.8, "diverged")]) is None, "one seed of it diverged"


def test_where_every_rate_diverges_nothing_is_picked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.toml"
    text = SEARCH.replace('["fedavg", "fedavgm"]', '["fedavg"]').partition("[sweep.only")[0]
    file.write_text(text.replace("[1e-7, 0.2]", "[1e29, 1e28]").replace("logreg", "mlp"))
    with pytest.raises(BadSetting, match=r"every setting of fedavg diverged .* add smaller rates"):
        tune(file, tmp_path / "o", print)
    assert "fedavg: nothing is picked, every setting diverged or failed; 2 settings" in capsys.readouterr().out
    assert not (tmp_path / "o/tuned.toml").exists() and not (tmp_path / "o/fedavg.toml").exists()


def test_tune_picks_the_rate_that_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.toml").write_text(SEARCH)
    command = f"tune {tmp_path / 's.toml'} --out {tmp_path / 'o'} --keep 2 --rungs 0.2,1".split()
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "fedavg: lr = 0.2; 2 settings, 3 trials, 14 rounds, as many as 1.4 full runs" in said
    lines = [json.loads(text) for text in (tmp_path / "o/trials.jsonl").read_text().splitlines()]
    trials = [line for line in lines if "scores" in line]
    assert {line["seed"] for line in trials} == {100} and all("val_accuracy" in line["scores"] for line in trials)
    one = from_mapping(from_toml(tmp_path / "o/fedavgm.toml"))
    assert (one.algorithm, one.rounds, one.set) == ("fedavgm", 10, {"lr": 0.2, "beta1": 0.5})
    jobs, _ = plan(tmp_path / "o/tuned.toml")
    assert {(job.config.algorithm, job.config.seed) for job in jobs} == {  # type: ignore[attr-defined]
        (name, seed) for name in ("fedavg", "fedavgm") for seed in (0, 1, 2)
    }
    assert all(job.config.set["lr"] == 0.2 for job in jobs)
    assert tomllib.loads((tmp_path / "o/tuned.toml").read_text())["sweep"]["only"]["fedavg"] == {"lr": 0.2}
    before = (tmp_path / "o/trials.jsonl").read_bytes()
    assert cli.main(command) == 0 and (tmp_path / "o/trials.jsonl").read_bytes() == before, "nothing is tried twice"


def test_data_parallel_methods_are_tuned_too(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        'dataset = "digits"\nmodel = "logreg"\nworkers = 2\nrounds = 2\nsteps = 5\n'
        '[sweep]\nmethods = ["def"]\n[sweep.grid]\nlr = [1e-7, 0.1]\n'
    )
    assert cli.main(f"tune {tmp_path / 's.toml'} --out {tmp_path / 'o'} --rungs 1".split()) == 0
    assert tomllib.loads((tmp_path / "o/def.toml").read_text())["lr"] == 0.1


def test_rungs_that_make_no_sense_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.toml").write_text(SEARCH)
    rungs, keep = "rungs are rising shares", "keep must be at least 2"
    for wrong, says in {"--rungs=0.5,0.1": rungs, "--keep=1": keep, "--rungs=0": rungs}.items():
        assert cli.main(["tune", str(tmp_path / "s.toml"), "--out", str(tmp_path / "o"), wrong]) == 2
        assert says in capsys.readouterr().err


def test_personal_models_are_judged_by_their_own_samples(tmp_path: Path) -> None:
    """`local` leaves the server's model where it was: on its validation samples every rate is as good as any other."""
    file = tmp_path / "own.toml"
    text = SEARCH.replace('["fedavg", "fedavgm"]', '["local"]').partition("[sweep.only")[0]
    file.write_text(text.replace("[sweep]", "own_test = 0.3\n[sweep]"))
    assert tune(file, tmp_path / "tuned", lambda _: None) == {"local": {"lr": 0.2}}
