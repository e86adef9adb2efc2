"""Optional functions of a worker part that sends parts of the model, or trains while messages are on their way.

Their defaults send the whole model and wait. See `ffa_lora.py` and `streaming_diloco.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from torch import Tensor

from undrift.algorithms.checks import Checked
from undrift.core.trees import State


class PartialExchange(Checked):
    """The functions of a worker part about what is sent, and when it arrives."""

    whole_uploads: ClassVar[bool] = True  # False: what goes up are no vectors of the model, which `compress` takes

    def trains(self, names: tuple[str, ...]) -> Collection[str]:
        """Which of the model's trainable tensors are trained; the others stay as they are, and are not sent."""
        return names

    @property
    def turns(self) -> int:
        """In how many exchanges the whole model is sent."""
        return 1

    @property
    def late(self) -> int:
        """Local steps that a client makes while the server's message is on its way."""
        return 0

    def arrive(self, down: State, client: State, work: State, now: Tensor) -> State:
        """The work once the message is there, where `now` [..., 1] is true."""
        return work
