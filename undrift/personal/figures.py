"""What only the models of a finished run can show, as figures.json beside them, for the report to draw.

A map of the selector's features (t-SNE), the loss near the models along random directions, and pictures of every site with the
outlines that experts and the super model drew. After Figs. 11, 12, 18 and 19 of A. Xu's thesis.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from undrift.core.errors import BadSetting
from undrift.data.federation import HeldOut, federate
from undrift.data.load import load_dataset
from undrift.oracle.segmentation import dice_loss, overlap, structures_of
from undrift.personal.supermodel import SuperModel, overlay
from undrift.report.drawings import FIGURES

MOST_MAPPED = 600  # samples
DIRECTIONS = 10  # random ones, along which the loss is looked at
REACH, STEPS = 0.3, 13  # how far along each, as a share of the model's length; points


def look(folder: Path) -> Path:
    """Make the figures of a run whose clients have models of their own; where they are."""
    model = SuperModel.load(folder)
    data = federate(load_dataset(model.facts["dataset"]), "sites", model.facts["clients"], 0, torch.device("cpu"))
    if "test" not in data.held_out:
        raise BadSetting(f"{model.facts['dataset']} has no test samples of each site, on which figures could be made")
    own = data.held_out["test"]
    found: dict[str, Any] = {"sites": model.facts["sites"], "surface": surface(model, own)}
    if model.selector is not None and importlib.util.find_spec("sklearn") is not None:
        found["map"] = feature_map(model, own)
    if model.facts["masks"]:
        found["gallery"] = gallery(model, own)
    temporary, out = folder / f".{FIGURES}.{os.getpid()}", folder / FIGURES
    temporary.write_text(json.dumps(found))
    os.replace(temporary, out)
    return out


def feature_map(model: SuperModel, own: HeldOut) -> list[list[float]]:
    """[n, 3] two coordinates and the site of test samples: t-SNE of what the selector's last layer is given."""
    from sklearn.manifold import TSNE

    assert model.selector is not None
    some = torch.linspace(0, len(own.rows) - 1, min(len(own.rows), MOST_MAPPED)).round().long()
    seen: list[Tensor] = []
    *_, last = (layer for layer in model.selector.modules() if isinstance(layer, nn.Linear))
    hook = last.register_forward_pre_hook(lambda layer, given: seen.append(given[0].flatten(1)))
    with torch.no_grad():
        for part in some.split(64):
            model.selector(model.inputs(pictures(own, part)))
    hook.remove()
    features = torch.cat(seen).numpy()
    nearness = min(30.0, (len(features) - 1) / 3)
    places = TSNE(perplexity=nearness, init="pca", random_state=0).fit_transform(features)
    return [[*map(float, place), int(site)] for place, site in zip(places, own.owners[some].tolist(), strict=True)]


def surface(model: SuperModel, own: HeldOut) -> dict[str, Any]:
    """The mean test loss of one site near the server's and the site's own model, along random directions of equal length.

    The site is the one on which the two differ most.
    """
    at = np.linspace(-REACH, REACH, STEPS)
    sites = range(len(model.models) - 1)
    here = [[site_loss(model, own, site, model.models[k]) for k in (0, site + 1)] for site in sites]
    site = max(sites, key=lambda s: abs(here[s][0] - here[s][1]))
    curves = {}
    for name, module in (("global", model.models[0]), ("personal", model.models[site + 1])):
        start = nn.utils.parameters_to_vector(module.parameters()).detach()
        random = torch.Generator().manual_seed(0)  # the same directions for both
        directions = F.normalize(torch.randn(DIRECTIONS, len(start), generator=random), dim=1) * start.norm()
        losses = []
        for u in directions:
            for share in at:
                nn.utils.vector_to_parameters(start + float(share) * u, module.parameters())
                losses.append(site_loss(model, own, site, module))
        nn.utils.vector_to_parameters(start, module.parameters())
        curves[name] = np.array(losses).reshape(DIRECTIONS, STEPS).tolist()
    return {"site": site, "distance": at.tolist(), "losses": curves}


@torch.no_grad()
def site_loss(model: SuperModel, own: HeldOut, site: int, module: nn.Module) -> float:
    mine = (own.owners == site).nonzero().squeeze(-1)
    losses = []
    for part in mine.split(64):
        outputs, targets = module(model.inputs(pictures(own, part))), own.split.targets[own.rows[part]]
        losses.append(
            dice_loss(outputs, targets) if model.facts["masks"] else F.cross_entropy(outputs, targets, reduction="none")
        )
    return float(torch.cat(losses).mean())


def gallery(model: SuperModel, own: HeldOut) -> list[dict[str, Any]]:
    """Of every site the test picture with the middle Dice: as it is, with the experts' outlines and with the super model's."""
    shown = []
    for site in range(len(model.models) - 1):
        mine = (own.owners == site).nonzero().squeeze(-1)
        said = model.predict(pictures(own, mine), site=None if model.selector is not None else site + 1)
        true = own.split.targets[own.rows[mine]]
        count = model.facts["outputs"]
        dice = overlap(structures_of(torch.from_numpy(said.masks), count), structures_of(true, count))
        middle = int(dice.mean(1).argsort()[len(mine) // 2])
        picture = as_rgb(pictures(own, mine[middle : middle + 1])[0])
        drawn = [picture, *(overlay(picture, m) for m in (true[middle].numpy().astype(np.uint8), said.masks[middle]))]
        shown.append(
            {"site": site, "model": int(said.model[middle]), "dice": dice[middle].tolist(), "png": as_png(drawn)}
        )
    return shown


def pictures(own: HeldOut, which: Tensor) -> NDArray[np.uint8]:
    """uint8 [n, height, width, channels]"""
    found: NDArray[np.uint8] = own.split.take(own.rows[which]).permute(0, 2, 3, 1).numpy()
    return found


def as_rgb(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return picture if picture.shape[-1] == 3 else np.repeat(picture[..., :1], 3, -1)


def as_png(beside: list[NDArray[np.uint8]]) -> str:
    """Pictures side by side, as text for a page."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.concatenate(beside, 1)).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()
