"""Run the notebooks of docs/notebooks, each in an empty folder, and keep what they printed in build/notebooks."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
NOTEBOOKS = HERE.parent / "notebooks"
RUN = HERE.parents[1] / "build" / "notebooks"
MOST = 600  # seconds of a cell


def run(file: Path) -> float:
    """Run one notebook and write it with its outputs; return the seconds it took. A cell that fails ends it."""
    begun = time.monotonic()
    notebook = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=MOST, startup_timeout=MOST, kernel_name="python3", resources=place).execute()
    RUN.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, RUN / file.name)
    return time.monotonic() - begun


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors gain nothing from more
    for file in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not sys.argv[1:] or file.stem in sys.argv[1:]:
            print(f"{file.stem}: {run(file):.0f} s", flush=True)
