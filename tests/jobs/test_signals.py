"""A signal ends a run after its round and a checkpoint, and the command that it then names goes on to the same result."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.test_sweep import SWEEP, session
from tests.patience import patient
from tests.reliability import counted
from tests.simulate.test_ranks import torchrun, workers
from tests.small import timeless
from undrift import cli
from undrift.core import stopping
from undrift.jobs.folder import RunFolder

ROOT = Path(__file__).parents[2]
LONG = 120  # seconds that nothing here takes on a quiet machine
COMMANDS = {
    "run": "run --algorithm scaffold --clients 12 --cohort 4 --steps 2 --batch 8 --model logreg --execution stacked",
    "disk": "run --algorithm scaffold --clients 12 --cohort 4 --steps 2 --batch 8 --client-state disk --execution pool",
    "dp": "dp --method def --workers 2 --steps 3 --batch 16 --model logreg",
    "pipe": "pipe --method dsp --queues 1,0;2,0 --cuts hidden2 --steps 5 --batch 32",
}
ENDLESS = " --rounds 1000000 --checkpoint-every 1000000 --eval-every 7"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, and processes in /proc")


def begin(*command: Any, ignoring: tuple[signal.Signals, ...] = (), **environment: str) -> subprocess.Popen[str]:
    def dispositions() -> None:  # a shell's background job ignores Ctrl-C
        for each in stopping.SIGNALS:
            signal.signal(each, signal.SIG_IGN if each in ignoring else signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-m", "undrift", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=dispositions, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + patient(LONG)
    while not condition():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.02)


def wait_for_rounds(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    file = folder / "rounds.jsonl"
    wait_until(lambda: file.exists() and file.read_text().count("\n") >= count, process)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and what was said on standard error."""
    try:
        error = process.communicate(timeout=patient(LONG))[1]
    finally:
        process.kill()
    return process.returncode, error


def records(folder: Path) -> list[dict[str, Any]]:
    return timeless([json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()])


def check_nothing_is_lost(folder: Path) -> int:
    """Every round that was written down is in the checkpoint; return their number."""
    reached = RunFolder(folder).last_checkpoint()
    assert reached == len(records(folder)) > 0
    return reached


def check_it_goes_on(folder: Path, how: signal.Signals, said: str) -> None:
    """The command that was said leads to the records and the model of a run that nobody stopped."""
    stopped, command = said.strip().split("; go on with: ")
    assert stopped == f"undrift: stopped by {how.name}" and command.endswith(" --resume")
    rounds, (_, *words) = str(check_nothing_is_lost(folder) + 3), shlex.split(command)
    assert cli.main([*words, "--rounds", rounds]) == 0
    whole = folder.with_name("whole")
    assert cli.main([w for w in words if w != "--resume"] + ["--rounds", rounds, "--out", str(whole)]) == 0
    assert records(folder) == records(whole)
    for file in ("model.safetensors", *(["clients.table"] if "disk" in words else [])):
        assert (folder / file).read_bytes() == (whole / file).read_bytes()


def stop_and_go_on(kind: str, how: signal.Signals, folder: Path) -> None:
    process = begin(*(COMMANDS[kind] + ENDLESS).split(), "--out", folder / "cut")
    wait_for_rounds(folder / "cut", 2, process)
    process.send_signal(how)
    code, said = ended(process)
    assert code == 128 + how
    check_it_goes_on(folder / "cut", how, said)


@pytest.mark.parametrize("kind, how", [("run", signal.SIGTERM), ("dp", signal.SIGHUP)])
def test_a_signal_ends_a_run_and_nothing_is_lost(kind: str, how: signal.Signals, tmp_path: Path) -> None:
    stop_and_go_on(kind, how, tmp_path)


@pytest.mark.system
@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("how", stopping.SIGNALS)
def test_every_signal_ends_every_command(kind: str, how: signal.Signals, tmp_path: Path, count: Any) -> None:
    with counted(count, "SIGTERM, SIGHUP, SIGINT", 1):
        stop_and_go_on(kind, how, tmp_path)


def sweep_stopped(folder: Path, how: signal.Signals, reach: Callable[[int, int], None], more: str = "") -> None:
    """Stop a sweep, and see all its runs go on to what each is alone."""
    file, out = folder / "s.toml", folder / "o"
    text = SWEEP.replace("lr = [0.1, 0.05]\n", "").replace("seeds = [0, 1]", "seeds = [0]")
    text = text.replace("eval_every = 2", "eval_every = 100\ncheckpoint_every = 1000000")
    file.write_text(text.replace("rounds = 4", "rounds = 1000000"))
    process = begin("sweep", file, "--processes", 2, "--out", out, *more.split())
    wait_until(lambda: len(list(out.glob("*/rounds.jsonl"))) >= 2, process)
    begun = sorted(path.parent for path in out.glob("*/rounds.jsonl"))
    for each in begun:
        wait_for_rounds(each, 2, process)
    reach(process.pid, how)
    code, said = ended(process)
    again = f"undrift sweep {file} --processes 2 --out {out} {more}".strip()
    assert (code, said) == (128 + how, f"undrift: stopped by {how.name}; go on with: {again}\n")
    until = time.monotonic() + patient(30)
    while left := session(process.pid):
        assert time.monotonic() < until, f"{left} went on without the sweep"
        time.sleep(0.05)
    rounds = max(check_nothing_is_lost(each) for each in begun) + 3
    file.write_text(text.replace("rounds = 4", f"rounds = {rounds}"))
    assert cli.main(shlex.split(again)[1:]) == 0
    for each in out.glob("*/run.toml"):
        assert len(records(each.parent)) == rounds
    whole = folder / "whole"
    assert cli.main(["run", str(begun[0] / "run.toml"), "--out", str(whole)]) == 0
    assert records(begun[0]) == records(whole)
    assert (begun[0] / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_signal_to_a_sweep_reaches_its_processes(tmp_path: Path) -> None:
    sweep_stopped(tmp_path, signal.SIGTERM, os.kill)


@pytest.mark.system
@pytest.mark.parametrize("how", stopping.SIGNALS)
@pytest.mark.parametrize("more", ["", "--pack"])
def test_a_signal_to_all_processes_of_a_sweep_is_one(
    how: signal.Signals, more: str, tmp_path: Path, count: Any
) -> None:
    with counted(count, "SIGTERM, SIGHUP, SIGINT", 1):
        sweep_stopped(tmp_path, how, os.killpg, more)


HEEDING = """
import sys, time
sys.path.insert(0, "undrift/core")
import stopping
stopping.GRACE = float(sys.argv[1])
with stopping.heed_signals(lambda how: print(how, flush=True)):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "grace, pauses, least, most",
    [(0.5, [], 0.5, 30), (60, [1.5], 1.5, 30), (4, [0.1], 4, 30)],
    ids=["no round ends", "a second signal", "an echo"],
)
def test_time_is_up_at_a_second_signal_or_after_a_while(
    grace: float, pauses: list[float], least: float, most: float
) -> None:
    command = [sys.executable, "-c", HEEDING, str(grace)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        began = time.monotonic()
        for pause in (0.0, *pauses):
            time.sleep(pause)
            process.send_signal(signal.SIGTERM)
        assert process.wait(most) == 143 and time.monotonic() - began >= least
        assert process.stdout.read() == "ended at once by SIGTERM\n"


SLOW = "run --clients 2 --cohort 1 --steps 1 --batch 8 --execution debug --model tests.jobs.slow_model:build"


@pytest.mark.system
def test_rounds_longer_than_a_signal_waits_lose_nothing_but_the_one_under_way(tmp_path: Path) -> None:
    process = begin(*(SLOW + ENDLESS).split(), "--out", tmp_path / "r", SLOW="12")
    wait_for_rounds(tmp_path / "r", 2, process)
    time.sleep(1)  # and its checkpoint
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert code == 143 and said.startswith("undrift: ended at once by SIGTERM; go on with: ") and said.count("\n") == 1
    assert time.monotonic() - began < patient(12)
    assert check_nothing_is_lost(tmp_path / "r") == 2


@pytest.mark.system
def test_a_second_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    process = begin(*(SLOW + ENDLESS).split(), "--out", tmp_path / "r", SLOW="8")
    wait_for_rounds(tmp_path / "r", 1, process)
    time.sleep(2)  # the next round is under way
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert code == 130 and "ended at once by SIGINT" in said


@pytest.mark.system
def test_nohup_is_obeyed(tmp_path: Path) -> None:
    process = begin(*(COMMANDS["run"] + ENDLESS).split(), "--out", tmp_path / "r", ignoring=(signal.SIGHUP,))
    wait_for_rounds(tmp_path / "r", 2, process)
    process.send_signal(signal.SIGHUP)
    wait_for_rounds(tmp_path / "r", 2 + len(records(tmp_path / "r")), process)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143


@pytest.mark.system
@pytest.mark.parametrize("kind", ["run", "dp", "pipe"])
@pytest.mark.parametrize("to", ["torchrun", "rank 0", "rank 1"])
def test_ranks_stop_together(kind: str, to: str, tmp_path: Path, count: Any) -> None:
    with counted(count, "SIGTERM, SIGHUP, SIGINT", 1):
        stop_ranks(kind, to, tmp_path)


def stop_ranks(kind: str, to: str, tmp_path: Path) -> None:
    words = COMMANDS[kind].replace("--workers 2 ", "").split()
    process = torchrun(2, "undrift", *words, *ENDLESS.split(), "--out", str(tmp_path / "cut"))
    wait_for_rounds(tmp_path / "cut", 2, process)
    time.sleep(0.3)
    pid = process.pid if to == "torchrun" else dict(workers(process.pid))[int(to[-1])]
    os.kill(pid, signal.SIGTERM)
    code, said = ended(process)
    assert (
        code != 0
        and said.count("undrift: stopped by SIGTERM; go on with: torchrun --nproc-per-node 2 -m undrift ") == 1
    )
    rounds = str(check_nothing_is_lost(tmp_path / "cut") + 3)
    for more in (["--out", str(tmp_path / "cut"), "--resume"], ["--out", str(tmp_path / "whole")]):
        code, said = ended(torchrun(2, "undrift", *words, *ENDLESS.split(), "--rounds", rounds, *more))
        assert code == 0, said
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
