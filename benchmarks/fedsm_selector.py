"""FedSM's selector on two real retinal sites: what it sends to the right model by how it learns, and what that is worth.

    COMMON="--dataset retina(size=48,parts=3) --model unet(width=4,depth=3) --partition sites --clients 6 --cohort 6 --epochs 1
            --batch 8 --weights size --rounds 60 --eval-every 20 --set optimizer=adam --set keep_moments=true --set lr=0.002"
    undrift run --algorithm centralized $COMMON --out runs/centralized-0
    undrift run --algorithm fedsm $COMMON --set selector_model=picture-statistics --set selector_weights=uniform
            --set selector_lr=0.1 --out runs/fedsm-0
    python benchmarks/fedsm_selector.py --runs runs --json benchmarks/results/fedsm-selector.json

The selector sees pictures and the clients' numbers, no masks and no other model, so it is trained here alone: FedSM's rounds with
FedSM's own step, without crops and flips. Each selector then chooses among fedsm-SEED's models: with gamma = 0, which always
takes a client's model, with the threshold that is best on validation pictures, and with such a threshold for each client's model.
`own` is the share of each client's test pictures for which its own model is preferred. `unseen` is about sites that took no part
in the selector's training.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from undrift.algorithms.fedsm import FedSM
from undrift.algorithms.optimise import adam
from undrift.data.load import load_dataset
from undrift.jobs.course import commit
from undrift.jobs.registry import build_model
from undrift.models.picture_statistics import Statistics
from undrift.oracle.segmentation import dice_scores
from undrift.personal.choosing import best_gamma, best_gammas, choose
from undrift.personal.supermodel import SuperModel

BATCH = 8
QUANTILE = 0.95  # of known validation pictures that a threshold of distances lets pass


@dataclass(frozen=True)
class Selector:
    """How a selector learns."""

    sees: str = "small-cnn"  # a network on pixels, or `statistics`, or `grey statistics` without colours
    lr: float = 0.01
    weights: str = "size"  # of clients in the mean, or `uniform`
    steps: str = "synced"  # FedSM's modes, or `server`: one Adam at the server on the mean gradient
    norm: bool = False  # BatchNorm behind every convolution
    adjusted: bool = False  # logits plus log(n_i / n) while training
    rounds: tuple[int, ...] = (60, 240)


SMALL, LINEAR = Selector(rounds=(60,)), Selector("statistics", 0.1)
VARIANTS = {
    "small-cnn, as in fedsm-retina": replace(SMALL, rounds=(60, 240)),
    "small-cnn, uniform": replace(SMALL, weights="uniform"),
    "small-cnn, rate 0.003": replace(SMALL, lr=0.003),
    "small-cnn, per batch": replace(SMALL, steps="per_batch"),
    "small-cnn, one Adam at the server": replace(SMALL, steps="server"),
    "small-cnn with BatchNorm": replace(SMALL, norm=True),
    "statistics, rate 0.01": replace(LINEAR, lr=0.01),
    "statistics": LINEAR,
    "statistics, rate 0.3": replace(LINEAR, lr=0.3),
    "statistics, per batch, rate 0.01": replace(LINEAR, steps="per_batch", lr=0.01),
    "statistics, logits adjusted": replace(LINEAR, adjusted=True),
    "statistics, one Adam at the server": replace(LINEAR, steps="server"),
    "statistics, uniform, rate 0.01": replace(LINEAR, weights="uniform", lr=0.01),
    "statistics, uniform": replace(LINEAR, weights="uniform"),
    "statistics, uniform, one Adam at the server": replace(LINEAR, weights="uniform", steps="server"),
    "grey statistics, uniform": replace(LINEAR, sees="grey statistics", weights="uniform"),
}


@dataclass(frozen=True)
class Pictures:
    inputs: Tensor
    owners: Tensor  # [n] the client's number
    masks: Tensor

    def among(self, kept: list[int]) -> Pictures:
        """Those of some clients, who are numbered anew."""
        some = torch.isin(self.owners, torch.tensor(kept))
        number = torch.tensor([kept.index(k) if k in kept else -1 for k in range(int(self.owners.max()) + 1)])
        return Pictures(self.inputs[some], number[self.owners[some]], self.masks[some])


def read(size: int) -> tuple[tuple[str, ...], dict[str, Pictures]]:
    """The sites' names, and their pictures."""
    data = load_dataset(f"retina(size={size}, parts=3)")
    held = np.zeros(len(data.y_train), bool)
    held[data.validation] = True

    def pictures(x: Any, y: Any, sites: Any) -> Pictures:
        inputs = (torch.tensor(x).permute(0, 3, 1, 2) / 255 - torch.tensor(data.mean).view(-1, 1, 1)) / torch.tensor(
            data.std
        ).view(-1, 1, 1)
        return Pictures(inputs.float(), torch.tensor(sites).long(), torch.tensor(y))

    x, y, sites = np.asarray(data.x_train), np.asarray(data.y_train), np.asarray(data.sites)
    return data.site_names, {
        "train": pictures(x[~held], y[~held], sites[~held]),
        "val": pictures(x[held], y[held], sites[held]),
        "test": pictures(np.asarray(data.x_test), np.asarray(data.y_test), np.asarray(data.test_sites)),
    }


def seen(way: str, inputs: Tensor) -> Tensor:
    """The selector's input; statistics are computed once."""
    if "statistics" not in way:
        return inputs
    with torch.no_grad():
        numbers: Tensor = Statistics()(inputs.mean(1, keepdim=True) if way.startswith("grey") else inputs)
        return numbers


def network(chosen: Selector, shape: tuple[int, ...], clients: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if "statistics" in chosen.sees:
        return nn.Linear(shape[0], clients)
    net = build_model(chosen.sees, shape, clients, seed)
    if not chosen.norm:
        return net
    layers = list[nn.Module]()
    for part in net.modules():
        if not list(part.children()):
            layers += [part, nn.BatchNorm2d(part.out_channels)] if isinstance(part, nn.Conv2d) else [part]
    return nn.Sequential(*layers)


def learn(chosen: Selector, train: Pictures, seed: int) -> Iterator[tuple[int, nn.Module]]:
    """Train; after each number of rounds in `chosen.rounds`, this number and the network."""
    clients = int(train.owners.max()) + 1
    inputs = seen(chosen.sees, train.inputs)
    parts = [inputs[train.owners == k] for k in range(clients)]
    share = torch.tensor([len(part) / len(inputs) for part in parts])
    weight = share if chosen.weights == "size" else torch.full((clients,), 1 / clients)
    net, random = network(chosen, tuple(inputs.shape[1:]), clients, seed), torch.Generator().manual_seed(seed)
    rates = FedSM(optimizer="adam", lr=chosen.lr)
    s = parameters_to_vector(net.parameters()).detach()
    shared, own = adam.init(s), [adam.init(s) for _ in parts]
    statistics = [b for b in net.buffers() if b.is_floating_point()]

    def gradient(at: Tensor, rows: Tensor, number: int) -> Tensor:
        vector_to_parameters(at, net.parameters())
        logits = net(rows) + (share.log() if chosen.adjusted else 0.0)
        loss = F.cross_entropy(logits, torch.full((len(rows),), number))
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])

    def mean(each: list[Tensor]) -> Tensor:
        return torch.stack([w * one for w, one in zip(weight, each, strict=True)]).sum(0)

    for t in range(1, max(chosen.rounds) + 1):
        net.train()
        before, kept = [b.clone() for b in statistics], list[list[Tensor]]()
        ends, moments = list[Tensor](), list[adam.Adam]()
        for number, part in enumerate(parts):
            for b, old in zip(statistics, before, strict=True):
                b.copy_(old)
            if chosen.steps == "per_batch":
                x = s
                for rows in torch.randperm(len(part), generator=random).split(BATCH):
                    x, own[number] = adam.step(rates, x, own[number], gradient(x, part[rows], number), None)  # type: ignore[arg-type]
                ends.append(x)
            elif chosen.steps == "server":
                ends.append(gradient(s, part, number))
            else:
                x, after = adam.step(rates, s, shared, gradient(s, part, number), None)  # type: ignore[arg-type]
                ends.append(x)
                moments.append(after)
            kept.append([b.clone() for b in statistics])
        if chosen.steps == "server":
            s, shared = adam.step(rates, s, shared, mean(ends), None)  # type: ignore[arg-type]
        else:
            s = mean(ends)
        if moments:
            shared = adam.Adam(mean([m.m for m in moments]), mean([m.v for m in moments]), moments[0].n)
        for place, b in enumerate(statistics):
            b.copy_(mean([each[place] for each in kept]))
        if t in chosen.rounds:
            vector_to_parameters(s, net.parameters())
            yield t, net.eval()


class Distances:
    """Each client's mean of the statistics, and the covariance of what is left: sums that clients can send once."""

    def __init__(self, train: Pictures) -> None:
        inputs = seen("statistics", train.inputs).double()
        clients = int(train.owners.max()) + 1
        self.means = torch.stack([inputs[train.owners == k].mean(0) for k in range(clients)])
        rest = inputs - self.means[train.owners]
        covariance = rest.T @ rest / len(rest)
        ridge = 0.01 * covariance.diagonal().mean() * torch.eye(len(covariance)).double()
        self.inverse = torch.linalg.inv(covariance + ridge)

    def __call__(self, inputs: Tensor) -> Tensor:
        """[n, clients] minus half the squared distance to each client's mean, as logits."""
        apart = seen("statistics", inputs).double()[:, None] - self.means
        return -0.5 * torch.einsum("nkf,fg,nkg->nk", apart, self.inverse, apart).float()


def shares(logits: Tensor, owners: Tensor) -> list[float]:
    """For every client the share of its pictures that get its own model."""
    right = (logits.argmax(1) == owners).double()
    return [round(float(right[owners == k].mean()), 4) for k in range(int(owners.max()) + 1)]


@torch.no_grad()
def dice_of(models: SuperModel, pictures: Pictures) -> Tensor:
    """[models, n] of every model on every picture."""
    parts = list(zip(pictures.inputs.split(64), pictures.masks.split(64), strict=True))
    return torch.stack([torch.cat([dice_scores(m(x), y).mean(1) for x, y in parts]) for m in models.models])


def client_average(scores: Tensor, owners: Tensor) -> float:
    return float(np.mean([float(scores[owners == k].mean()) for k in range(int(owners.max()) + 1)]))


def served(dice: dict[str, Tensor], logits: dict[str, Tensor], data: dict[str, Pictures]) -> dict[str, Any]:
    """The super model's Dice on test pictures: with gamma = 0, with the threshold that is best on validation pictures, and with
    such a threshold for each client's model.
    """
    choices = {name: choose("threshold", logits[name], 0.0) for name in ("val", "test")}
    owners, confidence, number = data["val"].owners, choices["val"].confidence, choices["val"].model
    own, weight = dice["val"].gather(0, number[None])[0], 1 / torch.bincount(owners)[owners]

    def score(gammas: Tensor) -> float:
        """With a threshold for each model; that of the server's is not used."""
        chosen = choices["test"]
        model = torch.where(chosen.confidence > gammas[chosen.model], chosen.model, 0)
        return round(client_average(dice["test"].gather(0, model[None])[0], data["test"].owners), 4)

    models, of_val = len(dice["val"]), (confidence, own, dice["val"][0], weight)
    gamma, each = best_gamma(*of_val), [1.0, *best_gammas(number - 1, models - 1, *of_val)]
    return {
        "gamma": gamma, "gammas": each[1:], "super with gamma 0": score(torch.zeros(models)),
        "super": score(torch.full((models,), gamma)), "super with gammas": score(torch.tensor(each)),
    }  # fmt: skip


def unseen(data: dict[str, Pictures], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """For every site left out: the shares of its pictures, and of known test pictures, that get a personal model. Thresholds let
    `QUANTILE` of the known validation pictures pass.
    """
    rows = []
    for out, name in enumerate(names):
        kept = [k for k in range(len(names)) if k != out]
        known, strange = {part: pictures.among(kept) for part, pictures in data.items()}, data["test"].among([out])
        *_, (_, net) = learn(replace(VARIANTS["statistics, uniform"], rounds=(60,)), known["train"], 0)
        distances = Distances(known["train"])
        with torch.no_grad():
            trust = {
                "confidence": lambda x, net=net: net(seen("statistics", x)).softmax(1).amax(1),
                "distance": lambda x, distances=distances: distances(x).amax(1),
            }
            for way, of in trust.items():
                least = float(torch.quantile(of(known["val"].inputs), 1 - QUANTILE))
                rows.append({
                    "site": name, "by": way, "personal, unseen": round(float((of(strange.inputs) > least).double().mean()), 4),
                    "personal, known": round(float((of(known["test"].inputs) > least).double().mean()), 4),
                })  # fmt: skip
    return rows


def of_runs(runs: Path, seed: int, data: dict[str, Pictures]) -> tuple[SuperModel, dict[str, Tensor], dict[str, Any]]:
    """FedSM's models, their Dice on every picture, and the scores between which its super model lies."""
    models = SuperModel.load(runs / f"fedsm-{seed}")
    dice, owners = {part: dice_of(models, data[part]) for part in ("val", "test")}, data["test"].owners
    *_, last = (json.loads(line) for line in (runs / f"centralized-{seed}" / "rounds.jsonl").read_text().splitlines())
    own = dice["test"].gather(0, owners[None] + 1)[0]
    fedavg = client_average(dice["test"][0], owners)  # the server's model of FedSM is FedAvg's
    scores = {"centralized": last["own_dice"], "fedavg": fedavg, "personal": client_average(own, owners)}
    return models, dice, {"seed": seed} | {name: round(score, 4) for name, score in scores.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--size", type=int, default=48, help="pixels")
    options.add_argument("--runs", type=Path, required=True, help="a folder with fedsm-SEED and centralized-SEED")
    options.add_argument("--json", type=Path, required=True, help="what is in this file already is not done again")
    given = options.parse_args()
    names, data = read(given.size)
    found: dict[str, Any] = {"commit": commit(), "size": given.size, "sites": names, "runs": [], "selectors": []}
    if given.json.exists():
        found |= json.loads(given.json.read_text())
    done = {(row["selector"], row["seed"]) for row in found["selectors"]}
    if "unseen" not in found:
        found["unseen"] = unseen(data, names)
    for seed in range(given.seeds):
        models, dice, scores = of_runs(given.runs, seed, data)
        found["runs"] = [*(row for row in found["runs"] if row["seed"] != seed), scores]

        def add(name: str, rounds: int, of: Callable[[Tensor], Tensor], seed: int = seed, dice: Any = dice) -> None:
            with torch.no_grad():
                logits = {part: of(data[part].inputs) for part in ("val", "test")}
            row = {"selector": name, "rounds": rounds, "seed": seed, "own": shares(logits["test"], data["test"].owners)}
            found["selectors"].append(row | served(dice, logits, data))
            print(found["selectors"][-1], flush=True)
            given.json.write_text(json.dumps(found, indent=1) + "\n")

        for name, chosen in VARIANTS.items():
            for rounds, net in learn(chosen, data["train"], seed) if (name, seed) not in done else ():
                add(name, rounds, lambda x, net=net, way=chosen.sees: net(seen(way, x)))  # type: ignore[misc]
        if ("distances, in one round", seed) not in done:
            add("distances, in one round", 1, Distances(data["train"]))
        if ("the run's own", seed) not in done and models.selector is not None:
            add("the run's own", 60, models.selector)


if __name__ == "__main__":
    main()
