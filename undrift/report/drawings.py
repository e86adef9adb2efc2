"""What figures.json of a run (`undrift figures`) shows: the selector's features, the loss near the models, outlined pictures."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from undrift.core.run_files import FIGURES
from undrift.core.seals import read_sealed
from undrift.report.curves import short
from undrift.report.load import Group, Run


def of_groups(groups: list[Group]) -> list[dict[str, Any]]:
    """The figures of the first run of each group that has any."""
    found = ((group.label, next((c for run in group.runs if (c := read(run))), None)) for group in groups)
    return [{"label": label} | read_drawings(content) for label, content in found if content is not None]


def read(run: Run) -> dict[str, Any] | None:
    return read_sealed(run.folder / FIGURES) if (run.folder / FIGURES).exists() else None


def read_drawings(content: dict[str, Any]) -> dict[str, Any]:
    """The map of samples by site, the losses along random directions, and the pictures; each may be missing."""
    names = [str(site) for site in content["sites"]]
    found: dict[str, Any] = {"sites": names}
    if content.get("map"):
        found["map"] = [[short(x), short(y), int(site)] for x, y, site in content["map"]]
    if content.get("surface"):
        near = content["surface"]
        found["surface"] = {
            "site": names[near["site"]],
            "distance": [short(d) for d in near["distance"]],
            "losses": {f"{model} model": _spread(np.array(each)) for model, each in near["losses"].items()},
        }
    if content.get("gallery"):
        found["gallery"] = [picture(entry, names) for entry in content["gallery"]]
    return found


def picture(entry: dict[str, Any], names: list[str]) -> dict[str, str]:
    model = int(entry["model"])
    served = "the global model" if model == 0 else f"the model of {names[model - 1]}"
    dice = ", ".join(f"{float(value):.3f}" for value in entry["dice"])
    png = re.sub(r"[^A-Za-z0-9+/=]", "", str(entry["png"]))
    return {"text": f"{names[entry['site']]}: Dice {dice}, by {served}", "png": f"data:image/png;base64,{png}"}


def _spread(directions: np.ndarray[Any, Any]) -> dict[str, list[float]]:
    """Mean, lowest and highest over the directions [directions, n]."""
    each = {"mean": directions.mean(0), "low": directions.min(0), "high": directions.max(0)}
    return {name: [short(value) for value in values.tolist()] for name, values in each.items()}
