"""A model, data, a loss and metrics of one's own: six clients that each see one side of two spirals."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import undrift


class Spirals(nn.Module):
    """Fixed random features, then BatchNorm and dropout as in any other module."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(2, 64).requires_grad_(False)  # frozen: not trained, not sent
        self.hidden = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(torch.cos(2 * self.features(x))))


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng(seed)
    label, turn = random.integers(0, 2, count), random.uniform(1, 8, count)
    angle = turn + np.pi * label
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1) / 4
    return torch.from_numpy(points + random.normal(0, 0.05, (count, 2))).float(), torch.from_numpy(label)


def smoothed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


metrics = {
    "accuracy": lambda outputs, targets: outputs.argmax(-1) == targets,  # one number a sample
    "confidence": lambda outputs, targets: outputs.softmax(-1).amax(-1).mean(),  # or one for the batch
}

if __name__ == "__main__":
    torch.manual_seed(0)  # the initial weights are the module's own
    model = Spirals()
    (x, y), test = spirals(1200, seed=1), spirals(400, seed=2)
    side = ((torch.atan2(x[:, 1], x[:, 0]) + torch.pi) / (2 * torch.pi) * 6).long().clamp(max=5)
    clients: list[Dataset] = [TensorDataset(x[side == s], y[side == s]) for s in range(6)]
    common = {"model": model, "loss": smoothed_loss, "metrics": metrics, "rounds": 30, "set": {"lr": 0.2}}
    results = {"arrays, iid": undrift.run(data=(x, y, *test), partition="iid", clients=6, cohort=3, **common)}
    pair = TensorDataset(x, y), TensorDataset(*test)
    results["a Dataset, shards"] = undrift.run(data=pair, partition="shards:2", clients=6, cohort=3, **common)
    own = clients, pair[1]
    results["a Dataset a client"] = undrift.run(data=own, cohort=3, algorithm="scaffold", **common)
    for name, result in results.items():
        last = result.records[-1]
        print(f"{name:20} accuracy {last['accuracy']:.4f}  confidence {last['confidence']:.4f}")
    model.load_state_dict(results["a Dataset a client"].model)  # a plain state dict, for use without undrift
