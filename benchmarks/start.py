"""From the command to the first round: `undrift run` in a process of its own, with an empty cache of kernels and a filled one.

    python benchmarks/start.py [--device cpu|cuda] [--runs mlp,lenet5,lenet5:gradma] [--json FILE]

100 clients, 10 a round, 5 local steps, batch 64, CIFAR-shaped data. What is timed begins with the start of Python and ends when
the record of round 1 lies in the run's folder, its evaluation included. Triton keeps kernels on disk, so that only a machine's
first run has to make them. Python's libraries should lie there compiled, as pip leaves them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from undrift.data.dataset import Dataset
from undrift.jobs.course import commit

HERE = Path(__file__).resolve().parent
SETTINGS = (
    "--dataset start:pictures --partition iid --clients 100 --cohort 10 --steps 5 --batch 64 --rounds 1 --set lr=0.05"
)
RUNS = "mlp,lenet5,gradma-lenet5,resnet20-gn,lenet5:gradma,gradma-lenet5:gradma,resnet20-gn:gradma"


def pictures() -> Dataset:
    """Noise, as large as CIFAR-10."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (60_000, 32, 32, 3), dtype=np.uint8), random.integers(0, 10, 60_000)
    return Dataset("noise", x[10_000:], y[10_000:], x[:10_000], y[:10_000], 10, (0.5,) * 3, (0.25,) * 3)


def first_round(model: str, method: str, device: str, kernels: Path) -> float:
    """Seconds."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "undrift", "run", *SETTINGS.split(), "--model", model, "--algorithm", method]
        began = time.perf_counter()
        with subprocess.Popen(
            [*command, "--device", device, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(kernels)},
        ) as run:  # fmt: skip
            record = out / "rounds.jsonl"
            while run.poll() is None and not (record.exists() and record.read_text().endswith("\n")):
                time.sleep(0.02)
            took = time.perf_counter() - began
            told, _ = run.communicate()
        if run.returncode:
            raise SystemExit(told.decode())
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--runs", default=RUNS, help="MODEL or MODEL:METHOD, comma separated")
    parser.add_argument("--json", help="file to write the numbers to")
    args = parser.parse_args()
    rows = []
    for model, _, method in (run.partition(":") for run in args.runs.split(",")):
        method = method or "fedavg"
        with tempfile.TemporaryDirectory() as kernels:
            empty, filled = (first_round(model, method, args.device, Path(kernels)) for _ in range(2))
        rows.append({"model": model, "method": method, "empty": empty, "filled": filled})
        print(
            f"{model:14} {method:8} first round after {empty:5.1f} s, with kernels on disk {filled:5.1f} s", flush=True
        )
    if args.json:
        found = {"device": args.device, "torch": torch.__version__, "commit": commit(), "first round, seconds": rows}
        if args.device == "cuda":
            found = {"gpu": torch.cuda.get_device_name(), **found}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
