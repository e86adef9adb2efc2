"""Super models for inference: the server's model, the clients' models, and a selector that chooses one for each picture."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from undrift.core.errors import BadData, BadRunFolder, BadSetting, UnknownName
from undrift.core.run_files import SUPER, checksum, read_super
from undrift.core.seals import write_sealed
from undrift.data._formats import open_picture
from undrift.data._image_files import SUFFIXES
from undrift.data.augment import Transform
from undrift.data.federation import federate
from undrift.data.load import load_dataset
from undrift.jobs.registry import build_model
from undrift.oracle.segmentation import dice_scores
from undrift.personal.choosing import Gamma, best_gamma, best_gammas, choose

COLOURS = ((0, 255, 0), (255, 255, 0), (255, 0, 255))  # borders of the structures in an overlay
BATCH = 64


class Prediction(NamedTuple):
    """The prediction for pictures [n]."""

    masks: NDArray[np.uint8]  # [n, H, W] 0 background, c + 1 inside structure c; or [n] class labels
    model: NDArray[np.int64]  # [n] 0: the server's model; k: client k's
    confidence: NDArray[np.float64]  # [n] the selector's


@dataclass
class SuperModel:
    """Models by number: 0 is the server's, k client k's. A selector, if any, chooses one for each picture."""

    models: list[nn.Module]
    selector: nn.Module | None
    facts: dict[str, Any]

    @classmethod
    def load(cls, folder: str | Path, model: Any = None) -> SuperModel:
        """Load the models of a finished run; `model`, (shape, outputs) -> nn.Module, builds one that is not registered."""
        facts, tensors = read(Path(folder))
        builder = facts["model"] if model is None else model

        def build(prefix: str, spec: Any, outputs: int) -> nn.Module:
            module = build_model(spec, tuple(facts["shape"]), outputs, 0)
            try:
                module.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
            except RuntimeError as error:
                raise BadRunFolder(
                    f"the tensors of the super model in {folder} do not fit its facts: {error}"
                ) from error
            return module.eval()

        names = ["global.", *(f"client{k}." for k in range(1, facts["clients"] + 1))]
        models = [build(name, builder, facts["outputs"]) for name in names]
        if not facts["chooses"]:
            return cls(models, None, facts)
        return cls(models, build("selector.", facts["selector_model"], facts["selector_outputs"]), facts)

    @property
    def gamma(self) -> Gamma:
        """The threshold below which the server's model is used, or one for each client's model."""
        gamma = self.facts["gamma"]
        return [float(one) for one in gamma] if isinstance(gamma, list) else float(gamma)

    def predict(self, x: Any, gamma: float | None = None, site: int | None = None) -> Prediction:
        """Masks for pictures x, uint8 [n, height, width, channels], or for one without n; `site` fixes the model."""
        pictures = self.check(x)
        parts = [self._predict(pictures[at : at + BATCH], gamma, site) for at in range(0, len(pictures), BATCH)]
        return Prediction(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def number_of(self, site: str) -> int:
        """The number of a site's model, from the site's name or number; 0 is the server's."""
        names = ["global", *self.facts["sites"]]
        if site in names:
            return names.index(site)
        if site.isdecimal() and int(site) < len(self.models):
            return int(site)
        raise UnknownName("site", site, [*names, *map(str, range(len(self.models)))])

    def check(self, x: Any) -> NDArray[np.uint8]:
        pictures: NDArray[np.uint8] = np.asarray(x)
        pictures = pictures[None] if pictures.ndim == 3 else pictures
        channels, height, width = self.facts["shape"]
        size = f"[n, {height}, {width}, {channels}]"
        if not pictures.size:
            raise BadData(f"there are no pictures; expected uint8 {size}")
        if pictures.dtype != np.uint8 or pictures.shape[1:] != (height, width, channels):
            raise BadData(f"expected uint8 pictures {size}, found {pictures.dtype} {list(pictures.shape)}; resize them")
        return pictures

    @torch.no_grad()
    def _predict(self, pictures: NDArray[np.uint8], gamma: float | None, site: int | None) -> Prediction:
        inputs = self.inputs(pictures)
        number = torch.zeros(len(inputs), dtype=torch.int64)
        confidence = torch.ones(len(inputs))
        if site is not None or self.selector is None:
            if site is None or not 0 <= site < len(self.models):
                last = len(self.models) - 1
                raise BadSetting(f"without a selector, say which model to use: site=0 (the server's) to {last}")
            number += site
        else:
            kind = self.facts["chooses"]
            choice = choose(kind, self.selector(inputs), self.gamma if gamma is None else gamma)
            number, confidence = choice.model, choice.confidence
            if kind == "mix":
                mixed = sum(
                    choice.weights[:, k].view(-1, *(1,) * (p.dim() - 1)) * p
                    for k, p in enumerate(self.probabilities(m(inputs)) for m in self.models)
                )
                return Prediction(self.read_out(mixed), number.numpy(), confidence.double().numpy())
        probabilities: Tensor | None = None
        for k in number.unique().tolist():
            members = number == k
            part = self.probabilities(self.models[k](inputs[members]))
            if probabilities is None:
                probabilities = part.new_zeros((len(inputs), *part.shape[1:]))
            probabilities[members] = part
        return Prediction(self.read_out(probabilities), number.numpy(), confidence.double().numpy())

    def inputs(self, pictures: NDArray[np.uint8]) -> Tensor:
        transform = Transform(tuple(self.facts["mean"]), tuple(self.facts["std"]))
        return transform(torch.tensor(pictures).permute(0, 3, 1, 2).contiguous(), torch.float32)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid() if self.facts["masks"] else outputs.softmax(1)

    def read_out(self, probabilities: Any) -> NDArray[Any]:
        """Masks with nested structures, or class labels."""
        masks = self.facts["masks"]
        best = (probabilities > 0.5).cumprod(1).sum(1).to(torch.uint8) if masks else probabilities.argmax(1)
        return np.asarray(best.numpy())


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts and tensors of a super model."""
    tensors, facts = (folder / name for name in SUPER)
    if not facts.exists() or not tensors.exists():
        raise BadRunFolder(
            f"{folder} holds no super model ({SUPER[0]} and {SUPER[1]}); it is written at the end of a run of a personal method, "
            "such as undrift run --algorithm fedsm"
        )
    try:
        return check_facts(read_super(folder)), load_file(tensors)
    except (ValueError, RecursionError, SafetensorError) as error:
        raise BadRunFolder(f"the super model in {folder} is damaged: {error}") from error


FACTS = {
    "algorithm": str, "dataset": str, "model": str, "shape": int, "outputs": int, "clients": int, "chooses": str,
    "gamma": float, "selector_model": str, "selector_outputs": int, "masks": bool, "mean": float, "std": float, "sites": str,
}  # fmt: skip
LISTS = ("shape", "mean", "std", "sites")


def check_facts(facts: Any) -> dict[str, Any]:
    """The facts, or ValueError where one is missing or of another kind."""
    if not isinstance(facts, dict):
        raise ValueError("the facts are no table")
    for name, kind in FACTS.items():
        each = name == "gamma" and isinstance(facts.get(name), list)  # one of each client's model
        values = facts.get(name) if name in LISTS or each else [facts.get(name)]
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(values, list) or not all(type(value) in kinds for value in values):
            raise ValueError(f"{name} is {facts.get(name)!r}")
    gammas = facts["gamma"] if isinstance(facts["gamma"], list) else facts["sites"]
    if (
        not len(facts["sites"]) == len(gammas) == facts["clients"]
        or not facts["shape"]
        or min(facts["shape"]) < 1
        or facts["outputs"] < 1
    ):
        raise ValueError("its sizes do not fit each other")
    if len(facts["mean"]) != len(facts["std"]) or len(facts["mean"]) not in (0, 1, facts["shape"][0]):
        raise ValueError("mean and std do not fit the pictures")
    return facts


def tune(folder: Path) -> str:
    """Tune the threshold on the validation samples of the run's data set, store it, and return a message."""
    model = SuperModel.load(folder)
    if model.facts["chooses"] != "threshold":
        raise BadSetting(f"{model.facts['algorithm']} has no threshold to tune; fedsm has")
    if not model.facts["masks"]:
        raise BadSetting(
            "a threshold for classes is tuned while training, if the data set or val_fraction holds samples out for "
            "validation (else it is 0); --tune-gamma is for masks"
        )
    data = federate(load_dataset(model.facts["dataset"]), "sites", model.facts["clients"], 0, torch.device("cpu"))
    if "val" not in data.held_out:
        raise BadSetting(f"{model.facts['dataset']} has no validation samples to tune the threshold on")
    val = data.held_out["val"]
    pictures = val.split.take(val.rows).permute(0, 2, 3, 1).numpy()
    targets = val.split.targets[val.rows]

    def scores(prediction: Prediction) -> Tensor:
        levels = torch.arange(model.facts["outputs"]).view(1, -1, 1, 1)
        planes = torch.from_numpy(prediction.masks).unsqueeze(1) > levels
        return dice_scores(planes.float() - 0.5, targets).mean(1)

    chosen = model.predict(pictures, gamma=0.0)
    personal, shared = scores(chosen), scores(model.predict(pictures, gamma=1.0))
    weight = 1.0 / torch.bincount(val.owners).float()[val.owners]
    before, confidence = model.gamma, torch.from_numpy(chosen.confidence)
    gamma: Gamma
    if isinstance(before, float):
        gamma = best_gamma(confidence, personal, shared, weight)
    else:
        preferred = torch.from_numpy(chosen.model) - 1
        gamma = best_gammas(preferred, len(before), confidence, personal, shared, weight)
    write_sealed(folder / SUPER[1], model.facts | {"gamma": gamma, "sha256": checksum(folder / SUPER[0])})
    said, was = (f"{g:g}" if isinstance(g, float) else ", ".join(f"{one:g}" for one in g) for g in (gamma, before))
    return f"gamma {said} (was {was}), tuned on {len(val.rows)} validation samples; stored in {folder / SUPER[1]}"


def predict_folder(
    model: SuperModel, pictures: Path, out: Path, gamma: float | None = None, site: int | None = None
) -> int:
    """Write masks and overlays as PNG and predictions.csv for the pictures of a folder; returns their number."""
    from PIL import Image

    if not model.facts["masks"]:
        raise BadSetting("predict writes masks, but this run learned classes; use SuperModel.predict in Python")
    files = sorted(p for p in pictures.glob("*") if p.suffix.lower() in SUFFIXES) if pictures.is_dir() else []
    if not files:
        raise BadData(f"there are no pictures in {pictures}; expected files such as NAME.png or NAME.jpg")
    out.mkdir(parents=True, exist_ok=True)
    channels, height, width = model.facts["shape"]
    levels = 255 // model.facts["outputs"]
    stems = Counter(file.stem for file in files)  # p.png and p.jpg must not write the same mask
    with (out / "predictions.csv").open("w", newline="") as table:
        rows = csv.writer(table)
        rows.writerow(["name", "model", "site", "confidence"])
        for file in files:
            picture = open_picture(file, "RGB" if channels == 3 else "L")
            small = np.asarray(picture.resize((width, height), Image.Resampling.BOX)).reshape(height, width, channels)
            prediction = model.predict(small, gamma, site)
            name = file.stem if stems[file.stem] == 1 else file.name
            mask = Image.fromarray(prediction.masks[0]).resize(picture.size, Image.Resampling.NEAREST)
            Image.fromarray(np.asarray(mask) * np.uint8(levels)).save(out / f"{name}_mask.png")
            outlined = overlay(np.asarray(picture.convert("RGB")), np.asarray(mask))
            Image.fromarray(outlined).save(out / f"{name}_overlay.png")
            number = int(prediction.model[0])
            owner = "global" if number == 0 else model.facts["sites"][number - 1]
            rows.writerow([plain_text(file.name), number, plain_text(owner), f"{prediction.confidence[0]:.4f}"])
    return len(files)


def plain_text(cell: str) -> str:
    """Text for a cell of a .csv: behind a quote if a spreadsheet would take it for a formula.

    >>> plain_text("=1+1.png"), plain_text("p1.png")
    ("'=1+1.png", 'p1.png')
    """
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def overlay(picture: NDArray[np.uint8], mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Draw the border of each structure into a copy of the picture."""
    outlined = picture.copy()
    for level in range(int(mask.max(initial=0))):
        inside = np.pad(mask > level, 1)
        core = inside[:-2, 1:-1] & inside[2:, 1:-1] & inside[1:-1, :-2] & inside[1:-1, 2:]
        outlined[inside[1:-1, 1:-1] & ~core] = COLOURS[level % len(COLOURS)]
    return outlined
