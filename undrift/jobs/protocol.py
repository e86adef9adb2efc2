"""The protocol between the loop and a run: a simulation, a deployment, data-parallel workers or a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from undrift.round.record import RoundRecord
from undrift.simulate.export import Models


class Run(Protocol):
    """A training run, round by round."""

    @property
    def t(self) -> int:
        """The number of rounds done."""

    @property
    def device(self) -> torch.device: ...

    @property
    def diverged(self) -> bool:
        """Whether the run has diverged; the same on all ranks."""

    @property
    def enough(self) -> bool:
        """Whether the run has not become better for so long that it ends."""

    def rounds(self, most: int, last: bool = False) -> list[RoundRecord]:
        """Run the next rounds, between one and `most`; `last`: the run ends after `most`."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint; called on every rank."""

    def restore(self, tensors: dict[str, Tensor], t: int) -> None:
        """Restore a checkpoint of round t; raise KeyError, ValueError or RuntimeError if it is another run's."""

    def model(self) -> dict[str, Tensor]:
        """The model as a plain state dict on the CPU; called on every rank."""

    def choices(self) -> dict[str, Any]:
        """Settings that the run has chosen so far."""

    def about(self) -> dict[str, Any]:
        """Facts for run.toml's [made]."""

    def place(self, path: Path | None, tensors: Mapping[str, Tensor], t: int) -> None:
        """Set the run's folder; `tensors` are the checkpoint of round t that will be restored, or empty."""

    def after_checkpoint(self) -> None:
        """Note that a checkpoint was written."""

    def client_rows(self) -> list[dict[str, Any]]:
        """A row for each client that is on this machine."""

    def extras(self, settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Models | None:
        """Further models and facts for the finished folder."""

    def leave(self, folder: Path, model: Mapping[str, Tensor]) -> None:
        """Write into the finished folder what belongs to the model besides its tensors."""


class InMemory:
    """Default answers, for a run that keeps nothing but its tensors."""

    diverged = False

    @property
    def enough(self) -> bool:
        return False

    def choices(self) -> dict[str, Any]:
        return {}

    def place(self, path: Path | None, tensors: Mapping[str, Tensor], t: int) -> None:
        pass

    def after_checkpoint(self) -> None:
        pass

    def client_rows(self) -> list[dict[str, Any]]:
        return []

    def extras(self, settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Models | None:
        return None

    def leave(self, folder: Path, model: Mapping[str, Tensor]) -> None:
        pass
