"""The states that a client keeps between rounds, on its disk.

A state belongs to a run (its token), a client (its name) and a round. The states before and after the client's last round
are kept: if that round did not count, because the answer was late or the server repeats the round, the client begins from
the state before it. The final state includes the server's last reply and is a file of its own: a run that is prolonged
begins from the state without the reply, and gets the reply again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from undrift.core.files import make_private, sync
from undrift.deploy.messages import Refused
from undrift.deploy.settings import NAME

CHECK = "sha256"  # the key of the tensors' checksum in a file's metadata


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of tensors that lie on the CPU, in the order of their names."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode())
        whole.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


class Store:
    """The states of one client in one run."""

    def __init__(self, root: Path, run: str, client: str) -> None:
        for what, name in (("run", run), ("client", client)):
            if not NAME.fullmatch(name):
                raise Refused(f"{name!r} cannot be the name of a {what}: letters, digits, '.', '_' and '-', at most 64")
        self.run, self.client, self.folder = run, client, root / run / client

    def file(self, round: int, stage: str = "after") -> Path:
        """The file of the state after a round; `final` for the state with the last reply."""
        return self.folder / f"{stage}-{round:06d}.safetensors"

    def read(self, round: int) -> dict[str, Tensor] | None:
        """The state after that round, if there is one."""
        file = self.file(round)
        if not file.exists():
            return None
        try:
            with safe_open(file, framework="pt") as opened:
                told = opened.metadata() or {}
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise Refused(f"the state in {file} is damaged: {error}") from error
        kept = told.pop(CHECK, "")  # states of undrift 0.1 have none
        if told != self.owner(round):
            raise Refused(f"the state in {file} belongs to {told}, not to {self.owner(round)}")
        if kept not in ("", checksum(tensors)):
            raise Refused(f"the state in {file} is damaged: its checksum is wrong")
        return tensors

    def write(self, before: int, round: int, tensors: Mapping[str, Tensor], stage: str = "after") -> None:
        """Write the state after a round, and remove older ones of its stage, except that of the round `before`."""
        file = self.file(round, stage)
        make_private(self.folder)
        temporary = self.folder / f".new-{os.getpid()}"
        plain = {name: t.cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
        save_file(plain, temporary, self.owner(round) | {CHECK: checksum(plain)})
        temporary.chmod(0o600)
        sync(temporary)
        os.replace(temporary, file)
        sync(self.folder)
        for old in self.folder.glob(f"{stage}-*.safetensors"):
            if old < file and old != self.file(before, stage):  # if there is a newer one, this answer was late
                old.unlink(missing_ok=True)

    def owner(self, round: int) -> dict[str, str]:
        return {"run": self.run, "client": self.client, "round": str(round)}
