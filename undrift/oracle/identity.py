"""What a run is about, in a few letters: a resumed run must find the same data, model and loss as before."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from undrift.data.federation import Federation, Split
from undrift.oracle.net import Net

READ, BYTES = (
    1024,
    1 << 25,
)  # the most samples and bytes of a split's inputs that count; of picture files, only the targets do


def identity(net: Net, data: Federation) -> dict[str, str]:
    """Checksums of the data, of the model's layers and of its frozen tensors, and the loss."""
    trained = {*net.layout.names, *net.buffer_layout.names}
    frozen = [t.detach().cpu().numpy() for n, t in net.original.state_dict().items() if n not in trained]
    return identity_of_data(data) | {
        "layers": layers_of(net.original),
        "frozen": digest(*frozen),
        "loss": loss_of(net),
    }


def identity_of_data(data: Federation) -> dict[str, str]:
    """Checksums of the training and test samples, and of which clients hold which."""
    held = data.members.cpu().numpy(), data.sizes, data.validation
    return {"samples": digest(*arrays_of(data.train), *arrays_of(data.test)), "holdings": digest(*held)}


def arrays_of(split: Split) -> list[NDArray[Any]]:
    """A split's targets, and inputs from all over it."""
    inputs = []
    if isinstance(samples := split.samples, np.ndarray) and len(samples):
        count = min(len(samples), READ, 1 + BYTES * len(samples) // max(1, samples.nbytes))
        inputs = [samples[np.linspace(0, len(samples) - 1, count).astype(np.int64)]]
    return [split.targets.cpu().numpy(), *inputs]


def layers_of(module: nn.Module) -> str:
    """A checksum of a module's text, without addresses."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(module))
    return digest(np.frombuffer(text.encode(), np.uint8))


def loss_of(net: Net) -> str:
    """The name of the loss; of a module, its text and a checksum of its tensors, such as class weights."""
    loss = net.loss
    if not isinstance(loss, nn.Module):
        return str(getattr(loss, "__name__", type(loss).__name__))
    tensors = [t.cpu().numpy() for t in loss.state_dict().values()]
    return f"{loss} {digest(*tensors)}" if tensors else str(loss)


def digest(*arrays: NDArray[Any]) -> str:
    """A checksum of arrays and their shapes."""
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(f"{array.dtype} {array.shape}".encode())
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()[:16]
