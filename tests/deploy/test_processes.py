"""Real federations with real processes: a SuperLink, SuperNodes, TLS and keys, on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("flwr")

from tests.deploy.altered import altered
from tests.deploy.test_federation import without
from tests.patience import patient, wait_for_rounds
from tests.reliability import counted
from undrift.data.from_user import dataset_from
from undrift.data.load import load_dataset
from undrift.deploy.clients import admit
from undrift.deploy.keys import write_identity
from undrift.deploy.local import LocalFederation, descendants, federation, files_of
from undrift.deploy.settings import Plan
from undrift.jobs.folder import RunFolder
from undrift.jobs.run import build_simulation
from undrift.simulate.simulation import Simulation

KILLS = "kill -9 of a federation's server or node"
LONG = 400.0  # seconds without news after which a test gives up
MOST = 5  # times as long it waits for what does not come in spite of news


def planned(out: Path, **settings: Any) -> Plan:
    given: dict[str, Any] = {"clients": 2, "rounds": 3, "model": "logreg", "partition": "iid", "device": "cpu"}
    given |= {"eval_every": 1, "timeout": 300.0, "join": 300.0, "out": str(out), "execution": "pool"} | settings
    return Plan.of(given | {"cohort": given.get("cohort", given["clients"])})


def simulator(plan: Plan) -> Simulation:
    run = plan.run
    return build_simulation(run, plan.alg, load_dataset(run.dataset), run.model, torch.device("cpu"))


def deployed(plan: Plan) -> Tensor:
    """The global model that the deployed run ended with."""
    run = simulator(plan)
    model = load_file(Path(plan.deploy.out) / "model.safetensors")
    return run.net.without_padding(run.net.layout.join(model, run.state.x), "model")


def agree(plan: Plan, lost: set[tuple[int, str]] | None = None) -> None:
    found, expected = deployed(plan), without(lambda: simulator(plan), lost or set(), plan.run.rounds)[-1]
    assert (found - expected).norm() <= 1e-4 * expected.norm()
    start = simulator(plan).state.x
    assert (
        found - simulator(plan).net.without_padding(start, "model")
    ).norm() > 1e-2 * expected.norm()  # it went somewhere


def records(plan: Plan) -> list[dict[str, Any]]:
    """The rounds so far."""
    file = Path(plan.deploy.out) / "rounds.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def lost_answers(plan: Plan) -> set[tuple[int, str]]:
    """The rounds and clients (by their place in the order of names) whose answers did not count."""
    visits = [json.loads(line) for line in (Path(plan.deploy.out) / "clients.jsonl").read_text().splitlines()]
    return {(v["round"], str(plan.names.index(v["client"]))) for v in visits if v["outcome"] != "answered"}


def until(true: Callable[[], Any], here: LocalFederation, seconds: float = LONG) -> None:
    """Wait for something. A busy machine is slow in all it does, so what counts is how long there is nothing new in the logs."""
    began = heard = time.monotonic()
    size = 0
    while not true():
        now, found = time.monotonic(), sum(log.stat().st_size for log in here.home.glob("*.log"))
        size, heard = found, now if found != size else heard
        if now - heard > seconds or now - began > MOST * seconds:
            logs = "\n".join(f"== {name}\n{here.log(name)[-3000:]}" for name in ("run", "superlink", "client-0"))
            pytest.fail(f"it did not happen in {now - began:.0f} seconds\n{logs}")
        time.sleep(0.1)


def finish(here: LocalFederation, run: subprocess.Popen[bytes], plan: Plan) -> None:
    until(lambda: run.poll() is not None and not here.server_apps(), here)
    assert RunFolder(Path(plan.deploy.out)).is_finished() and len(records(plan)) == plan.run.rounds, here.log("run")


def test_smoke(tmp_path: Path) -> None:
    """TLS and keys; a round of SCAFFOLD; everything killed and started again; a second round; nothing left running."""
    first, second = (
        planned(tmp_path / "out", algorithm="scaffold", clients=1, rounds=n + 1, resume=bool(n)) for n in (0, 1)
    )
    with federation(1) as here:
        here.start_client(0)
        finish(here, here.run(first), first)
        here.kill("client-0", signal.SIGTERM)
        here.kill("superlink")
        here.kill("run")
        here.start_server()
        here.start_client(0)
        finish(here, here.run(second), second)
        home = here.home
    assert not home.exists() and not any(descendants(home, name) for name in ("superlink", "client-0", "run"))
    agree(second)
    assert [(r["round"], r["dropped"]) for r in records(second)] == [(1, 0), (2, 0)]
    assert records(second)[0]["wire_up"] > records(second)[0]["bytes_up"] > 0


@pytest.mark.system
def test_the_server_waits_for_its_database(tmp_path: Path) -> None:
    """On a busy machine who writes may have to wait; Flower alone gives up after 5 seconds, and the run ends with it."""
    with federation([], home=tmp_path / "home") as here:
        write_identity(tmp_path / "a", "a")
        with contextlib.closing(sqlite3.connect(here.home / "state.db", isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            admit(here.home, tmp_path / "a" / "client.pub")
            time.sleep(12)
            database.execute("ROLLBACK")
        until(lambda: "a is a client now" in here.log("superlink"), here)
        assert "database is locked" not in here.log("superlink") and "not taken up" not in here.log("superlink")


@contextlib.contextmanager
def lent(here: LocalFederation) -> Iterator[LocalFederation]:
    """Lend a federation to one test: all its parts are up, whatever the last test left, and its logs are empty."""
    for client in range(len(here.names)):
        if f"client-{client}" not in here.started:
            here.start_client(client)
    for log in here.home.glob("*.log"):
        os.truncate(log, 0)  # its writers append
    yield here
    if "run" in here.started:
        here.kill("run")
    if here.server_apps():  # the test has failed in the middle of a run
        here.kill("superlink")
        here.start_server()


@pytest.fixture(scope="module")
def two() -> Iterator[LocalFederation]:
    """A federation of two clients that the tests below share."""
    with federation(2) as here:
        yield here


@pytest.fixture
def pair(two: LocalFederation) -> Iterator[LocalFederation]:
    with lent(two) as here:
        yield here


@pytest.mark.system
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "gradma", "fedmim", "domo", "mime", "fedsm"])
def test_a_deployed_run_equals_the_simulator(name: str, pair: LocalFederation, tmp_path: Path) -> None:
    plan = planned(tmp_path / "out", algorithm=name)
    finish(pair, pair.run(plan), plan)
    agree(plan)
    if name == "fedsm":  # both have been sent what the server made of their models
        assert "2 of 2 clients got the reply to their last round" in pair.log("run")
        token = json.loads((tmp_path / "out" / "deploy.json").read_text())["token"]
        assert len(list((pair.home / "states").glob(f"*/{token}/*/final-000003.safetensors"))) == 2


HEADERS = (
    7 * 128
)  # bytes: values, places and scales of d and of dc, and BatchNorm's statistics, of which there are none


@pytest.mark.system
@pytest.mark.parametrize("spec, share", [("topk:8", 0.26), ("fp16", 0.51), ("int8", 0.27), ("int4", 0.14)])
def test_compressed_uploads_of_real_clients_are_the_simulators(
    spec: str, share: float, pair: LocalFederation, tmp_path: Path
) -> None:
    """Their errors are on their disks; what is measured on the wire is what the record says, and a header for each array."""
    plan = planned(tmp_path / "out", algorithm="scaffold", compress=spec)
    finish(pair, pair.run(plan), plan)
    agree(plan)
    for record in records(plan):
        assert record["bytes_up"] < share * record["bytes_down"]
        assert record["wire_up"] == record["bytes_up"] + 2 * HEADERS


@pytest.mark.system
def test_clients_with_files_of_their_own_equal_the_simulator_on_the_same_files(tmp_path: Path) -> None:
    """A part of digits each, that is on no other machine; one node's pictures have another size, and it is named."""
    digits, names = load_dataset("digits"), ["east", "north", "west"]
    parts = [(np.asarray(digits.x_train)[k::3], digits.y_train[k::3]) for k in range(3)]
    for name, (x, y) in zip(names, parts, strict=True):
        np.savez(tmp_path / f"{name}.npz", x=x if name != "west" else x[:, :4], y=y)
    settings = {"dataset": "own", "partition": "own", "shape": "1,8,8", "classes": 10, "names": ",".join(names)}
    plan = planned(tmp_path / "out", algorithm="scaffold", clients=3, wait=40.0, **settings)
    with federation(names) as here:
        here.files = files_of(plan, tmp_path)
        for client in range(3):
            here.start_client(client)
        finish(here, here.run(plan), plan)
        assert "west is turned away: its inputs have the shape 1,4,8, but the run's model takes 1,8,8" in here.log(
            "run"
        )
    lost = lost_answers(plan)
    assert lost >= {(t, "2") for t in (1, 2, 3)} and not lost & {(3, "0"), (3, "1")}  # a slow one may come late
    data = dataset_from((parts, parts[0]))

    def make() -> Simulation:
        return build_simulation(plan.run, plan.alg, data, plan.run.model, torch.device("cpu"))

    run, model = make(), load_file(tmp_path / "out" / "model.safetensors")
    found, expected = (
        run.net.without_padding(run.net.layout.join(model, run.state.x), "model"),
        without(make, lost, 3)[-1],
    )
    assert (found - expected).norm() <= 1e-4 * expected.norm()
    assert (found - run.net.without_padding(run.state.x, "model")).norm() > 1e-2 * expected.norm()


@pytest.mark.system
def test_a_node_killed_in_the_middle_of_a_round_comes_back(pair: LocalFederation, tmp_path: Path, count: Any) -> None:
    with counted(count, KILLS, 1):
        kill_a_node(pair, tmp_path)


def kill_a_node(here: LocalFederation, tmp_path: Path) -> None:
    plan = planned(tmp_path / "out", algorithm="scaffold", rounds=8, timeout=60.0)  # it may come back after a minute
    run = here.run(plan)
    until(lambda: here.log("client-1").count("Receiving: train") == 2, here)
    here.kill("client-1")
    here.start_client(1)
    finish(here, run, plan)
    lost = lost_answers(plan)
    assert (1, "1") not in lost and (2, "1") in lost and (8, "1") not in lost
    agree(plan, lost)


@pytest.mark.system
def test_a_client_that_always_times_out_is_left_out(pair: LocalFederation, tmp_path: Path) -> None:
    plan = planned(tmp_path / "out", timeout=patient(20), rounds=2)
    late = altered(train='time.sleep(10**6 if name == "1" else 0)')
    finish(pair, pair.run(plan, {"client_app.py": late}), plan)
    assert pair.log("run").count("1 does not count: no answer in time") == 2
    lost = lost_answers(plan)
    assert lost >= {(1, "1"), (2, "1")} and len(lost) < 4  # the other may be slow and late once
    agree(plan, lost)
    pair.kill("client-1", signal.SIGTERM)  # with what still sleeps


@pytest.mark.system
def test_a_client_that_is_cut_off_is_said_to_be_gone_and_rounds_wait_for_it(
    pair: LocalFederation, tmp_path: Path
) -> None:
    """It is stopped for so long that the server hears no heartbeat; alone, it is waited for, and no round is used up."""
    plan = planned(tmp_path / "out", clients=1, rounds=3)  # client 1 of the two is none of this run
    run = pair.run(plan)
    until(lambda: pair.log("client-0").count("Receiving: train") == 2, pair)
    for pid in (stopped := descendants(pair.home, "client-0")):
        os.kill(pid, signal.SIGSTOP)
    until(lambda: "no client is connected; waiting at most 600 s for one" in pair.log("run"), pair)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    finish(pair, run, plan)
    assert "round 2: 0 does not count: not connected any more" in pair.log("run")
    assert [r["dropped"] for r in records(plan)] == [0, 1, 0]
    agree(plan, {(2, "0")})


@pytest.mark.system
def test_the_server_is_killed_in_the_middle_of_every_round_in_turn(
    pair: LocalFederation, tmp_path: Path, count: Any
) -> None:
    with counted(count, KILLS, 3):
        kill_the_server(pair, tmp_path)


def kill_the_server(here: LocalFederation, tmp_path: Path) -> None:
    for done in range(3):
        # The round in which the server was killed is repeated; the next one is asked for after it.
        wanted = here.log("client-0").count("Receiving: train") + (2 if done else 1)
        here.run(planned(tmp_path / "out", algorithm="gradma", rounds=3, resume=done > 0))
        until(lambda wanted=wanted: here.log("client-0").count("Receiving: train") == wanted, here)  # type: ignore[misc]
        here.kill("superlink")  # with the server's app
        here.kill("run")
        here.start_server()
    resumed = planned(tmp_path / "out", algorithm="gradma", rounds=3, resume=True)
    finish(here, here.run(resumed), resumed)
    assert [r["round"] for r in records(resumed)] == [1, 2, 3]
    agree(resumed)


BAD = """
if name == "1":
    d = arrays["up.d"].numpy()
    if round == 0:
        arrays["up.d"] = Array(np.full_like(d, np.nan))
    if round == 1:
        arrays["up.d"] = Array(d[:-1])
    if round == 2:
        arrays["up.x"] = arrays.pop("up.d")
    if round == 3:
        reply.content["facts"]["run"] = "0123456789abcdef"
    if round == 4:
        arrays["up.d"] = Array(np.tile(d, 100))
"""


@pytest.mark.system
def test_answers_that_are_spoiled_are_refused_and_the_round_goes_on(pair: LocalFederation, tmp_path: Path) -> None:
    plan = planned(tmp_path / "out", rounds=6)
    finish(pair, pair.run(plan, {"client_app.py": altered(train=BAD)}), plan)
    said = re.findall(r"round \d: 1 does not count: refused: (.*)", pair.log("run"))
    reasons = ("not finite", "was expected", "other names", "its run is", "bytes")
    assert len(said) == 5 and all(reason in line for reason, line in zip(reasons, said, strict=True))
    assert [(r["dropped"], r["refused"]) for r in records(plan)] == [(1, 1)] * 5 + [(0, 0)]
    agree(plan, {(t, "1") for t in range(1, 6)})


def heed_signals() -> None:
    """A job of a shell in the background ignores Ctrl-C, one under nohup also hang-ups."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.system
def test_signals_end_everything_after_the_round_and_the_run_goes_on(tmp_path: Path) -> None:
    """Ctrl-C, SIGTERM and a hang-up one after the other; each time the run goes on with the command that was said."""
    command = ["undrift", "deploy", "local", str(tmp_path / "home"), "--clients", "2", "--rounds", "50"]
    command += ["--out", str(tmp_path / "out")]
    file, reached = tmp_path / "out" / "rounds.jsonl", 0
    for how in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process = subprocess.Popen(
            [sys.executable, "-m", *command], start_new_session=True, preexec_fn=heed_signals, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        wait_for_rounds(tmp_path / "out", 1, process)
        process.send_signal(how)
        said = process.communicate(timeout=patient(60))[1]
        assert process.returncode == 128 + how, said
        parts = ("superlink", "run", "client-0", "client-1")
        assert not any(descendants(tmp_path / "home", part) for part in parts)
        last = [json.loads(line) for line in file.read_text().splitlines()]
        slow = last[-1]["seconds"] > 5  # too slow for a signal to wait for
        assert slow or "stopped by SIGTERM; go on with resume=true" in (tmp_path / "home/run.log").read_text()
        before, reached = reached, RunFolder(tmp_path / "out").last_checkpoint()
        assert before < reached == len(last) < 50
        stopped, again = said.strip().split("; go on with: ")
        assert stopped == f"undrift: stopped by {how.name}" and again.endswith(" --resume")
        command = shlex.split(again)
    done = subprocess.run(
        [sys.executable, "-m", *command, "--rounds", str(reached + 1)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(file.read_text().splitlines()) == reached + 1
