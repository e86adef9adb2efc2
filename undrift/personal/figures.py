"""Compute figures from the models of a finished run and write them as figures.json, which the report draws.

A map of the selector's features (t-SNE), the loss near the models along random directions, and pictures of every site with the
outlines by experts and by the super model. After Figs. 11, 12, 18 and 19 of A. Xu's thesis.
"""

from __future__ import annotations

import base64
import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from undrift.core.errors import BadSetting
from undrift.core.run_files import FIGURES
from undrift.core.seals import write_sealed
from undrift.data.federation import HeldOut, federate
from undrift.data.load import load_dataset
from undrift.oracle.segmentation import dice_loss, overlap, structures_of
from undrift.personal.supermodel import SuperModel, overlay

MOST_MAPPED = 600  # samples
DIRECTIONS = 10  # random directions of the loss surface
REACH, STEPS = 0.3, 13  # distance along each, as a share of the model's norm; number of points


def look(folder: Path) -> Path:
    """Compute the figures of a run with personal models; returns the path of the file."""
    model = SuperModel.load(folder)
    data = federate(load_dataset(model.facts["dataset"]), "sites", model.facts["clients"], 0, torch.device("cpu"))
    if "test" not in data.held_out:
        raise BadSetting(f"{model.facts['dataset']} has no test samples per site, which figures need")
    test = data.held_out["test"]
    figures: dict[str, Any] = {"sites": model.facts["sites"], "surface": surface(model, test)}
    if model.selector is not None and importlib.util.find_spec("sklearn") is not None:
        figures["map"] = feature_map(model, test)
    if model.facts["masks"]:
        figures["gallery"] = gallery(model, test)
    write_sealed(folder / FIGURES, figures)
    return folder / FIGURES


def feature_map(model: SuperModel, test: HeldOut) -> list[list[float]]:
    """[n, 3] two coordinates and the site of test samples: t-SNE of the inputs of the selector's last layer."""
    from sklearn.manifold import TSNE

    assert model.selector is not None
    some = torch.linspace(0, len(test.rows) - 1, min(len(test.rows), MOST_MAPPED)).round().long()
    seen: list[Tensor] = []
    *_, last = (layer for layer in model.selector.modules() if isinstance(layer, nn.Linear))
    hook = last.register_forward_pre_hook(lambda layer, given: seen.append(given[0].flatten(1)))
    with torch.no_grad():
        for part in some.split(64):
            model.selector(model.inputs(pictures(test, part)))
    hook.remove()
    features = torch.cat(seen).numpy()
    nearness = min(30.0, (len(features) - 1) / 3)
    places = TSNE(perplexity=nearness, init="pca", random_state=0).fit_transform(features)
    return [[*map(float, place), int(site)] for place, site in zip(places, test.owners[some].tolist(), strict=True)]


def surface(model: SuperModel, test: HeldOut) -> dict[str, Any]:
    """The mean test loss of one site near the server's and the site's model, along random directions of equal length.

    The site is the one on which the two models differ most.
    """
    at = np.linspace(-REACH, REACH, STEPS)
    sites = range(len(model.models) - 1)
    pairs = [[site_loss(model, test, site, model.models[k]) for k in (0, site + 1)] for site in sites]
    site = max(sites, key=lambda s: abs(pairs[s][0] - pairs[s][1]))
    curves = {}
    for name, module in (("global", model.models[0]), ("personal", model.models[site + 1])):
        start = nn.utils.parameters_to_vector(module.parameters()).detach()
        random = torch.Generator().manual_seed(0)  # the same directions for both models
        directions = F.normalize(torch.randn(DIRECTIONS, len(start), generator=random), dim=1) * start.norm()
        losses = []
        for u in directions:
            for share in at:
                nn.utils.vector_to_parameters(start + float(share) * u, module.parameters())
                losses.append(site_loss(model, test, site, module))
        nn.utils.vector_to_parameters(start, module.parameters())
        curves[name] = np.array(losses).reshape(DIRECTIONS, STEPS).tolist()
    return {"site": site, "distance": at.tolist(), "losses": curves}


@torch.no_grad()
def site_loss(model: SuperModel, test: HeldOut, site: int, module: nn.Module) -> float:
    members = (test.owners == site).nonzero().squeeze(-1)
    losses = []
    for part in members.split(64):
        outputs, targets = module(model.inputs(pictures(test, part))), test.split.targets[test.rows[part]]
        masks = model.facts["masks"]
        losses.append(dice_loss(outputs, targets) if masks else F.cross_entropy(outputs, targets, reduction="none"))
    return float(torch.cat(losses).mean())


def gallery(model: SuperModel, test: HeldOut) -> list[dict[str, Any]]:
    """The test picture with the median Dice of each site: plain, with the experts' outlines and with the super model's."""
    entries = []
    for site in range(len(model.models) - 1):
        members = (test.owners == site).nonzero().squeeze(-1)
        prediction = model.predict(pictures(test, members), site=None if model.selector is not None else site + 1)
        true = test.split.targets[test.rows[members]]
        count = model.facts["outputs"]
        dice = overlap(structures_of(torch.from_numpy(prediction.masks), count), structures_of(true, count))
        middle = int(dice.mean(1).argsort()[len(members) // 2])
        picture = pictures(test, members[middle : middle + 1])[0]
        picture = picture if picture.shape[-1] == 3 else np.repeat(picture[..., :1], 3, -1)
        masks = true[middle].numpy().astype(np.uint8), prediction.masks[middle]
        png = as_png([picture, *(overlay(picture, mask) for mask in masks)])
        number = int(prediction.model[middle])
        entries.append({"site": site, "model": number, "dice": dice[middle].tolist(), "png": png})
    return entries


def pictures(test: HeldOut, which: Tensor) -> NDArray[np.uint8]:
    """uint8 [n, height, width, channels]"""
    images: NDArray[np.uint8] = test.split.take(test.rows[which]).permute(0, 2, 3, 1).numpy()
    return images


def as_png(pictures: list[NDArray[np.uint8]]) -> str:
    """Pictures side by side, as base64 text."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.concatenate(pictures, 1)).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()
