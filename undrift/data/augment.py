"""Crop, flip, recolour and normalise images, in one batch for all samples of all clients."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.core.streams import Purpose, below, fold, stream, uniform, words


@functools.cache
def channels(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One number per channel, for images [n, C, H, W]; cached because a CUDA graph cannot copy from the host."""
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)


@functools.cache
def lookup(transform: Transform, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[count, 256] the normalised value of each byte in each of `count` channels."""
    every = torch.arange(256, dtype=torch.uint8, device=device).expand(1, count, 1, 256)
    return transform(every, dtype).view(count, 256)


@dataclass(frozen=True)
class Transform:
    """Makes inputs of uint8 images [n, C, H, W]; floats [n, ...] only change their dtype."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    crop: int = 0  # random crop after zero-padding by this many pixels
    flip: bool = False
    colour: float = 0.0  # each client's brightness and saturation factors lie in [1 - colour, 1 + colour]
    seed: int = 0

    @property
    def draws(self) -> bool:
        """Whether samples need random numbers."""
        return bool(self.crop) or self.flip

    def __call__(
        self, raw: Tensor, dtype: torch.dtype, keys: Tensor | None = None, clients: Tensor | None = None
    ) -> Tensor:
        """The inputs for raw samples [n, ...]. In training, `keys` [n] are random keys and `clients` [n] the owners."""
        if raw.dtype != torch.uint8 or raw.dim() != 4:
            return raw.to(dtype) if raw.is_floating_point() else raw.long()  # token ids, for instance
        if keys is not None and self.draws:
            raw = self.crop_and_flip(raw, keys)
        x = raw.to(dtype).div_(255)
        if clients is not None and self.colour:
            x = self.recolour(x, clients)
        if self.mean:
            x = x.sub_(channels(self.mean, dtype, x.device)).div_(channels(self.std, dtype, x.device))
        return x

    def masks(self, masks: Tensor, keys: Tensor) -> Tensor:
        """Masks [n, H, W], cropped and flipped like the pictures with the same keys."""
        return self.crop_and_flip(masks.unsqueeze(1), keys).squeeze(1) if self.draws else masks

    def crop_and_flip(self, raw: Tensor, keys: Tensor) -> Tensor:
        n, channels, height, width = raw.shape
        word = words(keys, 3)
        dy, dx = (below(word[:, j : j + 1], 2 * self.crop + 1) for j in (0, 1))
        rows = dy + torch.arange(height, device=raw.device)
        columns = torch.arange(width, device=raw.device).expand(n, width)
        if self.flip:
            columns = torch.where(below(word[:, 2:], 2) == 1, columns.flip(-1), columns)
        padded = F.pad(raw, (self.crop,) * 4) if self.crop else raw
        n_, c_ = torch.arange(n, device=raw.device), torch.arange(channels, device=raw.device)
        return padded[
            n_[:, None, None, None], c_[None, :, None, None], rows[:, None, :, None], (dx + columns)[:, None, None, :]
        ]

    def recolour(self, x: Tensor, clients: Tensor) -> Tensor:
        """Change brightness (blend with black) and saturation (blend with grey), by one factor of each per client."""
        draws = uniform(words(fold(stream(self.seed, Purpose.COLOUR), clients), 2))
        factor = (1 + self.colour * (2 * draws - 1)).to(x.dtype).view(-1, 2, 1, 1, 1)
        x = (x * factor[:, 0]).clamp(0, 1)
        if x.shape[1] == 3:
            grey = (x * channels((0.299, 0.587, 0.114), x.dtype, x.device)).sum(1, keepdim=True)
            x = torch.lerp(grey.expand_as(x), x, factor[:, 1].expand_as(x)).clamp(0, 1)
        return x
