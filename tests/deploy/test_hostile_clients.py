"""Clients that lie about their samples or send ruinous updates: what they achieve with and without a rule."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

flwr = pytest.importorskip("flwr")

from flwr.app import Message  # noqa: E402

from tests.deploy.test_federation import Federation, array, maker, same, with_array  # noqa: E402
from tests.deploy.test_flower import identity  # noqa: E402, F401
from tests.deploy.test_own_files import Sites, at_once, labelled, planned, records, serve, simulator  # noqa: E402, F401
from tests.deploy.test_own_files import same as same_files  # noqa: E402
from tests.small import path  # noqa: E402
from undrift.core.errors import BadSetting  # noqa: E402
from undrift.deploy.flower import from_records, to_records  # noqa: E402
from undrift.deploy.messages import Letter, encode  # noqa: E402
from undrift.deploy.server import cap_shares  # noqa: E402


class Liars(Sites):
    """Nodes of which one says of itself what is not true, and may send its update times a factor."""

    samples: int | None = None
    factor = 1.0
    liar = "north"

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        answers = super().send_and_receive(messages, timeout=timeout)
        for answer in answers:
            letter = from_records(answer.content)
            if letter.facts["client"] == self.liar and "samples" in letter.facts:
                facts = letter.facts | ({} if self.samples is None else {"samples": self.samples})
                letter = Letter(facts, letter.arrays)
                if "up.d" in letter.arrays:
                    letter = with_array(letter, self.factor * array(letter))
                answer.content = to_records(letter)
        return answers


@pytest.mark.parametrize("samples", [10**12, 2**62, 10_000_001, 0, -5])
def test_a_number_of_samples_that_nobody_has_is_that_clients_failure(
    samples: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = labelled()
    plan = planned(tmp_path, cohort=3, weights="size", epochs=1.0, steps=0)
    nodes = Liars(plan, tmp_path, files)
    nodes.samples = samples
    serve(plan, nodes)
    said = capsys.readouterr().out
    assert "north is turned away: it has " in said and len(records(plan)) == 3
    same_files(plan, simulator(plan, files), {(t, "1") for t in (1, 2, 3)})


def test_a_report_that_is_believed_costs_the_server_nothing_and_weighs_no_more_than_half(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trillion samples are a trillion indices in the simulator; the server of a real federation needs none of them."""
    plan = planned(
        tmp_path, cohort=3, weights="size", epochs=1.0, steps=0, most_samples=10**13, rounds=2, weight_cap=0.5
    )
    nodes = Liars(plan, tmp_path, labelled())
    nodes.samples = 10**12
    serve(plan, nodes)
    said = capsys.readouterr().out
    assert [r["dropped"] for r in records(plan)] == [0, 0]
    assert said.count("north reports 1000000000000 training samples and would have more than 50%") == 1


@pytest.mark.parametrize("cap", [0.5, 1.0])
def test_a_lie_about_samples_does_not_outvote_the_others(cap: float, tmp_path: Path) -> None:
    """A million samples with the update times -3: as the only voice the liar ruins the model, with half it does less."""
    plan = planned(tmp_path, cohort=3, weights="size", weight_cap=cap, rounds=1)
    files, nodes = labelled(), Liars(plan, tmp_path, labelled())
    nodes.samples, nodes.factor = 10**6, -3.0
    serve(plan, nodes)
    run = simulator(plan, files)()
    part = run.attendance(0)
    who, work = run.who(part), run.work(part)
    d = run.ask(work, who).train(run.alg, run.down(who), run.state.buffers, who).up.d
    sizes = np.array([7, 10**6, 23])
    weight = torch.from_numpy(cap_shares(sizes, cap) / cap_shares(sizes, cap).sum())
    found = run.net.layout.join(load_file(tmp_path / "out" / "model.safetensors"), run.state.x)
    signs = torch.tensor([1.0, -3.0, 1.0], dtype=torch.float64)
    expected = run.state.x - ((weight * signs).unsqueeze(-1) * d).sum(0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert (weight[1] > 0.99) == (cap == 1.0) and (weight[1] <= 0.5) == (cap == 0.5)


def test_a_report_that_changes_between_rounds_is_said_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path, cohort=3, rounds=3)

    class Changing(Liars):
        def get_node_ids(self) -> set[int]:
            """It leaves after the first round, and comes back as another node with another report."""
            if self.trained == 1 and self.samples is None:
                self.samples = 41
                (node,) = (n for n, c in self.contexts.items() if c.node_config["name"] == "north")
                self.contexts[5] = self.contexts.pop(node)
            return super().get_node_ids()

    serve(plan, Changing(plan, tmp_path, labelled()))
    said = capsys.readouterr().out
    assert said.count("north reports 41 training samples now, 40 before: its answers will be refused") == 1
    assert "it has 41 samples, but this round counts on 40" in said
    assert [r["dropped"] for r in records(plan)] == [0, 1, 1]


@pytest.mark.parametrize("settings", [{"most_samples": 0}, {"weight_cap": 0.0}, {"weight_cap": 1.5}])
def test_bounds_that_make_no_sense_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="most_samples must be at least 1, and weight_cap above 0"):
        planned(tmp_path, **settings)


def distance(federation: Federation, honest: torch.Tensor, rounds: int) -> float:
    """How far the federation's model is from the honest one, in units of how far that one went."""
    start = federation.run.net.without_padding(federation.run.state.x, "model")
    found = federation.path(rounds)[-1]
    return float((found - honest).norm() / (honest - start).norm())


@pytest.mark.parametrize("factor", [-20.0, 1e30])
@pytest.mark.parametrize("rule", ["mean", "median", "trimmed:0.2", "krum:1", "geometric", "clip:1", "bound:1"])
def test_a_ruinous_update_is_said_and_a_rule_withstands_it(rule: str, factor: float, tmp_path: Path) -> None:
    """One of six clients: with a rule the model goes where the honest ones go; without one the log tells what happened."""
    rounds = 4
    honest = path(maker("fedavg", cohort=6)(), rounds)[-1]
    federation = Federation(tmp_path, maker("fedavg", cohort=6, aggregate=rule))
    federation.post.spoil = {"3": lambda answer: with_array(answer, factor * array(answer))}
    away = distance(federation, honest, rounds)
    lines = [line for line in federation.said if "3 sent vectors" in line]
    assert lines and lines[0].startswith("round 1: 3 sent vectors ") and "times longer than most" in lines[0]
    if rule == "mean":
        assert away > 2 and "nothing guards against it: see --aggregate" in lines[0]
        return
    assert away < 1.5 and f"aggregate={rule} guards against it" in lines[0] and federation.record.dropped == 0


def test_what_a_client_measures_is_measured_too(tmp_path: Path) -> None:
    federation = Federation(tmp_path, maker("mime", cohort=6))

    def spoil(answer: Letter) -> Letter:
        if "sent" not in answer.arrays:
            return answer
        numbers = torch.from_numpy(np.load(io.BytesIO(answer.arrays["sent"].data)))
        return Letter(answer.facts, {"sent": encode(-100.0 * numbers)})

    federation.post.spoil = {"3": spoil}
    federation.path(1)
    assert [line for line in federation.said if line.startswith("round 1: 3 sent vectors ")]


@pytest.mark.parametrize("spec", ["topk:5", "int8", "int4", "fp16", "rbgs:5"])
def test_a_compressed_update_is_measured_as_the_server_sees_it(spec: str, tmp_path: Path) -> None:
    """Not as it travels: of whole numbers the scales say how long it is, and places say nothing."""
    name = "up.scales.d" if spec.startswith("int") else "up.values.d"
    federation = Federation(tmp_path, maker("fedavg", cohort=6, compress=spec))

    def times(factor: float) -> Callable[[Letter], Letter]:
        def spoil(answer: Letter) -> Letter:
            numbers = torch.from_numpy(np.load(io.BytesIO(answer.arrays[name].data)))
            return Letter(answer.facts, answer.arrays | {name: encode((factor * numbers).to(numbers.dtype))})

        return spoil

    federation.post.spoil = {"3": times(-100.0)}
    federation.path(1)
    assert [line for line in federation.said if line.startswith("round 1: 3 sent vectors ")]


@pytest.mark.parametrize("spec", ["int8", "int4"])
def test_scales_under_which_an_update_is_not_finite_are_refused(spec: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, maker("fedavg", cohort=6, compress=spec, dtype=torch.float32))

    def spoil(answer: Letter) -> Letter:
        scales = torch.full(answer.arrays["up.scales.d"].shape, 3e38)
        return Letter(answer.facts, answer.arrays | {"up.scales.d": encode(scales)})

    federation.post.spoil = {"3": spoil}
    federation.path(1)
    assert bool(federation.run.state.x.isfinite().all())
    assert federation.visits[3].outcome == "refused: it is not finite"


def test_a_reason_that_a_client_wrote_is_cut_in_the_record(tmp_path: Path) -> None:
    federation = Federation(tmp_path, maker("fedavg", cohort=6))
    ask = federation.post.ask
    federation.post.ask = lambda name, letter: "refused: " + 10**6 * "x" if name == "3" else ask(name, letter)  # type: ignore[method-assign]
    federation.path(1)
    assert len(federation.visits[3].outcome) == 300


def test_a_ruined_model_is_said_to_be_ruined(tmp_path: Path) -> None:
    def relu() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))

    federation = Federation(tmp_path, maker("fedavg", relu, cohort=6, dtype=torch.float32))
    federation.post.spoil = {"3": lambda answer: with_array(answer, 1e38 * array(answer).sign())}
    federation.path(3)
    assert sum("does not count: refused: it is not finite" in line for line in federation.said) >= 5
    assert any(
        "so the model that was sent is probably ruined; begin anew with a rule" in line for line in federation.said
    )
    assert federation.record.dropped == 6


@pytest.mark.parametrize("name, rule", [("scaffold", "median"), ("mime", "geometric"), ("gradma", "clip:1")])
def test_a_guarded_federation_equals_the_simulator(name: str, rule: str, tmp_path: Path) -> None:
    make = maker(name, cohort=6, weights="size", aggregate=rule)
    same(Federation(tmp_path, make).path(3), path(make(), 3))


def test_a_rule_without_enough_answers_says_so(tmp_path: Path) -> None:
    federation = Federation(tmp_path, maker("fedavg", cohort=6, aggregate="krum:1"))
    federation.post.lost = {(1, "0"), (1, "1")}
    federation.path(2)
    assert [line for line in federation.said if "promise" in line] == [
        "round 1: krum:1 needs 5 answers to keep its promise, not 4"
    ]


def test_attacks_are_simulated_and_private_sums_have_no_further_rule(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="attack is for simulations"):
        planned(tmp_path, attack="scale:0.2")
    private = dict(cohort=3, sampling="bernoulli", privacy_clip=0.5, privacy_noise=1.0)
    plan = planned(tmp_path, **private, aggregate="median")
    with pytest.raises(BadSetting, match="would break the promise of a private sum"):
        serve(plan, Sites(plan, tmp_path, labelled()))
