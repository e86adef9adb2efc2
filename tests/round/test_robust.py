"""Robust rules and attacks within rounds: for every method, in every execution, replayed, resumed, and seen to help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from tests.simulate.test_program import agree, together
from tests.small import QUICK, data, path, simulation, timeless
from undrift import cli
from undrift.algorithms.checks import looks_at_single_uploads
from undrift.algorithms.fedavg import FedAvg
from undrift.core.errors import BadRunFolder, BadSetting, UnknownName
from undrift.core.names import names
from undrift.jobs.registry import algorithm_class
from undrift.round.aggregate import parse_rule
from undrift.round.attack import parse_attack
from undrift.round.order import Cost, play
from undrift.simulate.simulation import Simulation

RULES = ["median", "trimmed:0.2", "krum:1", "geometric", "clip:0.5", "bound:0.01"]
ATTACKS = ["signflip:0.4", "scale:0.4:20", "gauss:0.4:1", "labelflip:0.4"]


def made(name: str = "fedavg", **settings: Any) -> Simulation:
    return simulation(algorithm_class(name)(lr=0.1), **({"cohort": 6} | settings))


@pytest.mark.parametrize("name", [name for name in names("algorithms") if not algorithm_class(name).pools])
def test_rules_go_with_every_method_that_needs_only_the_mean(name: str) -> None:
    """Without a client to cut nothing changes; with one the rule is felt; single uploads are only ever shortened."""
    whole = path(made(name), 2)
    torch.testing.assert_close(path(made(name, aggregate="clip:99999"), 2), whole, rtol=1e-10, atol=1e-12)
    sends = name != "local"  # which sends nothing
    assert torch.allclose(path(made(name, aggregate="bound:0.01"), 2), whole, rtol=1e-4) != sends
    if looks_at_single_uploads(algorithm_class(name)):
        with pytest.raises(BadSetting, match="looks at each client's upload by itself"):
            made(name, aggregate="median")
        return
    torch.testing.assert_close(path(made(name, aggregate="trimmed:0"), 2), whole, rtol=1e-10, atol=1e-12)
    assert torch.allclose(path(made(name, aggregate="median"), 2), whole, rtol=1e-4) != sends


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("attack", ["signflip:0.4", "gauss:0.4:1"])
def test_executions_agree(rule: str, attack: str) -> None:
    runs = [
        path(made("scaffold", aggregate=rule, attack=attack, execution=how, weights="size"), 3)
        for how in ("stacked", "pool", "debug")
    ]
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.* answers to keep its promise")
@pytest.mark.parametrize(
    "settings", [{}, {"sampling": "bernoulli"}, {"dropout_rate": 0.3, "weights": "size", "epochs": 1.5}], ids=str
)
@pytest.mark.parametrize("rule, attack", [*zip(RULES, 2 * ATTACKS, strict=False), ("mean", "gauss:0.4")])
def test_replayed_rounds_equal_the_engines_own(rule: str, attack: str, settings: dict[str, Any]) -> None:
    alg = algorithm_class("scaffold")(lr=0.2)
    agree(*together(alg, 5, eval_every=4, cohort=5, aggregate=rule, attack=attack, **settings))


def test_a_first_exchange_is_guarded_too() -> None:
    """Mime's clients send a gradient before they train: hostile ones are left out there as well."""
    plain, hostile, guarded = (
        made("mime", aggregate=rule, attack=attack)
        for rule, attack in (("mean", ""), ("mean", "scale:0.2:-1e6"), ("median", "scale:0.2:-1e6"))
    )
    for run in (plain, hostile, guarded):
        run.round()
    assert plain.state.companion.c.norm() * 1e3 < hostile.state.companion.c.norm()
    assert guarded.state.companion.c.norm() < 3 * plain.state.companion.c.norm()


def answers_of(run: Simulation) -> tuple[Any, Tensor]:
    """What the clients of the next round compute, and who attacks."""
    part = run.attendance(run.t)
    who, work = run.who(part), run.work(part)
    assert run.attackers is not None
    return run.ask(work, who).train(run.alg, run.down(who), run.state.buffers, who), run.attackers.are[who.ids]


@pytest.mark.parametrize("attack, factor", [("signflip:0.4", -1.0), ("scale:0.4:20", 20.0), ("scale:0.4:-3", -3.0)])
def test_attackers_send_what_the_attack_says(attack: str, factor: float) -> None:
    run = made(attack=attack)
    honest, hostile = answers_of(run)
    assert hostile.sum() == 2
    start = run.state.x
    sent = torch.where(hostile.unsqueeze(-1), factor * honest.up.d, honest.up.d)
    run.round()
    torch.testing.assert_close(run.state.x, start - sent.mean(0), rtol=1e-12, atol=1e-14)


def test_gaussian_attackers_send_noise_of_their_strength_anew_in_each_round() -> None:
    run = simulation(FedAvg(lr=0.1), nn.Linear(5, 3), cohort=6, attack="gauss:1:3")
    moves = []
    for _ in range(30):
        before = run.state.x
        run.round()
        moves.append(run.net.without_padding(before - run.state.x, "model"))
    found = torch.stack(moves)
    assert 0.9 < float(found.std() / (3 / 6**0.5)) < 1.1 and abs(float(found.mean())) < 0.25
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("compress", ["int8", "int4"])
def test_noise_that_would_not_be_of_its_strength_is_refused(compress: str) -> None:
    with pytest.raises(BadSetting, match="only the scales would be noise"):
        made(attack="gauss:0.2", compress=compress)


def test_labels_are_turned_round_on_attackers_alone() -> None:
    plain, run = made(), made(attack="labelflip:0.4")
    assert run.attackers is not None
    for id in range(6):
        rows = run.data.members[run.data.start[id] : run.data.start[id] + run.data.sizes[id]]
        flipped = run.data.train.targets[rows] == 2 - plain.data.train.targets[rows]
        same = run.data.train.targets[rows] == plain.data.train.targets[rows]
        assert bool(flipped.all() if run.attackers.are[id] else same.all())
    assert torch.equal(run.data.test.targets, plain.data.test.targets)
    with pytest.raises(BadSetting, match="share no sample"):
        undrift.run(attack="labelflip:0.2", partition="resample:20", rounds=1, **QUICK)


def test_attackers_are_drawn_by_the_seed_and_stay() -> None:
    attack = parse_attack("scale:0.3")
    assert attack is not None and attack.strength == 20.0
    chosen = [attack.attackers(100, seed).tolist() for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2] and len(set(chosen[0])) == 30
    assert len(attack.attackers(2, 0)) == 1


def normalised() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("rule", RULES)
def test_statistics_go_through_the_rule(rule: str) -> None:
    """A variance that an attacker drives below zero, or the counters, must not spoil the server's statistics."""
    settings: dict[str, Any] = {"cohort": 6, "module": normalised(), "attack": "scale:0.2:-1e4"}
    runs = {r: simulation(FedAvg(lr=0.1), **settings, aggregate=r) for r in ("mean", rule)}
    honest = simulation(FedAvg(lr=0.1), **(settings | {"attack": ""}))
    for run in (*runs.values(), honest):
        run.round()
    names_, spoilt, guarded, fine = (
        run.net.buffer_layout.split(run.state.buffers) for run in (honest, runs["mean"], runs[rule], honest)
    )
    variance = next(name for name in names_ if name.endswith("running_var"))
    counter = next(name for name in names_ if name.endswith("num_batches_tracked"))
    assert float(spoilt[variance].min()) < 0 < float(guarded[variance].min())
    assert (guarded[variance] - fine[variance]).norm() < 3 * fine[variance].norm()
    assert float(guarded[counter]) == float(fine[counter]) == 3.0


def test_answers_that_are_not_finite_are_left_out_before_the_rule() -> None:
    run = made(aggregate="median")
    part = run.attendance(0)
    who, work = run.who(part), run.work(part)
    ask = run.ask(work, who)
    trained = ask.train

    def spoilt(*given: Any) -> Any:
        answers = trained(*given)
        answers.up.d[2] = torch.nan
        return answers

    ask.train = spoilt  # type: ignore[method-assign]
    after = play(run.alg, run.task, run.state, who, ask, Cost())
    assert after.good.tolist() == [True, True, False, True, True, True]
    ask.train = trained  # type: ignore[method-assign]
    d = ask.train(run.alg, run.down(who), run.state.buffers, who).up.d
    others = d[[0, 1, 3, 4, 5]].median(0).values
    torch.testing.assert_close(after.state.x, run.state.x - others, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "rule, attack", [("krum:1:2", "gauss:0.4:1"), ("geometric", "scale:0.4"), ("median", "labelflip:0.4")]
)
def test_a_resumed_run_goes_on_bit_for_bit(rule: str, attack: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = QUICK | {"cohort": 6, "algorithm": "scaffold", "aggregate": rule, "attack": attack}
    whole = undrift.run(rounds=6, out=tmp_path / "whole", **settings)
    undrift.run(rounds=3, out=tmp_path / "part", **settings)
    resumed = undrift.run(rounds=6, out=tmp_path / "part", resume=True)
    assert timeless(resumed.records)[3:] == timeless(whole.records)[3:]
    assert all(torch.equal(resumed.model[name], tensor) for name, tensor in whole.model.items())
    text = (tmp_path / "part" / "run.toml").read_text()
    assert f'aggregate = "{rule}"' in text and f'attack = "{attack}"' in text
    with pytest.raises(BadRunFolder, match="holds another run: its attack"):
        undrift.run(rounds=7, out=tmp_path / "part", resume=True, attack="")


@pytest.mark.parametrize("attack", ["signflip:0.2:20", "gauss:0.2:20", "scale:0.2:-1e30"])
def test_rules_keep_a_run_learning_that_the_mean_loses(attack: str) -> None:
    """Twenty clients of digits, four of them hostile."""
    settings = {"clients": 20, "cohort": 20, "rounds": 12, "partition": "iid", "model": "logreg", "eval_every": 12}

    def accuracy(**more: Any) -> float:
        return float(undrift.run(set={"lr": 0.5}, **settings, **more).records[-1]["accuracy"])

    assert accuracy(attack=attack) < 0.5
    for rule in ("median", "trimmed:0.2", "krum:4", "krum:4:10", "geometric", "clip"):
        assert accuracy(attack=attack, aggregate=rule) > 0.7, rule
    assert accuracy() > 0.8


def test_settings_that_do_not_go_together_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, reason in (
        (["--aggregate", "median", "--compress", "fp16"], "does not go with compress"),
        (["--aggregate", "krum:4", "--cohort", "10"], "needs at least 11 clients a round"),
        (["--aggregate", "trimmed:0.1", "--cohort", "9"], "needs at least 10 clients a round"),
        (["--aggregate", "median", "--cohort", "2"], "needs at least 3 clients a round"),
        (["--aggregate", "median", "--algorithm", "gradma-s"], "looks at each client's upload"),
        (["--aggregate", "middle"], "unknown value of aggregate 'middle'"),
        (["--attack", "scale:2"], "a share above 0 and at most 1"),
        (["--attack", "labelflip:0.2:3"], "attack takes labelflip:SHARE with"),
        (["--attack", "signflip"], "attack takes signflip:SHARE:STRENGTH"),
        (["--attack", "flip:0.2"], "unknown value of attack 'flip'"),
        (["--attack", "gauss:0.2", "--algorithm", "centralized"], "attack needs several"),
    ):
        assert cli.main(["run", "--rounds", "1", *flags]) == 2, flags
        error = capsys.readouterr().err.strip()
        assert reason in error and "\n" not in error
    with pytest.raises(UnknownName):
        parse_attack("flip:0.2")
    real = (data().x_train, data().x_train[:, :1])
    settings: dict[str, Any] = {"partition": "iid", "rounds": 1, "clients": 4, "cohort": 2, "model": nn.Linear(5, 1)}
    with pytest.raises(BadSetting, match="one class label a sample"):
        undrift.run(data=(real, real), loss=nn.functional.mse_loss, attack="labelflip:0.2", **settings)


def test_a_rule_is_refused_where_it_would_be_the_plain_mean() -> None:
    """With one client fewer than `least` it leaves nobody out; with `least` it does."""
    v = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0], [8.0], [1000.0]])
    for share in (0.1, 0.2, 0.25, 0.3, 0.34, 0.4, 0.49):
        rule = parse_rule(f"trimmed:{share}")
        assert rule is not None
        least = rule.least
        for n, plain in ((least - 1, True), (least, False)):
            cut = v[-n:]
            weight = torch.full((n, 1), 1.0 / n)
            assert torch.allclose(rule(cut, weight)[0], cut.mean(0)) == plain, (share, n)
    assert [rule.least for rule in map(parse_rule, RULES) if rule] == [3, 5, 5, 3, 3, 1]


def test_a_round_in_which_too_few_answer_for_the_rule_is_warned_of_once() -> None:
    run = made(aggregate="krum:1", cohort=5, dropout_rate=0.6)
    with pytest.warns(UserWarning, match="aggregate=krum:1 needs 5 answers to keep its promise, not") as said:
        path(run, 6)
    assert len(said) == 1
