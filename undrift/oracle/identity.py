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

READ = 1024  # samples of a split whose inputs count; of those that are read from files, only the targets do


def identity(net: Net, data: Federation) -> dict[str, str]:
    """Checksums of the data with who holds them and of the model without what is trained, and the loss."""
    trained = {*net.layout.names, *net.buffer_layout.names}
    return {"data": data_of(data), "model": model_of(net.original, trained), "loss": loss_of(net)}


def data_of(data: Federation) -> str:
    members = data.members.cpu().numpy()
    return digest(members, data.sizes, data.validation, *arrays_of(data.train), *arrays_of(data.test))


def arrays_of(split: Split) -> list[NDArray[Any]]:
    """A split's targets, and inputs from all over it."""
    some = np.linspace(0, len(split) - 1, min(READ, len(split))).astype(np.int64)
    inputs = [split.samples[some]] if isinstance(split.samples, np.ndarray) else []
    return [split.targets.cpu().numpy(), *inputs]


def model_of(module: nn.Module, trained: set[str]) -> str:
    """The layers by their text, without addresses, and the tensors that no checkpoint holds, such as frozen layers."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(module))
    shared = [t.detach().cpu().numpy() for n, t in module.state_dict().items() if n not in trained]
    return digest(np.frombuffer(text.encode(), np.uint8), *shared)


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
