"""Islands in a LightningModule: torchrun --nproc-per-node 2 with_lightning.py"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import undrift
from undrift.data.load import load_dataset


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.exchanges = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)), 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 2e-3)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    # All that is new.
    def on_train_start(self) -> None:
        self.outer = undrift.LocalSteps(self, algorithm="diloco", every=20)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.outer.correct()  # only for methods that correct gradients

    def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
        self.exchanges += self.outer.step()


def main() -> None:
    data = load_dataset("digits")
    x, x_test = (torch.tensor(part[:]).float().flatten(1) / 255 for part in (data.x_train, data.x_test))
    y, y_test = (torch.tensor(part).long() for part in (data.y_train, data.y_test))
    torch.manual_seed(0)
    model, ranks = Classifier(), int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=20,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))
    with model.outer.evaluating(), torch.no_grad():
        accuracy = (model.layers(x_test).argmax(1) == y_test).float().mean()
    if trainer.is_global_zero:
        print(f"{ranks} islands, {model.exchanges} exchanges, {model.outer.sent} bytes, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
