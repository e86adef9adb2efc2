"""A usual DDP loop with DEF as its optimizer: torchrun --nproc-per-node 2 ddp_def.py (or python, for one process)."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import undrift
from undrift.data.load import load_dataset


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    data = load_dataset("digits")
    train, test = (torch.tensor(x[:]).float().flatten(1) / 255 for x in (data.x_train, data.x_test))
    labels = torch.tensor(data.y_train).long(), torch.tensor(data.y_test).long()
    return TensorDataset(train, labels[0]), test, labels[1]


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    train, x_test, y_test = digits()
    sampler = DistributedSampler(train, ranks, dist.get_rank() if ranks > 1 else 0)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(train[0][0].numel(), 200), nn.ReLU(), nn.Linear(200, 10))
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = undrift.DEF(model, lr=0.1, momentum=0.9, weight_decay=5e-4, ratio=64)  # was torch.optim.SGD
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 15, 0.1)

    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()

    sent = optimizer.workers.sent / ranks / optimizer.t
    with optimizer.evaluating("def"), torch.no_grad():  # y = x - mean e; every rank takes part
        accuracy = (model(x_test).argmax(1) == y_test).float().mean()
    if ranks == 1 or dist.get_rank() == 0:
        print(f"{ranks} ranks, accuracy {accuracy:.4f}, {sent:.0f} bytes sent a rank and step")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
