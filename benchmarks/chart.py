"""The README's bar chart, from the benchmarks' JSON files: `python benchmarks/chart.py` writes docs/speed.svg.

Reads benchmarks/results/gpu.json (`gpu.py --json`), cpu.json and rivals.json (`cpu.py --json`), as far as they are there.
rivals.json is of a machine that others used too, so of its rounds the shortest is shown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS, TO = Path(__file__).parent / "results", Path(__file__).parent.parent / "docs" / "speed.svg"
RIVALS = ("plain", "pfl", "fluke", "APPFL", "NVFlare", "undrift", "undrift compiled")
NAMES = {"plain": "plain loop", "pfl": "pfl 0.6.0", "undrift compiled": "undrift, compiled"}


def panels() -> dict[str, dict[str, float]]:
    """Milliseconds a round by title and rival, the slowest first."""
    found: dict[str, dict[str, float]] = {}
    gpu: dict[str, Any] = json.loads(text) if (text := read("gpu.json")) else {}
    for row in gpu.get("S=10", []):
        ms = {NAMES.get(r, r): row[r] for r in RIVALS if isinstance(row.get(r), float)}
        if len(ms) > 2:
            found[f"{row['model']}, {gpu['gpu']}"] = ms
    for file, where, which in (("cpu.json", "two CPU cores", "ms"), ("rivals.json", "one thread", "least")):
        for row in json.loads(text)["results"] if (text := read(file)) else []:
            found[f"{row['model']}, {where}"] = {name: rival[which] for name, rival in row["rivals"].items()}
    return {title: dict(sorted(ms.items(), key=lambda pair: -pair[1])) for title, ms in found.items()}


def read(name: str) -> str:
    path = RESULTS / name
    return path.read_text() if path.exists() else ""


def main() -> None:
    every = panels()
    plt.rcParams |= {"svg.hashsalt": "undrift", "svg.fonttype": "none", "font.size": 9.0}
    heights = [0.3 + 0.2 * len(ms) for ms in every.values()]
    figure, axes = plt.subplots(len(every), 1, figsize=(7, sum(heights) + 0.6), squeeze=False, height_ratios=heights)
    for axis, (title, ms) in zip(axes[:, 0], every.items(), strict=True):
        colours = ["#2f6f9f" if name.startswith("undrift") else "#bbbbbb" for name in ms]
        bars = axis.barh(list(ms), list(ms.values()), color=colours)
        axis.bar_label(
            bars, [f"{value:.0f} ms" if value > 999 else f"{value:.3g} ms" for value in ms.values()], padding=3
        )
        axis.set_title(title, loc="left", fontsize=9)
        axis.set_xscale("log")
        axis.set_xlim(right=3 * max(ms.values()))
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.xaxis.set_visible(False)
    figure.tight_layout()
    figure.savefig(TO, metadata={"Date": None})
    print(f"wrote {TO}")


if __name__ == "__main__":
    main()
