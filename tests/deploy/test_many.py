"""Federations of real processes that are large, or whose members come and go; and sums under masks among them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.deploy.test_processes import agree, deployed, finish, lent, lost_answers, planned, records, simulator, until
from tests.patience import patient
from undrift.deploy.keys import write_identity
from undrift.deploy.local import LocalFederation, descendants, federation

CLIENTS = 20


def resident(home: Path, names: list[str]) -> int:
    """Bytes of memory that these parts of a federation hold now; what several processes share is counted once."""
    total = 0
    for pid in {pid for name in names for pid in descendants(home, name)}:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += 1024 * int(next(line.split()[1] for line in lines if line.startswith("Pss:")))
    return total


@pytest.mark.system
def test_twenty_clients_on_two_cores_finish_ten_rounds(tmp_path: Path) -> None:
    """Twenty SuperNodes, each of which starts a process with PyTorch for every message, on one machine with 16 GB."""
    plan = planned(
        tmp_path / "out", algorithm="scaffold", clients=CLIENTS, rounds=10, timeout=900.0, wait=1800.0, join=600.0
    )
    most, over = [0], threading.Event()
    with federation(CLIENTS) as here:
        parts = ["superlink", "run", *(f"client-{k}" for k in range(CLIENTS))]

        def watch() -> None:
            while not over.wait(3.0):
                most.append(resident(here.home, parts))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for client in range(CLIENTS):
                here.start_client(client)
            run = here.run(plan)
            until(lambda: run.poll() is not None and not here.server_apps(), here, 900.0)
        finally:
            over.set()
            watcher.join()
    print(f"{max(most) / 1e9:.1f} GB, {sum(r['seconds'] for r in records(plan)):.0f} s")
    assert [(r["clients"], r["dropped"]) for r in records(plan)] == [(CLIENTS, 0)] * 10
    assert 0 < max(most) < 16e9
    agree(plan)


@pytest.fixture(scope="module")
def four() -> Iterator[LocalFederation]:
    """A federation of four clients that the tests below share."""
    with federation(4) as here:
        yield here


@pytest.mark.system
def test_one_client_comes_late_and_another_leaves_for_ever(four: LocalFederation, tmp_path: Path) -> None:
    """The model is the simulator's in which they fail to answer in the rounds in which they are away. In the place of the
    late one a stranger stands at first, who is turned away."""
    plan = planned(tmp_path / "out", algorithm="scaffold", clients=3, rounds=8, wait=patient(20), timeout=60.0)
    write_identity(tmp_path / "stranger", "2")
    with lent(four) as here:
        for client in (2, 3):
            here.kill(f"client-{client}", signal.SIGTERM)
        shutil.copyfile(here.home / "ca.crt", tmp_path / "stranger" / "ca.crt")
        here.start_client(2, tmp_path / "stranger")
        until(lambda: here.log("superlink").count("its key is not admitted"), here)
        run = here.run(plan)
        until(lambda: records(plan), here)
        here.kill("client-2", signal.SIGTERM)
        here.start_client(2)
        until(lambda: here.log("client-2").count("Receiving: train"), here)
        done = len(records(plan))
        until(lambda: len(records(plan)) > done, here)
        here.kill("client-1")
        finish(here, run, plan)
    lost = lost_answers(plan)
    assert (
        (1, "2") in lost and (8, "1") in lost and (8, "2") not in lost and not lost >= {(t, "1") for t in range(1, 9)}
    )
    agree(plan, lost)


@pytest.mark.system
@pytest.mark.parametrize(("bound", "rounds"), [(0.0, 4), (16.0, 3)])
def test_the_server_is_killed_after_every_round_in_turn(
    bound: float, rounds: int, four: LocalFederation, tmp_path: Path
) -> None:
    """The server is killed after each round but the last: the same model as without, also with masks."""
    settings = dict(algorithm="scaffold", clients=3, rounds=rounds, secure_bound=bound)
    with lent(four) as here:
        for done in range(rounds - 1):
            here.run(planned(tmp_path / "out", resume=done > 0, **settings))
            until(lambda done=done: f"round {done + 1} of {rounds}" in here.log("run"), here)  # type: ignore[misc]
            here.kill("superlink")  # with the server's app
            here.kill("run")
            here.start_server()
        last = planned(tmp_path / "out", resume=True, **settings)
        finish(here, here.run(last), last)
    assert [(r["round"], r["dropped"]) for r in records(last)] == [(n + 1, 0) for n in range(rounds)]
    agree(last)


@pytest.mark.system
def test_a_client_is_killed_in_the_middle_of_a_sum(four: LocalFederation, tmp_path: Path) -> None:
    """Its masks are taken off by the shares that the others hold: of four clients three are enough."""
    plan = planned(
        tmp_path / "out", clients=4, rounds=1, secure_bound=16.0, timeout=patient(40), steps=2, algorithm="fedavg"
    )
    with lent(four) as here:
        run = here.run(plan)
        until(lambda: here.log("client-3").count("Receiving: train") == 2, here)  # keys, and now shares
        until(lambda: shared(here.home), here)
        here.kill("client-3")
        finish(here, run, plan)
        log = here.log("run")
    (record,) = records(plan)
    if record["dropped"]:
        assert "3 is not in the sum any more" in log
        agree(plan, {(1, "3")})
    else:  # it was killed after its numbers had left
        agree(plan)
    assert (deployed(plan) - simulator(plan).net.without_padding(simulator(plan).state.x, "model")).norm() > 0


def shared(home: Path) -> bool:
    """Whether client 3 has sent its shares."""
    logs = list((home / "states" / "3").rglob("sent.log"))
    time.sleep(0.05)
    return any("sent shares" in log.read_text() for log in logs)
