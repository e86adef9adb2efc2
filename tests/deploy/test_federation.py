"""Real federations without their processes: letters, states on disk, and the same result as the simulator's."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from tests.small import SIZES, path, simulation
from undrift.cli import main
from undrift.cli.parser import parse
from undrift.core.errors import BadSetting
from undrift.core.names import names
from undrift.deploy.client import Client
from undrift.deploy.messages import Encoded, Letter, Refused, decode, encode
from undrift.deploy.remote import Remote, Visit
from undrift.deploy.server import Deployment
from undrift.deploy.settings import DEPLOY_FIELDS, Plan
from undrift.deploy.state import Store
from undrift.jobs.config import FIELDS
from undrift.jobs.registry import algorithm_class
from undrift.simulate.simulation import Simulation

NAMES = [str(id) for id in range(len(SIZES))]
Make = Callable[[], Simulation]


def client(name: str, run: Simulation, root: Path) -> Client:
    """A client on the samples and with the settings of a simulation."""
    return Client(name, run.whole, run.net, run.data, run.settings, run.device, root)


class Direct:
    """Carries letters to clients in this process; each client is made anew for every letter, as Flower does it."""

    def __init__(self, make: Make, root: Path) -> None:
        self.make, self.root = make, root
        self.lost: set[tuple[int, str]] = set()  # (round, client) whose answer does not arrive
        self.away: set[str] = set()  # clients that no letter reaches
        self.spoil: dict[str, Callable[[Letter], Letter]] = {}

    def exchange(self, letters: Mapping[str, Letter]) -> Iterator[tuple[str, Letter | str]]:
        for name, letter in letters.items():
            yield name, "not connected" if name in self.away else self.ask(name, letter)

    def ask(self, name: str, letter: Letter) -> Letter | str:
        try:
            answer = client(name, self.make(), self.root / name).answer(letter)
        except Refused as error:
            return f"failed: {error}"
        gone = (letter.fact("round", int) + 1, name) in self.lost
        return "no answer in time" if gone else self.spoil.get(name, lambda a: a)(answer)


class Federation:
    """A deployment whose clients are called directly."""

    def __init__(self, root: Path, make: Make, least: int = 1, token: str = "a1") -> None:
        self.said: list[str] = []
        self.visits: list[Visit] = []
        self.post = Direct(make, root)
        self.run = make()
        self.remote = Remote(self.post, NAMES, token, least, self.said.append)
        self.deployment = Deployment(self.run, self.remote, self.visits.extend)

    def path(self, rounds: int) -> Tensor:
        points = []
        for _ in range(rounds):
            self.record = self.deployment.rounds(1)[0]
            points.append(self.run.net.without_padding(self.run.state.x, "model"))
        return torch.stack(points)


def maker(name: str, module: Callable[[], nn.Module] | None = None, momentum: float = 0.9, **settings: Any) -> Make:
    alg = algorithm_class(name)(lr=0.1, momentum=momentum)
    return lambda: simulation(alg, None if module is None else module(), **settings)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


FEDERATED = [name for name in names("algorithms") if not algorithm_class(name).pools]


@pytest.mark.parametrize("name", FEDERATED)
def test_a_federation_equals_the_simulator(name: str, tmp_path: Path) -> None:
    make = maker(name, cohort=4, weights="size")
    same(Federation(tmp_path, make).path(3), path(make(), 3))


@pytest.mark.parametrize("spec", ["rbgs:5", "randk:5", "topk:5", "fp16", "int8", "int4"])
def test_compressed_uploads_and_their_errors_are_the_simulators(spec: str, tmp_path: Path) -> None:
    """What was not sent is on the client's disk; of a lost answer it is as before the round."""
    make, lost = maker("scaffold", cohort=4, compress=spec), {(2, "2"), (2, "4"), (3, "0")}
    federation = Federation(tmp_path, make)
    federation.post.lost = lost
    same(federation.path(5), without(make, lost, 5))
    plain = Federation(tmp_path / "plain", maker("scaffold", cohort=4))
    plain.path(5)
    assert federation.record.bytes_up < plain.record.bytes_up
    kept = {name for file in (tmp_path / "2").rglob("after-*") for name in safe_open(file, "pt").keys()}  # noqa: SIM118
    assert {"client.error.d", "client.error.dc"} <= kept


@pytest.mark.parametrize("places", [[3, 2, 1], [0, 1, 39], [-1, 0, 1], [5, 5, 6]])
def test_entries_at_places_that_there_are_not_are_refused(places: list[int], tmp_path: Path) -> None:
    make = maker("fedavg", cohort=6, compress="topk:13")
    federation = Federation(tmp_path, make)

    def elsewhere(answer: Letter) -> Letter:
        moved = encode(torch.tensor(places, dtype=torch.int32))
        return Letter(answer.facts, answer.arrays | {"up.places.d": moved})

    federation.post.spoil = {"3": elsewhere}
    same(federation.path(1), without(make, {(1, "3")}, 1))
    assert "the places of its entries do not rise from 0 to 38" in federation.said[0]


def normalised() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


@pytest.mark.parametrize("name", ["moon", "scaffold", "mime"])
def test_statistics_dropout_epochs_and_schedules_too(name: str, tmp_path: Path) -> None:
    make = maker(name, normalised, 0.5, cohort=5, epochs=1.5, batch=4, lr_decay=0.9)
    federation, alone = Federation(tmp_path, make), make()
    same(federation.path(3), path(alone, 3))
    same(federation.run.state.buffers, alone.state.buffers)


def test_the_record_is_the_simulators_with_what_was_measured(tmp_path: Path) -> None:
    make = maker("scaffold", cohort=4)
    federation, alone = Federation(tmp_path, make), make()
    federation.path(1)
    ours, theirs = federation.record, alone.round()
    for field in ("round", "loss", "accuracy", "bytes_down", "bytes_up", "gradients", "clients", "dropped"):
        assert getattr(ours, field) == pytest.approx(getattr(theirs, field))
    assert ours.train_loss == pytest.approx(theirs.train_loss)
    # Two vectors and no buffers from each client, each with a header of 128 bytes; no padding travels.
    assert ours.more["wire_up"] == ours.more["wire_down"] == ours.bytes_up + 4 * 3 * 128
    assert len(federation.visits) == 4 and {v.outcome for v in federation.visits} == {"answered"}


@pytest.mark.parametrize("personal", ["", "ft"])
def test_fine_tuning_begins_with_new_moments_whenever_it_begins(personal: str, tmp_path: Path) -> None:
    """The clients' losses and the bytes are the simulator's, also for a client that is first tuned later."""

    def make() -> Simulation:
        fields = dict(lr=0.1, begin=2, optimizer="momentum", keep_moments=True) | (
            {"personal": "ft"} if personal else {}
        )
        return simulation(algorithm_class("fedsm" if personal else "ft")(**fields), cohort=4)

    federation, alone = Federation(tmp_path, make), make()
    cohorts = [set(alone.attendance(t).ids.tolist()) for t in range(4)]
    assert (cohorts[0] | cohorts[1]) & cohorts[3] - cohorts[2], "somebody was trained, but is tuned later"
    for _ in range(4):
        federation.path(1)
        ours, theirs = federation.record, alone.round()
        assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-12)
        assert ours.bytes_down == theirs.bytes_down


def without(make: Make, lost: set[tuple[int, str]], rounds: int) -> Tensor:
    """The simulator's path where these clients fail to answer."""
    run = make()
    points = []
    for t in range(rounds):
        part = run.attendance(t)
        stay = np.array([(t + 1, str(id)) not in lost for id in part.ids])
        less = part._replace(ids=part.ids[stay], drawn=part.drawn[stay], steps=part.steps[stay])
        run.attendance = lambda t, less=less: less  # type: ignore[method-assign, misc]
        run.round()
        del run.attendance
        points.append(run.net.without_padding(run.state.x, "model"))
    return torch.stack(points)


@pytest.mark.parametrize("name", ["scaffold", "gradma", "feddyn", "softpull", "fedsm"])
def test_lost_answers_are_as_if_the_client_had_failed(name: str, tmp_path: Path) -> None:
    """The weights of the others add up to one, and the client goes on from the state before the lost round."""
    make, lost = maker(name, cohort=6, weights="size"), {(1, "2"), (2, "0"), (2, "2"), (3, "4")}
    federation = Federation(tmp_path, make)
    federation.post.lost = lost
    same(federation.path(5), without(make, lost, 5))
    assert sum("no answer in time" in line for line in federation.said) == 4
    kept = Federation(tmp_path / "other", make).path(5)
    assert (kept[-1] - federation.run.net.without_padding(federation.run.state.x, "model")).norm() > 1e-6


def test_too_few_answers_leave_the_model_as_it_is(tmp_path: Path) -> None:
    federation = Federation(tmp_path, maker("fedavg", cohort=4), least=4)
    ids = federation.run.sampling.invite(federation.run.t)[0].tolist()
    federation.post.lost = {(1, str(ids[0]))}
    before = federation.run.net.without_padding(federation.run.state.x, "model")
    after = federation.path(2)
    assert torch.equal(after[0], before) and not torch.equal(after[1], before)
    assert any("fewer than 4" in line for line in federation.said)


@pytest.mark.parametrize("name", ["scaffold", "gradma", "fedmim", "mifa", "softpull", "fedsm", "fedsm-extra"])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_server_that_is_killed_and_resumed_loses_no_round_and_repeats_none(
    name: str, stop: int, tmp_path: Path
) -> None:
    """It is killed when clients have done round `stop` + 1 already, before the server wrote it down."""
    make = maker(name, cohort=4)
    whole = Federation(tmp_path / "whole", make).path(5)
    first, second = Federation(tmp_path / "states", make), Federation(tmp_path / "states", make)
    first.path(stop)
    kept = {n: v.clone() for n, v in first.deployment.tensors().items()}
    first.path(1)
    second.deployment.restore(kept, stop)
    assert torch.equal(second.path(5 - stop)[-1], whole[-1])


SPOILED: dict[str, tuple[Callable[[Letter], Letter], str]] = {
    "nan": (lambda a: with_array(a, torch.full_like(array(a), torch.nan)), "not finite"),
    "shape": (lambda a: with_array(a, array(a)[:-1]), "was expected"),
    "dtype": (lambda a: with_array(a, array(a).float()), "was expected"),
    "names": (lambda a: Letter(a.facts, {f"x{n}": v for n, v in a.arrays.items()}), "other names"),
    "token": (lambda a: Letter(a.facts | {"run": "b2"}, a.arrays), "its run is 'b2'"),
    "client": (lambda a: Letter(a.facts | {"client": "9"}, a.arrays), "its client is '9'"),
    "round": (lambda a: Letter(a.facts | {"round": 7}, a.arrays), "its round is 7"),
    "huge": (lambda a: with_array(a, array(a).repeat(100)), "bytes"),
    "lie": (lambda a: with_header(a), "was expected"),
    "pickle": (lambda a: with_pickle(a), "was expected"),
    "loss": (lambda a: Letter(a.facts | {"loss": float("nan")}, a.arrays), "loss must be a finite number"),
    "huge loss": (lambda a: Letter(a.facts | {"loss": 10**400}, a.arrays), "loss must be a finite number"),
    "kind": (lambda a: Letter(a.facts | {"gradients": "many"}, a.arrays), "gradients must be int"),
    "gradients": (lambda a: Letter(a.facts | {"gradients": 10**15}, a.arrays), "it can have computed at most"),
    "undone": (lambda a: Letter(a.facts | {"gradients": -1}, a.arrays), "it can have computed at most"),
    "large loss": (lambda a: Letter(a.facts | {"loss": -1e30}, a.arrays), "at most 1e+09 is believed"),
    "hours": (lambda a: Letter(a.facts | {"seconds": 1e6}, a.arrays), "says that it worked for 1e+06 s"),
    "before": (lambda a: Letter(a.facts | {"seconds": -1.0}, a.arrays), "says that it worked for -1 s"),
}


def array(letter: Letter) -> Tensor:
    return torch.from_numpy(np.load(io.BytesIO(letter.arrays["up.d"].data)))


def with_array(letter: Letter, tensor: Tensor) -> Letter:
    return Letter(letter.facts, letter.arrays | {"up.d": encode(tensor)})


def with_header(letter: Letter) -> Letter:
    """An array that says on the outside what is expected, and inside something else."""
    sent = letter.arrays["up.d"]
    return Letter(letter.facts, letter.arrays | {"up.d": sent._replace(data=encode(array(letter)[:-2]).data)})


def with_pickle(letter: Letter) -> Letter:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return Letter(letter.facts, letter.arrays | {"up.d": letter.arrays["up.d"]._replace(data=file.getvalue())})


@pytest.mark.parametrize("what", SPOILED)
def test_an_answer_that_is_not_what_was_asked_for_is_refused_and_the_round_goes_on(what: str, tmp_path: Path) -> None:
    spoil, reason = SPOILED[what]
    make = maker("fedavg", cohort=6)
    federation = Federation(tmp_path, make)
    federation.post.spoil = {"3": spoil}
    same(federation.path(1), without(make, {(1, "3")}, 1))
    assert federation.record.dropped == federation.record.more["refused"] == 1
    (line,) = federation.said
    assert "3 does not count" in line and reason in line
    assert [v.client for v in federation.visits if v.outcome != "answered"] == ["3"]


def test_decoding_refuses_what_is_too_long_before_it_looks_inside() -> None:
    with pytest.raises(Refused, match="has 4000 bytes, but 16 were expected"):
        decode("d", Encoded("float32", (4,), b"\0" * 4000), torch.zeros(4))
    with pytest.raises(Refused, match="not a .npy file"):
        decode("d", Encoded("float32", (4,), b"\0" * 100), torch.zeros(4))
    for tensor in (torch.arange(6.0).view(2, 3), torch.tensor([], dtype=torch.float64), torch.tensor([True, False])):
        assert torch.equal(decode("d", encode(tensor), tensor), tensor)


def test_a_clients_states_are_bound_to_run_and_name_and_two_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, "run", "a")
    for t in (1, 2, 5):
        store.write({1: 0, 2: 1, 5: 2}[t], t, {"c": torch.full((3,), float(t))})
    assert sorted(f.name for f in store.folder.iterdir()) == ["after-000002.safetensors", "after-000005.safetensors"]
    assert store.read(5)["c"].tolist() == [5.0] * 3 and store.read(1) is None  # type: ignore[index]
    store.write(2, 4, {"c": torch.full((3,), 4.0)})  # a late answer to an older letter takes nothing away
    assert store.read(5) is not None and store.read(2) is not None
    other = Store(tmp_path, "run", "b")
    other.folder.mkdir()
    (store.file(5)).rename(other.file(5))
    with pytest.raises(Refused, match="belongs to"):
        other.read(5)
    other.file(5).write_bytes(b"rubbish")
    with pytest.raises(Refused, match="damaged"):
        other.read(5)
    content = bytearray(store.file(2).read_bytes())
    content[-1] ^= 1  # a number that is still one
    store.file(2).write_bytes(content)
    with pytest.raises(Refused, match="its checksum is wrong"):
        store.read(2)
    for bad in ("../x", "", ".hidden", "a/b", "x" * 65):
        with pytest.raises(Refused, match="cannot be the name"):
            Store(tmp_path, "run", bad)


def test_a_client_that_lost_its_disk_begins_anew_and_says_so(tmp_path: Path) -> None:
    federation = Federation(tmp_path, maker("scaffold", cohort=6))
    federation.path(1)
    for file in (tmp_path / "2").rglob("*.safetensors"):
        file.unlink()
    federation.path(1)
    assert federation.said == ["round 2: 2 had lost its state and begins anew"]
    assert federation.record.dropped == 0


def test_what_stays_with_a_client_is_not_sent(tmp_path: Path) -> None:
    """GradMA's last local model is on the client's disk and in no letter."""
    federation = Federation(tmp_path, maker("gradma", cohort=6))
    seen: set[str] = set()
    federation.post.spoil = {"1": lambda a: (seen.update(a.arrays), a)[1]}
    federation.path(2)
    assert seen == {"up.d", "buffers"} and list((tmp_path / "1" / "a1" / "1").glob("*"))


def test_a_client_refuses_letters_for_others(tmp_path: Path) -> None:
    run = maker("fedavg", cohort=6)()
    facts = {"run": "a1", "client": "1", "id": 1, "round": 0, "exchange": "train", "since": 0, "position": 0}
    for change, reason in (
        ({"client": "2"}, "came to '1'"),
        ({"id": 99}, "no samples"),
        ({"run": "../../etc"}, "cannot be the name of a run"),
        ({"exchange": "steal"}, "other names"),
        ({"round": "0"}, "round must be int"),
    ):
        with pytest.raises(Refused, match=reason):
            client("1", run, tmp_path).answer(Letter(facts | change, {}))


def test_the_page_lists_every_setting_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    said: dict[str, str] = {}
    for listed, default in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (`[^`]*`)? ?\|", page, re.MULTILINE):
        said |= dict.fromkeys(re.findall(r"\w+", listed), (default or "").strip("`"))
    defaults = {n: f.default for n, f in FIELDS.items() if n.startswith("privacy_")}
    for name, default in (defaults | {n: f.default for n, f in DEPLOY_FIELDS.items()}).items():
        value = "false" if default is False else f"{default:g}" if isinstance(default, float) else str(default)
        assert said[name] in (value, "") and (said[name] or default in ("", 0)), name


def test_settings_travel_as_plain_values() -> None:
    plan = Plan.of({"algorithm": "fedmim", "clients": 4, "cohort": 2, "epochs": 1.0, "set": {"alpha": [0.4, 0.2]}})
    flat = plan.flat()
    assert all(isinstance(v, bool | int | float | str) for v in flat.values()) and flat["set.alpha"] == "[0.4, 0.2]"
    again = Plan.from_flat(flat)
    assert again == plan and again.alg.alpha == (0.4, 0.2) and again.run.checkpoint_every == 1
    assert dataclasses.asdict(again.run) == dataclasses.asdict(plan.run)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dropout_rate": 0.5}, "is for simulations"),
        ({"slow": "0.5,0.5"}, "is for simulations"),
        ({"min_replies": 5}, "only 2 clients are asked"),
        ({"timeout": 0.0}, "must be greater than 0"),
        ({"names": "a,b,c"}, "3 names for 4 clients"),
        ({"names": "a,b,a,c"}, "two have it"),
        ({"names": "a,b/../c,d,e"}, "cannot be a client's name"),
        ({"algorithm": "centralized"}, "all samples into one hand"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadSetting, match=reason):
        Plan.of({"clients": 4, "cohort": 2} | settings)


def test_init_writes_an_app(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flwr")
    command = [
        "deploy",
        "init",
        str(tmp_path / "fed"),
        "--algorithm",
        "gradma",
        "--dataset",
        "digits",
        "--clients",
        "5",
    ]
    assert main([*command, "--rounds", "7", "--set", "lr=0.02"]) == 0
    assert main(command) == 2  # not twice
    assert "is not empty" in capsys.readouterr().err
    import tomllib

    config = tomllib.loads((tmp_path / "fed" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    plan = Plan.from_flat(config)
    assert (plan.run.algorithm, plan.run.clients, plan.run.cohort, plan.run.rounds, plan.alg.lr) == (
        "gradma",
        5,
        5,
        7,
        0.02,
    )
    text = (tmp_path / "fed" / "README.md").read_text()
    assert "its number, from 0 to 4" in text
    commands = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("undrift ")]
    assert [parse(words).action for words in commands] == [
        "keys", "server", "identity", "admit", "node", "revoke", "keys"
    ]  # fmt: skip
    assert "flower-superlink" not in text  # by itself it would publish the control API
    assert json.dumps(config)
