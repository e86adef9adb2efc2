"""Curves of a run in a notebook, drawn anew in place while the run goes on."""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

USUAL = (
    "accuracy",
    "dice",
    "c_index",
    "train_loss",
    "loss",
)  # what is drawn if nothing is named, where the record has it
PAUSE = 0.5  # seconds between two drawings, at least
REST = 9.0  # times the time that a drawing takes: so long is the pause after it
MOST = 400  # points of a curve that are drawn
WIDTH, HEIGHT, DOTS = 4.2, 2.7, 110  # the size of a picture in inches, and dots per inch


class Curves:
    """The curves of some numbers of the record, as `on_round=Curves()`. Outside a notebook nothing is shown.

    >>> curves = Curves(["train_loss"])
    >>> for t in (1, 2):
    ...     curves({"round": t, "train_loss": 1 / t})
    >>> curves._repr_png_()[1:4]
    b'PNG'
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self.points: dict[str, list[tuple[int, float]]] = {}
        self.handle: Any = None  # the notebook's handle of the picture
        self.again = 0.0  # when to draw next, by time.monotonic()
        self.drawn = True  # whether what is shown is all there is

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take a record, and draw when it is time."""
        self.take(record)
        if time.monotonic() >= self.again:
            self.show()

    def take(self, record: Mapping[str, Any]) -> None:
        for name in self.names or [name for name in USUAL if name in record]:
            value = record.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                self.points.setdefault(name, []).append((int(record["round"]), float(value)))
        self.drawn = False

    def show(self) -> None:
        """Draw what there is, in the place of what was drawn before."""
        display = notebook_display()
        if display is None or self.drawn or not self.points:
            return
        began = time.monotonic()
        if self.handle is None:
            self.handle = display(self, display_id=True)
        else:
            self.handle.update(self)
        self.drawn, now = True, time.monotonic()
        self.again = now + max(PAUSE, REST * (now - began))

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        return picture({name: self.points[name] for name in self.names or USUAL if name in self.points})


def picture(points: Mapping[str, Sequence[tuple[int, float]]]) -> bytes:
    """A PNG with a plot for each name."""
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with style.context("default"):
        figure = Figure(figsize=(WIDTH * max(len(points), 1), HEIGHT), dpi=DOTS, layout="constrained")
        for place, (name, line) in enumerate(points.items(), 1):
            axes = figure.add_subplot(1, len(points), place)
            kept = line[:: math.ceil(len(line) / MOST)]
            axes.plot(*zip(*(kept if kept[-1] == line[-1] else [*kept, line[-1]]), strict=True), color="#0072B2")
            axes.set_title(f"{name} {line[-1][1]:.4g}", fontsize=10, parse_math=False)
            axes.set_xlabel("round")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_xlim(0, max(line[-1][0] for line in points.values()))
            axes.grid(color="#dddddd", linewidth=0.5)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def notebook_display() -> Any:
    """IPython's function that shows an object, in a notebook; None elsewhere. IPython is not imported for it."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import display

    shell = get_ipython()
    return display if shell is not None and hasattr(shell, "kernel") else None
