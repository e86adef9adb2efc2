"""Long work: neither memory nor open files grow, and a clock that is set back changes nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import undrift
from tests.patience import patient
from tests.reliability import counted
from tests.small import timeless
from undrift.dataparallel.command import run_parallel
from undrift.jobs.folder import RunFolder
from undrift.jobs.sweep import plan, run_all
from undrift.pipeline.train import run_pipe

pytestmark = [pytest.mark.system, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]
SMALL = {"clients": 12, "cohort": 4, "steps": 2, "batch": 8, "model": "logreg"}
RUNS = {
    "run": lambda **more: undrift.run(SMALL | {"execution": "stacked"}, algorithm="scaffold", **more),
    "disk": lambda **more: undrift.run(SMALL, algorithm="scaffold", execution="pool", client_state="disk", **more),
    "dp": lambda **more: run_parallel(method="def", workers=2, steps=2, batch=8, model="logreg", **more),
    "pipe": lambda **more: run_pipe(method="dsp", queues="1,0;2,0", cuts="hidden2", steps=2, batch=8, **more),
}


def held(pid: int | str = "self") -> tuple[int, int, int]:
    """KiB of memory, open files and threads of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    files, threads = (len(os.listdir(f"/proc/{pid}/{of}")) for of in ("fd", "task"))
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024, files, threads


@pytest.mark.parametrize("kind", RUNS)
def test_five_thousand_rounds_hold_no_more_than_one_thousand(kind: str, tmp_path: Path, count: Any) -> None:
    with counted(count, "runs of 5,000 rounds without growth", 1):
        check_long_run(kind, tmp_path)


def check_long_run(kind: str, tmp_path: Path) -> None:
    seen = {}

    def watch(record: dict[str, Any], rounds: int) -> None:
        if record["round"] in (1000, 4999):
            seen[record["round"]] = held()

    RUNS[kind](rounds=5000, eval_every=500, checkpoint_every=50, progress=watch, out=tmp_path / "r")
    (before, *open_before), (after, *open_after) = seen[1000], seen[4999]
    assert open_before == open_after
    assert after - before < 2 * 4000, "a round leaves its record, which is less than 2 KiB"


def test_a_sweep_of_500_runs_holds_no_more_than_one_of_50(tmp_path: Path, count: Any) -> None:
    with counted(count, "runs of one sweep without growth", 500):
        check_long_sweep(tmp_path)


def check_long_sweep(tmp_path: Path) -> None:
    seeds = f"[sweep]\nseeds = {list(range(500))}\n"
    (tmp_path / "s.toml").write_text(
        "\n".join(f"{n} = {json.dumps(v)}" for n, v in SMALL.items()) + f"\nrounds = 2\n{seeds}"
    )
    jobs, finished, seen = plan(tmp_path / "s.toml")[0], set(), {}

    def watch(name: str, done: int, rounds: int) -> None:
        finished.update([name] if done == rounds else [])
        if len(finished) in (50, 500) and len(finished) not in seen:
            workers = sorted(child.pid or 0 for child in multiprocessing.active_children())
            seen[len(finished)] = {pid: held(pid) for pid in (os.getpid(), *workers)}

    assert run_all(jobs, tmp_path / "o", 2, watch, print) == {}
    assert all(RunFolder(tmp_path / "o" / job.name).is_finished() for job in jobs)
    before, after = seen[50], seen[500]
    assert before.keys() == after.keys() and len(after) == 3, "no process was replaced"
    for pid, (memory, files, threads) in after.items():
        assert files <= before[pid][1] + 3 and threads <= before[pid][2] + 1  # a run may be under way
        assert memory - before[pid][0] < 20_000, "450 runs more"


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static long back(void) { static long calls; return 60 * __sync_add_and_fetch(&calls, 1); }
int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, now);
    if (which == CLOCK_REALTIME) now->tv_sec -= back();
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    int code = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return code;
}
time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_clock_that_is_set_back_again_and_again_changes_nothing(tmp_path: Path, count: Any) -> None:
    with counted(count, "a clock that is set back at every look", 1):
        check_clock(tmp_path)


def check_clock(tmp_path: Path) -> None:
    """A minute back at every look."""
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"], cwd=tmp_path, check=True)

    def command(*words: str, clock: bool = True) -> str:
        shim = {"LD_PRELOAD": str(tmp_path / "clock.so")} if clock else {}
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=os.environ | shim, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    looks = command("-c", "import time; print(time.time(), time.time(), time.gmtime().tm_year)").split()
    assert float(looks[1]) < float(looks[0]) - 30, "the clock of such a process goes back"
    settings = ("--algorithm", "scaffold", "--execution", "stacked", "--model", "logreg", "--stop-at", "time=1h")
    folders = [tmp_path / name for name in ("back", "plain")]
    for folder, clock in zip(folders, (True, False), strict=True):
        run = ("-m", "undrift", "run", "--out", str(folder))
        command(*run, *settings, "--rounds", "10", clock=clock)
        command(*run, "--rounds", "20", "--resume", clock=clock)
        command("-m", "undrift", "report", str(folder), "--out", f"{folder}.html", clock=clock)
    back, plain = ([json.loads(line) for line in (f / "rounds.jsonl").read_text().splitlines()] for f in folders)
    assert timeless(back) == timeless(plain) and len(back) == 20
    assert all(0 < record["seconds"] < patient(60) for record in back)
    assert (folders[0] / "model.safetensors").read_bytes() == (folders[1] / "model.safetensors").read_bytes()
