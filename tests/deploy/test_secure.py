"""Secure aggregation: the plain model up to quantisation, clients that leave in the middle, a server that sees sums alone."""

from __future__ import annotations

import contextlib
import json
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

flwr = pytest.importorskip("flwr")

from tests.deploy.test_federation import FEDERATED, Direct, Federation, Make, maker, normalised, without  # noqa: E402
from tests.deploy.test_flower import identity, planned, serve  # noqa: E402, F401
from tests.small import federation, path  # noqa: E402
from undrift.algorithms.checks import looks_at_single_uploads  # noqa: E402
from undrift.core.errors import BadSetting  # noqa: E402
from undrift.data.load import load_dataset  # noqa: E402
from undrift.deploy import masks  # noqa: E402
from undrift.deploy.client import ECHOED, Client  # noqa: E402
from undrift.deploy.messages import Letter, decode, encode, split_npy  # noqa: E402
from undrift.deploy.node import check_allowed  # noqa: E402
from undrift.deploy.remote import Remote  # noqa: E402
from undrift.deploy.secure import Summand  # noqa: E402
from undrift.deploy.server import Deployment  # noqa: E402
from undrift.jobs.registry import algorithm_class  # noqa: E402
from undrift.jobs.run import build_simulation  # noqa: E402

BOUND = 16.0
TEN = (3, 20, 9, 33, 5, 14, 8, 12, 7, 10)
SUMMED = [name for name in FEDERATED if not looks_at_single_uploads(algorithm_class(name))]


class Sealed(Direct):
    """Clients whose uploads travel under masks; every letter is kept, and answers of a step may be lost or changed."""

    def __init__(self, make: Make, root: Path) -> None:
        super().__init__(make, root)
        self.down: list[tuple[str, Letter]] = []
        self.up: list[tuple[str, Letter]] = []
        self.gone: dict[str, set[str]] = {}  # by exchange: whose answer does not arrive
        self.sums = 0

    def ask(self, name: str, letter: Letter) -> Letter | str:
        run, self.down = self.make(), [*self.down, (name, letter)]
        asked = Client(name, run.whole, run.net, run.data, run.settings, run.device, self.root / name, BOUND, self.sums)
        try:
            answer = asked.answer(letter)
        except Exception as error:
            return f"failed: {error}"
        exchange = letter.fact("exchange", str)
        if name in self.gone.get(exchange, ()):
            return "no answer in time"
        answer = self.spoil.get(f"{name}{exchange}", lambda a: a)(answer)
        self.up.append((name, answer))
        return answer


def secure(root: Path, make: Make, clients: int = 6, least: int = 1) -> Any:
    found: Any = Federation.__new__(Federation)
    found.said, found.visits, found.post, found.run = [], [], Sealed(make, root), make()
    names = [str(id) for id in range(clients)]
    found.remote = Remote(found.post, names, "a1", least, found.said.append, secure_bound=BOUND)
    found.deployment = Deployment(found.run, found.remote, found.visits.extend)
    return found


def ten(name: str = "fedavg", cohort: int = 10, **settings: Any) -> Make:
    return maker(name, fed=federation(TEN), cohort=cohort, **settings)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


OFTEN = ("fedavg", "scaffold", "mime", "feddyn", "mifa", "fedadam")
EACH = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.system) for name in SUMMED]


@pytest.mark.parametrize("name", EACH)
def test_a_secure_run_is_the_plain_one_up_to_quantisation(name: str, tmp_path: Path) -> None:
    make = maker(name, cohort=4)
    found = secure(tmp_path, make)
    points = found.path(3)
    near(points, path(make(), 3))
    assert not found.said and found.record.dropped == 0
    alone = make()
    for _ in range(3):
        last = alone.round()
    assert found.record.train_loss == pytest.approx(last.train_loss, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in FEDERATED if name not in SUMMED])
def test_methods_that_need_single_uploads_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="hides single uploads"):
        secure(tmp_path, maker(name, cohort=4))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"cohort": 2}, "at least 3"),
        ({"weights": "size"}, "weights uniform"),
        ({"aggregate": "median"}, "a rule looks"),
        ({"compress": "fp16"}, "leave compress out"),
        ({"module": normalised}, "BatchNorm"),
    ],
)
def test_settings_that_do_not_go_with_sums_are_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=reason):
        secure(tmp_path, maker("fedavg", **({"cohort": 4} | settings)))


@pytest.mark.parametrize("exchange", ["train-keys", "train-shares", "train", "train-unmask"])
def test_two_of_ten_clients_are_lost_in_the_middle_of_a_round(exchange: str, tmp_path: Path) -> None:
    """The sum is that of those who sent numbers, and the two go on from their states before the round."""
    make = ten("scaffold")
    found = secure(tmp_path, make, 10)
    found.post.gone = {exchange: {"2", "7"}}
    points = [found.path(1)]
    found.post.gone = {}
    points.append(found.path(1))
    lost = {(1, "2"), (1, "7")} if exchange != "train-unmask" else set()
    near(torch.cat(points), without(make, lost, 2))
    assert sum("is not in the sum any more" in line for line in found.said) == 2
    if lost:
        kept = secure(tmp_path / "kept", make, 10).path(2)
        assert (kept - torch.cat(points)).abs().max() > 1e-3


@pytest.mark.parametrize("exchange", ["train-keys", "train-shares", "train", "train-unmask"])
def test_a_sum_over_too_few_is_not_taken(exchange: str, tmp_path: Path) -> None:
    """Four of ten are lost; seven must stay. Of those who give keys three are enough, if none of them leaves."""
    found = secure(tmp_path, ten(), 10, least=8 if exchange == "train-keys" else 1)
    found.post.gone = {exchange: {"0", "3", "6", "9"}}
    before = found.run.net.without_padding(found.run.state.x, "model")
    assert torch.equal(found.path(1)[0], before)
    assert any("fewer than the" in line and "the model stays" in line for line in found.said)
    if exchange != "train-unmask":
        assert not any("seeds" in letter.arrays for _, letter in found.post.up)  # nothing was opened
    found.post.gone = {}
    assert not torch.equal(found.path(1)[0], before)


def array(letter: Letter, name: str) -> np.ndarray[Any, Any]:
    header, body = split_npy(name, letter.arrays[name].data)
    return np.frombuffer(body, header.dtype).reshape(header.shape)


def test_the_server_sees_masked_numbers_only(tmp_path: Path) -> None:
    """All that clients send: echoes of facts, public keys, sealed shares, noise, and for each client one kind of share."""
    make = ten(batch=40, steps=1)
    found = secure(tmp_path, make, 10)
    found.post.gone = {"train": {"4"}}
    found.path(1)
    alone, updates = make(), {}
    for name in "0123456789":
        plain = Direct(make, tmp_path / "plain")
        (letter,) = (sent for n, sent in found.post.down if n == name and sent.facts["exchange"] == "train")
        open_letter = Letter(
            letter.facts, {n.removeprefix("request."): a for n, a in letter.arrays.items() if n.startswith("request.")}
        )
        answer = plain.ask(name, open_letter)
        assert isinstance(answer, Letter)
        updates[name] = array(answer, "up.d")
    kinds: dict[str, set[str]] = {}
    for name, letter in found.post.up:
        assert letter.facts.keys() == set(ECHOED)
        kinds.setdefault(letter.facts["exchange"], set()).update(letter.arrays)  # type: ignore[arg-type]
        if letter.facts["exchange"] == "train":
            sent = array(letter, "numbers").view(np.uint32)
            fixed = masks.to_fixed(updates[name], BOUND, 10)
            assert len(sent) == len(fixed) + 2 and not np.intersect1d(sent, fixed[fixed != 0]).size
            for numbers in (sent, sent[:-2] - fixed):  # behind the update: the loss, and whether it was too large
                assert stats.kstest(numbers / 2**32, "uniform").pvalue > 1e-4
    assert kinds == {
        "train-keys": {"keys", "settings"}, "train-shares": {"sealed", "mark"},
        "train": {"numbers"}, "train-unmask": {"seeds", "keys"},
    }  # fmt: skip
    for _, letter in found.post.up:
        if letter.facts["exchange"] == "train-unmask":  # seeds of the nine that stay, the mask key of the one that left
            assert array(letter, "seeds").shape == (9, 16) and array(letter, "keys").shape == (1, 32)
    assert alone.t == 0


def test_nothing_of_a_sum_is_left_on_a_clients_disk_and_meanwhile_only_its_owner_reads_it(tmp_path: Path) -> None:
    found = secure(tmp_path, maker("fedavg", cohort=6))
    modes: list[int] = []

    def look(answer: Letter) -> Letter:
        modes.extend(stat.S_IMODE(f.stat().st_mode) for f in tmp_path.rglob("sum.json"))
        return answer

    found.post.spoil = {"3train": look, "3train-keys": look}
    found.path(1)
    assert set(modes) == {0o600} and not [*tmp_path.rglob("sum.json")]


# A server that asks for more than it should.
def replay(found: Any, name: str, exchange: str) -> Letter:
    return next(letter for n, letter in found.post.down if n == name and letter.facts["exchange"] == exchange)


def changed(letter: Letter, array_name: str, tensor: torch.Tensor, **facts: Any) -> Letter:
    return Letter(letter.facts | facts, letter.arrays | {array_name: encode(tensor)})


def test_a_client_opens_its_shares_once_and_never_both_of_anybody(tmp_path: Path) -> None:
    found = secure(tmp_path, ten(), 10)
    found.post.gone = {"train-unmask": {"5"}}
    asked: list[str | Letter] = []

    def ask_twice(answer: Letter) -> Letter:
        again = replay(found, "5", "train-unmask")
        fewer = torch.tensor([id for id in range(10) if id != 3])
        asked.extend([found.post.ask("5", again), found.post.ask("5", changed(again, "ids", fewer, clients=9))])
        return answer

    found.post.spoil = {"6train-unmask": ask_twice}
    found.path(1)
    assert asked == ["failed: this letter is not the next one of a sum that has begun here"] * 2


def test_two_letters_at_the_same_time_are_answered_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a process of its own. Who opened for both would give both shares of client 3."""
    found = secure(tmp_path, ten(), 10)
    ask, held, both = found.post.ask, Summand.recall, threading.Barrier(2)
    opened = list[Letter | str]()

    def look(self: Summand, context: str, at: str) -> dict[str, Any]:
        remembered = held(self, context, at)
        if at == "-unmask" and self.file.parent.name == "5":
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(1.0)  # until the other has looked too, if it can
        return remembered

    def at_once(name: str, letter: Letter) -> Letter | str:
        if (name, letter.facts["exchange"]) != ("5", "train-unmask"):
            return ask(name, letter)
        fewer = changed(letter, "ids", torch.tensor([id for id in range(10) if id != 3]), clients=9)
        with ThreadPoolExecutor(2) as pool:
            opened.extend(pool.map(lambda told: ask("5", told), [letter, fewer]))
        return "no answer in time"

    monkeypatch.setattr(Summand, "recall", look)
    found.post.ask = at_once
    near(found.path(1), path(ten()(), 1))
    assert sorted(isinstance(answer, Letter) for answer in opened) == [False, True]


@pytest.mark.parametrize(
    ("exchange", "change", "reason"),
    [
        ("train-shares", lambda told: first_keys(told, 2), "must be|needs the keys|is over"),
        ("train-shares", lambda told: with_keys(told, lambda k: k.flip(0)), "this one's among them"),
        ("train-shares", lambda told: with_keys(told, lambda k: torch.cat([k[:1]] * 9 + [k[9:]])), "all different"),
        ("train", lambda told: only(told, range(4, 10)), "needs the shares of 7"),
        ("train", lambda told: only(told, range(9)), "this one's among them"),
        ("train-unmask", lambda told: left(told, [1, 2, 9]), "needs the numbers of 7"),
        ("train-unmask", lambda told: left(told, [0, 1, 2, 3, 4, 5, 6, 7]), "this one's among them"),
        ("train-unmask", lambda told: left(told, [9, 0, 1, 2, 3, 4, 5, 6]), "do not rise"),
        ("train-unmask", lambda told: left(told, [0, 1, 2, 3, 4, 5, 6, 9, 12]), "that gave shares"),
    ],
)  # fmt: skip
def test_what_a_curious_server_may_not_ask(
    exchange: str, change: Callable[[Letter], Letter], reason: str, tmp_path: Path
) -> None:
    found = secure(tmp_path, ten(), 10)
    ask, failures = found.post.ask, list[str | Letter]()

    def ask_more(name: str, letter: Letter) -> Letter | str:
        if name == "9" and letter.facts["exchange"] == exchange:
            failures.append(ask(name, change(letter)))
        return ask(name, letter)

    found.post.ask = ask_more
    near(found.path(1), path(ten()(), 1))  # the honest letter is still answered
    (failure,) = failures
    assert isinstance(failure, str)
    assert any(part in failure for part in reason.split("|")), failure


def test_letters_twice_late_or_out_of_order_get_nothing(tmp_path: Path) -> None:
    """Each letter but the first is answered once, at its time, in its round; what came between changes nothing."""
    found = secure(tmp_path, ten(), 10)
    ask, order = found.post.ask, ("train-shares", "train", "train-unmask")
    refused, old = list[str | Letter](), dict[str, Letter]()

    def meddle(name: str, letter: Letter) -> Letter | str:
        exchange = str(letter.facts["exchange"])
        if name != "9" or exchange not in order:
            return ask(name, letter)
        refused.extend(ask(name, letter) for letter in old.values())  # of this round and of the one before
        refused.extend(ask(name, replay(found, "9", other)) for other in order[: order.index(exchange)])
        answer = ask(name, letter)
        refused.append(ask(name, letter))
        old[exchange] = letter
        return answer

    found.post.ask = meddle
    near(found.path(2), path(ten()(), 2))
    assert len(refused) == 24 and {*refused} == {"failed: this letter is not the next one of a sum that has begun here"}


@pytest.mark.parametrize("honest", [True, False])
def test_a_server_that_gives_clients_different_models_gets_noise(honest: bool, tmp_path: Path) -> None:
    """One client's numbers would be the sum's, where those of all others are known: as those for a model of zeros."""
    make = ten()
    found = secure(tmp_path, make, 10)
    ask, alone = found.post.ask, Direct(make, tmp_path / "alone")
    updates = list[np.ndarray[Any, Any]]()

    def meddle(name: str, letter: Letter) -> Letter | str:
        if letter.facts["exchange"] != "train":
            return ask(name, letter)
        if not honest and name != "9":
            sent = found.run.net.without_padding(found.run.state.x, "model")
            letter = changed(letter, "request.down.x", torch.zeros_like(sent))
        plain = {n.removeprefix("request."): a for n, a in letter.arrays.items() if n.startswith("request.")}
        answer = alone.ask(name, Letter(letter.facts, plain))
        assert isinstance(answer, Letter)
        updates.append(array(answer, "up.d"))
        return ask(name, letter)

    found.post.ask = meddle
    before = found.run.net.without_padding(found.run.state.x, "model").clone()
    moved = (found.path(1)[0] - before).abs()
    known = torch.from_numpy(np.mean(updates, 0))
    if honest:
        near(moved, known.abs())
    else:
        assert moved.median() > 1.0 > 100 * known.abs().median()


def test_a_client_with_other_settings_is_not_added_up(tmp_path: Path) -> None:
    """A server might tell all others to make no steps."""
    make = maker("fedavg", cohort=6)
    found = secure(tmp_path, make)
    ask = found.post.ask

    def other(name: str, letter: Letter) -> Letter | str:
        if name != "2":
            return ask(name, letter)
        run = make()
        parts = run.whole, run.net, run.data, run.settings, run.device
        return Client("2", *parts, tmp_path / "2", BOUND, run_settings='{"steps": 0}').answer(letter)

    found.post.ask = other
    near(found.path(1), without(make, {(1, "2")}, 1))
    (line,) = found.said
    assert line.endswith("refused: it was given other settings of the run, so that its masks would not come off")


def test_shares_of_one_client_under_the_name_of_another_are_seen(tmp_path: Path) -> None:
    """The server hands client 9 what 3 and 4 have sealed for it, the wrong way round; or what was sealed for 8."""
    for other in (False, True):
        found = secure(tmp_path / str(other), ten(), 10)
        ask = found.post.ask

        def swapped(name: str, letter: Letter, other: bool = other, ask: Any = ask, found: Any = found) -> Letter | str:
            if name == "9" and letter.facts["exchange"] == "train":
                rows = tensor_of(letter, "sealed", 10, 64)
                rows[[3, 4]] = rows[[4, 3]]
                if other:
                    rows = tensor_of(replay(found, "8", "train"), "sealed", 10, 64)
                letter = changed(letter, "sealed", rows)
            return ask(name, letter)

        found.post.ask = swapped
        near(found.path(1), path(ten()(), 1))
        (line,) = found.said
        assert "9 is not in the sum any more: failed: a share was not sealed by the client" in line


def tensor_of(letter: Letter, name: str, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return decode(name, letter.arrays[name], torch.empty(shape, dtype=dtype))


def with_keys(letter: Letter, change: Callable[[torch.Tensor], torch.Tensor]) -> Letter:
    return changed(letter, "keys", change(tensor_of(letter, "keys", 10, 64)))


def first_keys(letter: Letter, n: int) -> Letter:
    less = changed(letter, "keys", tensor_of(letter, "keys", 10, 64)[-n:], clients=n)
    return changed(less, "ids", torch.arange(10 - n, 10))


def only(letter: Letter, ids: range) -> Letter:
    rows = tensor_of(letter, "sealed", 10, 64)[[*ids]]
    return changed(changed(letter, "sealed", rows, clients=len(ids)), "ids", torch.tensor([*ids]))


def left(letter: Letter, ids: list[int]) -> Letter:
    return changed(letter, "ids", torch.tensor(ids), clients=len(ids))


# Clients that do not do their part.
def test_false_shares_are_seen_and_nothing_is_taken(tmp_path: Path) -> None:
    found = secure(tmp_path, ten(), 10)
    before = found.run.net.without_padding(found.run.state.x, "model")
    found.post.spoil = {"1train-unmask": lambda a: changed(a, "seeds", torch.zeros(10, 16, dtype=torch.uint8))}
    assert torch.equal(found.path(1)[0], before)
    assert "do not fit together; the model stays as it is" in found.said[-1]


def test_a_client_that_sealed_rubbish_for_others_is_seen(tmp_path: Path) -> None:
    found = secure(tmp_path, ten(), 10)
    found.post.spoil = {"1train-shares": lambda a: changed(a, "sealed", torch.zeros(10, 64, dtype=torch.uint8))}
    before = found.run.net.without_padding(found.run.state.x, "model")
    assert torch.equal(found.path(1)[0], before)
    assert sum("not sealed by the client" in line for line in found.said) == 9


def test_an_update_beyond_the_bound_is_not_sent(tmp_path: Path) -> None:
    """Wrapped around, it would be a false sum; the client leaves instead, and does not say how long its update is."""
    make = maker("fedavg", cohort=6)
    found = secure(tmp_path, make)
    ask = found.post.ask

    def too_long(name: str, letter: Letter) -> Letter | str:
        return ask(name, letter) if name != "2" else far(letter)

    def far(letter: Letter) -> Letter | str:
        run = make()
        tiny = Client("2", run.whole, run.net, run.data, run.settings, run.device, found.post.root / "2", 1e-9)
        try:
            return tiny.answer(letter)
        except Exception as error:
            return f"failed: {error}"

    found.post.ask = too_long
    near(found.path(1), without(make, {(1, "2")}, 1))
    (line,) = found.said
    assert "larger than secure_bound=1e-09" in line


def test_a_loss_beyond_the_bound_is_none_and_not_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are short where losses are long: a mean of losses that were cut would be a false one."""
    monkeypatch.setattr("tests.deploy.test_secure.BOUND", 0.5)
    found = secure(tmp_path, maker("fedavg", cohort=6))
    near(found.path(2), path(maker("fedavg", cohort=6)(), 2))
    assert np.isnan(found.record.train_loss) and len(found.said) == 2
    assert "is larger than secure_bound=0.5 at some client" in found.said[0]


@pytest.mark.parametrize("bound", [1e-300, 1e-7, 1e7, -1.0, float("nan")])
def test_bounds_under_which_nothing_can_be_sent_are_refused(bound: float, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="from 1e-6 to 1e6"):
        planned(tmp_path, secure_bound=bound)


def test_a_node_may_insist_on_sums(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="shows the server every upload"):
        check_allowed({"secure_bound": 0.0}, {"sums": "5"})
    check_allowed({"secure_bound": 16.0}, {"sums": "5"})
    found = secure(tmp_path, maker("fedavg", cohort=4))
    found.post.sums = 5
    found.path(1)
    assert sum("needs the keys of 5 clients" in line for line in found.said) == 4


def test_the_apps_and_a_resumed_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)
    settings: dict[str, Any] = dict(algorithm="scaffold", clients=4, cohort=3, secure_bound=BOUND)
    serve(planned(tmp_path / "out", **settings | {"rounds": 1}), tmp_path)
    plan = planned(tmp_path / "out", **settings, resume=True)
    serve(plan, tmp_path)
    run = build_simulation(plan.run, plan.alg, load_dataset("digits"), "logreg", torch.device("cpu"))
    found = run.net.layout.join(load_file(tmp_path / "out" / "model.safetensors"), run.state.x)
    for _ in range(3):
        run.round()
    near(found, run.state.x)
    visits = [json.loads(line) for line in (tmp_path / "out" / "clients.jsonl").read_text().splitlines()]
    assert [v["exchange"] for v in visits if v["client"] == visits[0]["client"] and v["round"] == 1] == [
        "train-keys", "train-shares", "train", "train-unmask"
    ]  # fmt: skip
    with pytest.raises(Exception, match="its secure_bound is 16"):
        serve(planned(tmp_path / "out", **settings | {"secure_bound": 0.0, "rounds": 4}, resume=True), tmp_path)
