"""Islands in an Accelerate loop: torchrun --nproc-per-node 2 with_accelerate.py"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import undrift
from undrift.data.load import load_dataset


def main() -> None:
    data, accelerator = load_dataset("digits"), Accelerator(cpu=True)
    x, x_test = (torch.tensor(part[:]).float().flatten(1) / 255 for part in (data.x_train, data.x_test))
    y, y_test = (torch.tensor(part).long() for part in (data.y_train, data.y_test))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    outer = undrift.LocalSteps(model, algorithm="diloco", every=20, compress="int4")  # new
    wrapped, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), 2e-3), DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    )
    exchanges = 0
    for _ in range(20):
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(wrapped(inputs), targets))
            optimizer.step()
            exchanges += outer.step()  # new
    with outer.evaluating(), torch.no_grad():  # new
        accuracy = (model(x_test).argmax(1) == y_test).float().mean()
    if accelerator.is_main_process:
        print(
            f"{accelerator.num_processes} islands, {exchanges} exchanges, {outer.sent} bytes, accuracy {accuracy:.4f}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
