"""Islands in the Trainer of transformers: torchrun --nproc-per-node 2 with_trainer.py"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import undrift
from undrift.data.load import load_dataset


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Islands(TrainerCallback):  # type: ignore[misc]
    """All that is new."""

    def __init__(self, **how: Any) -> None:
        self.how, self.exchanges = how, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.outer = undrift.LocalSteps(getattr(model, "module", model), **self.how)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.outer.correct()  # only for methods that correct gradients

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.exchanges += self.outer.step()


def main() -> None:
    data = load_dataset("digits")
    x, x_test = (torch.tensor(part[:]).float().flatten(1) / 255 for part in (data.x_train, data.x_test))
    y, y_test = (torch.tensor(part).long() for part in (data.y_train, data.y_test))
    train = [{"inputs": a, "labels": b} for a, b in zip(x, y, strict=True)]
    torch.manual_seed(0)
    model, islands = Classifier(), Islands(algorithm="diloco", every=20)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, ddp_backend="gloo", report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
            per_device_train_batch_size=32, num_train_epochs=20, learning_rate=2e-3, lr_scheduler_type="constant",
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=train, callbacks=[islands]).train()
        with islands.outer.evaluating(), torch.no_grad():
            accuracy = (model.layers(x_test).argmax(1) == y_test).float().mean()
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks == 1 or dist.get_rank() == 0:
            print(
                f"{ranks} islands, {islands.exchanges} exchanges, {islands.outer.sent} bytes, accuracy {accuracy:.4f}"
            )
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
