"""How the classes are divided among clients, as a picture and in a few numbers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from undrift.core.errors import BadSetting, UndriftError

MOST_CLIENTS = 100  # per picture
POINTS = 72  # per inch


def partition_picture(
    counts: NDArray[np.int64], out: Path, title: str, held_out: NDArray[np.int64] | None = None
) -> None:
    """Draw counts [clients, classes] as dots, with held-out samples over them, in a .png or .svg file.

    A dot's area is proportional to its samples.
    """
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    ending = out.suffix.lower()
    if ending not in (".png", ".svg"):
        raise BadSetting(f"a picture is written as .png or .svg, not {out.name!r}; choose such an ending")
    if len(counts) > MOST_CLIENTS:
        title = f"{title} (first {MOST_CLIENTS} of {len(counts)} clients)"
    counts = counts[:MOST_CLIENTS]
    clients, classes = counts.shape
    width, height = float(np.clip(0.16 * clients, 4, 11)), float(np.clip(0.25 * classes, 2, 12))
    cell = POINTS * min(2 * width / clients, height / classes)  # points; large dots may touch
    most = max(int(counts.max(initial=0)), 1)
    owner, label = np.nonzero(counts)
    with style.context(["default", {"svg.hashsalt": "undrift", "svg.fonttype": "none"}]):
        figure = Figure(figsize=(width + 1.0, height + 1.2), layout="constrained")
        axes = figure.add_subplot()
        largest = (0.95 * min(cell, 26)) ** 2  # a marker's size is its width squared
        area = largest * counts[owner, label] / most
        axes.scatter(owner, label, s=area, color="#0072B2", linewidths=0, alpha=0.85)
        if held_out is not None and held_out.any():
            owner, label = np.nonzero(held_out[:MOST_CLIENTS])
            axes.scatter(owner, label, s=largest * held_out[owner, label] / most, color="#E69F00", linewidths=0)
        axes.set_xlim(-0.7, clients - 0.3)
        axes.set_ylim(-0.7, classes - 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(20, integer=True))
        axes.set_xlabel(f"client (largest dot: {most} samples)")
        axes.set_ylabel("class")
        axes.set_title(title, fontsize=11, parse_math=False, wrap=True)
        axes.grid(color="#dddddd", linewidth=0.5)
        axes.set_axisbelow(True)
        temporary = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            no_metadata = ("Software",) if ending == ".png" else ("Date", "Creator")
            figure.savefig(temporary, format=ending[1:], dpi=150, metadata=dict.fromkeys(no_metadata))
            os.replace(temporary, out)
        except OSError as error:
            raise UndriftError(f"cannot write {out}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)


def partition_text(counts: NDArray[np.int64]) -> list[list[str]]:
    """A header and one row: the number of clients, and how unequal they are.

    >>> partition_text(np.array([[8, 0], [4, 4]]))[1]
    ['2', '8 / 8 / 8', '1 / 1.5 / 2', '0.50']
    """
    cells = {
        "clients": str(len(counts)),
        "samples per client (min / median / max)": _range(counts.sum(1)),
        "classes per client (min / median / max)": _range((counts > 0).sum(1)),
        "mean label entropy (bits)": f"{_mean_entropy(counts):.2f}",
    }
    return [list(cells), list(cells.values())]


def _range(values: NDArray[np.int64]) -> str:
    return " / ".join(f"{v:.1f}".removesuffix(".0") for v in (values.min(), np.median(values), values.max()))


def _mean_entropy(counts: NDArray[np.int64]) -> float:
    """Mean over clients with samples: 0 for a single class, log2(classes) for equal shares."""
    held = counts[counts.sum(1) > 0]
    if not len(held):
        return 0.0
    share = held / held.sum(1, keepdims=True)
    return float(-(share * np.log2(np.where(share > 0, share, 1.0))).sum(1).mean())
