"""The parameters of an optimizer as one vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from undrift.core.errors import BadSetting


@dataclass
class Flat:
    """The parameters as one vector, group after group, and a scratch vector of that length."""

    params: list[nn.Parameter]
    scratch: Tensor

    @classmethod
    def from_parameters(cls, params: list[nn.Parameter]) -> Flat:
        devices = {p.device for p in params}
        if len(devices) > 1:
            raise BadSetting(f"move the parameters to one device, they are on {', '.join(map(str, devices))}")
        if any(p.is_complex() for p in params):
            raise BadSetting("a parameter is complex; use its real and imaginary parts instead (torch.view_as_real)")
        wide = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
        return cls(params, torch.zeros(sum(p.numel() for p in params), dtype=wide, device=params[0].device))

    @property
    def direct(self) -> bool:
        """Whether stretches can be computed inside the parameters; on a GPU that would be many small kernels."""
        like = self.scratch.dtype
        return self.scratch.device.type == "cpu" and all(p.is_contiguous() and p.dtype == like for p in self.params)

    def stretches(self) -> Iterator[tuple[slice, Tensor]]:
        """The parameters and their places in the vectors."""
        begin = 0
        for p in self.params:
            yield slice(begin, begin + p.numel()), p.detach()
            begin += p.numel()

    def parts(self, vector: Tensor) -> list[Tensor]:
        """The vector's stretches in the shapes of the parameters."""
        pieces = vector.split([p.numel() for p in self.params])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.params, strict=True)]

    def read(self, vector: Tensor) -> None:
        torch._foreach_copy_(self.parts(vector), [p.detach() for p in self.params])

    def write(self, vector: Tensor) -> None:
        torch._foreach_copy_([p.detach() for p in self.params], self.parts(vector))

    def gradients(self, decays: list[float]) -> Tensor:
        """The gradients plus weight decay; zero for a parameter without a gradient."""
        triples = zip(self.parts(self.scratch), self.params, decays, strict=True)
        rows = [(part, p.grad, p.detach(), decay) for part, p, decay in triples if p.grad is not None]
        if any(grad.is_sparse for _, grad, _, _ in rows):
            raise BadSetting("a gradient is sparse; use layers with sparse=False")
        if len(rows) < len(self.params):
            self.scratch.zero_()
        if rows:
            torch._foreach_copy_([row[0] for row in rows], [row[1] for row in rows])
        for decay in {row[3] for row in rows} - {0.0}:
            same = [row for row in rows if row[3] == decay]
            torch._foreach_add_([row[0] for row in same], [row[2] for row in same], alpha=decay)
        return self.scratch
