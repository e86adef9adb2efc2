"""What the loop asks of a run: a simulation, a deployment, data-parallel workers and a pipeline answer alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from undrift.round.record import RoundRecord
from undrift.simulate.export import Models


class Run(Protocol):
    """A training that goes round after round."""

    @property
    def t(self) -> int:
        """Rounds that are done."""

    @property
    def device(self) -> torch.device: ...

    @property
    def diverged(self) -> bool:
        """Whether it makes no sense to go on, on all ranks alike."""

    def rounds(self, most: int, last: bool = False) -> list[RoundRecord]:
        """The next rounds, one at least and at most so many; `last`: the run ends after `most`."""

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint needs; every rank asks for it."""

    def restore(self, tensors: dict[str, Tensor], t: int) -> None:
        """Go on from a checkpoint of round t; a KeyError, ValueError or RuntimeError says that it is of another run."""

    def model(self) -> dict[str, Tensor]:
        """The model as a plain state dict on the CPU; every rank asks for it."""

    def choices(self) -> dict[str, Any]:
        """Settings that the run has chosen by itself so far."""

    def about(self) -> dict[str, Any]:
        """Facts for run.toml's [made]."""

    def place(self, path: Path | None, tensors: Mapping[str, Tensor], t: int) -> None:
        """The run's folder, and the checkpoint of round t that will be restored, if there is one."""

    def saved(self) -> None:
        """A checkpoint was written."""

    def extras(self, settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Models | None:
        """What the folder keeps at the end besides the model."""


class InMemory:
    """The answers of a run that keeps nothing but its tensors."""

    diverged = False

    def choices(self) -> dict[str, Any]:
        return {}

    def place(self, path: Path | None, tensors: Mapping[str, Tensor], t: int) -> None:
        pass

    def saved(self) -> None:
        pass

    def extras(self, settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Models | None:
        return None
