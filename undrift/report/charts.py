"""Draw curves over rounds or megabytes as SVG, without a background and without text from files."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrift.report.load import Group, Run
from undrift.report.records import Floats
from undrift.report.scores import traffic

# Distinct with any colour vision, readable on white and on black (after Okabe and Ito, without yellow).
# After the last colour comes the next line pattern.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
DASHES = ("", "6 2", "2 2", "8 2 2 2")
MOST_POINTS = 400  # per curve
GREY = "#808080"


class Curve(NamedTuple):
    """Mean, lowest and highest value over seeds."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    place: int  # number of the group; decides colour and line pattern


def colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def dash(place: int) -> str:
    return DASHES[place // len(COLOURS) % len(DASHES)]


def over_rounds(groups: list[Group], key: str) -> list[Curve]:
    return _curves(groups, key, lambda run: run.records.column("round"))


def over_megabytes(groups: list[Group], key: str) -> list[Curve]:
    return _curves(groups, key, lambda run: np.cumsum(traffic(run)) / 1e6)


def over_network_seconds(groups: list[Group], key: str) -> list[Curve]:
    """Only for runs that simulate a network."""
    timed = _curves(groups, key, lambda run: np.cumsum(run.records.amounts("network_seconds")))
    return [curve for curve in timed if curve.x[-1] > 0]


def chart(curves: list[Curve], name: str, x_label: str, y_label: str, log: bool = False) -> str:
    """The curves as an <svg> element whose ids start with `name`."""

    def draw(axes: Any) -> None:
        if log:
            axes.set_yscale("log")
        for curve in map(_positive, curves) if log else curves:
            ink, gaps = colour(curve.place), dash(curve.place)
            pattern = (0, tuple(float(n) for n in gaps.split())) if gaps else "-"
            marker = "o" if len(curve.x) < 3 else "none"
            axes.plot(curve.x, curve.mean, color=ink, ls=pattern, lw=1.6, marker=marker)
            if (curve.high > curve.low).any():
                axes.fill_between(curve.x, curve.low, curve.high, color=ink, alpha=0.18, linewidth=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)

    return _svg(draw, name, f"{y_label} over {x_label}")


def scatter(points: Floats, kinds: NDArray[np.int64], name: str) -> str:
    """Points [n, 2] in the colours of their kinds [n], as an <svg> element whose ids start with `name`."""

    def draw(axes: Any) -> None:
        for kind in np.unique(kinds):
            axes.scatter(*points[kinds == kind].T, s=9, color=colour(int(kind)), linewidths=0, alpha=0.8)
        axes.set_xticks([])
        axes.set_yticks([])

    return _svg(draw, name, "a map of samples")


def _svg(draw: Callable[[Any], None], name: str, alt: str) -> str:
    from matplotlib import style
    from matplotlib.figure import Figure

    plain = {"svg.hashsalt": "undrift", "svg.fonttype": "none", "font.size": 10.0, "axes.labelsize": 10.0}
    greys = {f"{part}.color": GREY for part in ("text", "xtick", "ytick")}
    with style.context(["default", plain | greys | {"axes.labelcolor": GREY, "axes.edgecolor": GREY}]):
        figure = Figure(figsize=(4.8, 3.1), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.add_subplot(facecolor="none")
        draw(axes)
        axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata)
    # Drop the XML head, and give ids a prefix that no other chart of the page has.
    text = file.getvalue()
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text[text.index("<svg") :])
    return svg.replace("<svg ", f'<svg role="img" aria-label="{alt}" ', 1).strip()


def _positive(curve: Curve) -> Curve:
    """Replace values that a logarithmic axis cannot show by gaps."""
    mean, low, high = (np.where(v > 0, v, np.nan) for v in (curve.mean, curve.low, curve.high))
    return curve._replace(mean=mean, low=low, high=high)


def _curves(groups: list[Group], key: str, position: Callable[[Run], Floats]) -> list[Curve]:
    """`position` gives the place [n] of each round on the horizontal axis."""
    curves = (_curve(group, key, position, place) for place, group in enumerate(groups))
    return [curve for curve in curves if curve is not None]


def _curve(group: Group, key: str, position: Callable[[Run], Floats], place: int) -> Curve | None:
    """A curve over the rounds that all seeds have, so that every mean is over the same seeds."""
    seeds = []  # the rounds that have a value, in order; the places on the horizontal axis; the values
    for run in group.runs:
        values = run.records.column(key)
        known = np.flatnonzero(~np.isnan(values))
        if len(known):
            rounds, first = np.unique(run.records.column("round")[known], return_index=True)
            seeds.append((rounds, position(run)[known[first]], values[known[first]]))
    shared = functools.reduce(np.intersect1d, (rounds for rounds, _, _ in seeds)) if seeds else np.zeros(0)
    if not len(shared):
        return None
    if len(shared) > MOST_POINTS:
        shared = shared[np.linspace(0, len(shared) - 1, MOST_POINTS).round().astype(int)]
    x, y = (np.array([seed[i][np.searchsorted(seed[0], shared)] for seed in seeds]) for i in (1, 2))
    return Curve(x.mean(0), y.mean(0), y.min(0), y.max(0), place)
