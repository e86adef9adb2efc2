"""Draw figures.json of a run (`undrift figures`): the selector's features, the loss near the models, outlined pictures."""

from __future__ import annotations

import re
from html import escape
from typing import Any

import numpy as np

from undrift.core.run_files import FIGURES
from undrift.core.seals import read_sealed
from undrift.report.charts import Curve, chart, colour, scatter
from undrift.report.load import Group, Run


def draw_groups(groups: list[Group], name: str) -> str:
    """The figures of the first run of each group that has any."""
    parts = []
    for place, group in enumerate(groups):
        content = next((c for run in group.runs if (c := read(run))), None)
        if content is not None:
            parts.append(f"<h3>{escape(group.label)}: models and pictures</h3>{draw(content, f'{name}-g{place}')}")
    return "".join(parts)


def read(run: Run) -> dict[str, Any] | None:
    return read_sealed(run.folder / FIGURES) if (run.folder / FIGURES).exists() else None


def draw(content: dict[str, Any], name: str) -> str:
    sites = [str(site) for site in content["sites"]]
    figures = []
    if content.get("map"):
        points = np.array(content["map"], dtype=np.float64)
        key = legend([(colour(k), site) for k, site in enumerate(sites)])
        picture = scatter(points[:, :2], points[:, 2].astype(np.int64), f"{name}-map")
        figures.append(figure("Features of the selector, t-SNE, test samples by site", picture, key))
    if content.get("surface"):
        near = content["surface"]
        distance = np.array(near["distance"])
        curves, labels = [], []
        for place, (model, losses) in enumerate(near["losses"].items()):
            each = np.array(losses)
            curves.append(Curve(distance, each.mean(0), each.min(0), each.max(0), place))
            labels.append((colour(place), f"{model} model"))
        title = f"Loss near the models on {sites[near['site']]}, along {len(each)} random directions"
        x_label = "distance, share of the model's length"
        figures.append(figure(title, chart(curves, f"{name}-near", x_label, "test loss"), legend(labels)))
    parts = [f'<div class="charts">{"".join(figures)}</div>'] if figures else []
    if content.get("gallery"):
        parts.append(
            '<div class="charts">' + "".join(gallery_figure(entry, sites) for entry in content["gallery"]) + "</div>"
        )
        parts.append(
            '<p class="faint">The test picture with the median Dice of every site: plain, with the outlines by experts, and '
            "with those by the model. The Dice scores are those of the structures in their order.</p>"
        )
    return "".join(parts)


def gallery_figure(entry: dict[str, Any], sites: list[str]) -> str:
    model = int(entry["model"])
    served = "the global model" if model == 0 else f"the model of {sites[model - 1]}"
    dice = ", ".join(f"{float(value):.3f}" for value in entry["dice"])
    text = escape(f"{sites[entry['site']]}: Dice {dice}, by {served}")
    png = re.sub(r"[^A-Za-z0-9+/=]", "", str(entry["png"]))
    return f'<figure><img src="data:image/png;base64,{png}" alt="{text}" width="100%"><figcaption>{text}</figcaption></figure>'


def figure(title: str, svg: str, key: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{svg}<figcaption>{key}</figcaption></figure>"


def legend(entries: list[tuple[str, str]]) -> str:
    dot = '<svg viewBox="0 0 10 10"><circle cx="5" cy="5" r="4" fill="{}"/></svg>'
    return "".join(f"<span>{dot.format(ink)}{escape(text)}</span>" for ink, text in entries)
