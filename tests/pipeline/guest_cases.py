"""Pipelines on models of sequences, for one process or for ranks: `torchrun .. -m tests.pipeline.guest_cases FILE`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from undrift.core import ranks
from undrift.pipeline import DSP

WORDS, WIDTH, LENGTH = 11, 6, 5
STEPS, STOP, FLUSH = 14, 8, 11


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        h: Tensor = self.words(ids) + self.places.weight
        return h if mask is None else h * mask.unsqueeze(-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = h + self.down(torch.tanh(self.up(self.norm(h))))
        return out


class Head(nn.Module):
    """Logits, alone or in an object as other libraries' models return them."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.out, self.wrapped = nn.Linear(WIDTH, WORDS, bias=False), wrapped

    def forward(self, h: Tensor) -> Any:
        return SimpleNamespace(logits=self.out(h)) if self.wrapped else self.out(h)


def language_model(tied: bool = True, wrapped: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Embedding(), Layer(), Layer(), Head(wrapped)).double()
    if tied:
        model[3].out.weight = model[0].words.weight
    return model


def texts(count: int = STEPS, form: str = "mapping", short: bool = True) -> list[Any]:
    """Batches of six texts, every fourth one with two."""
    draw = torch.Generator().manual_seed(1)
    found: list[Any] = []
    for n in range(count):
        ids = torch.randint(WORDS, (2 if short and n % 4 == 3 else 6, LENGTH + 1), generator=draw)
        mask, labels = torch.rand(len(ids), LENGTH, generator=draw) < 0.8, ids[:, 1:].clone()
        labels[~mask] = -100
        parts = {"ids": ids[:, :-1], "mask": mask}
        found.append({"mapping": parts | {"labels": labels}, "tuple": (tuple(parts.values()), labels)}[form])
    return found


def factor(n: int) -> float:
    return 1.0 if n < 6 else 0.5


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.8, weight_decay=1e-2)


CASES: dict[str, dict[str, Any]] = {
    "bp": dict(p=(0, 0, 0), m=(0, 0, 0)),
    "dsp": dict(p=(1, 1, 0), m=(4, 2, 0)),
    "clip": dict(p=(1, 1, 0), m=(4, 2, 0), clip=0.2),
    "bp clip": dict(p=(0, 0, 0), m=(0, 0, 0), clip=0.2),
    "not tied": dict(p=(1, 1, 0), m=(4, 2, 0), clip=0.2, tied=False),
}


def build(case: str) -> DSP:
    settings = dict(CASES[case])
    model = language_model(settings.pop("tied", True))
    return DSP(model, cuts=[1, 2], optimizer=sgd, rate=factor, **settings)


def outcome(case: str) -> dict[str, Any]:
    """What a case computes, with a new pipeline from the middle on, made from the state."""
    run, losses = build(case), list[Tensor | None]()
    found: dict[str, Any] = {}
    for n, batch in enumerate(texts()):
        if n == STOP:
            found["stopped"] = run.state_dict()
            state = ranks.first_rank_says(found["stopped"])
            run = build(case)
            run.load_state_dict(state)
        losses.append(run.step(batch))
        if n == FLUSH:
            losses += run.flush()
    losses += run.flush()
    return found | {
        "state": run.state_dict(), "model": run.model_state(), "losses": losses, "scores": run.evaluate(texts(3)),
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    with ranks.join():
        torch.save({case: outcome(case) for case in CASES}, f"{Path(sys.argv[1])}.{ranks.rank()}")


if __name__ == "__main__":
    main()
