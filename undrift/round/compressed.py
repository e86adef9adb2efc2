"""Compressed uploads: what a client drops from its upload it remembers, and adds to its next one (error feedback).

    p_i = up_i + e_i;   C(p_i) goes up;   e_i <- p_i - C(p_i)

for every vector of the upload. The server sees C(p_i) in place of up_i, which is right for methods that need only the sum
of the uploads: what is dropped now arrives later.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.base import Algorithm, looks_at_single_uploads
from undrift.compress import LargestEntries, SharedPlaces, make_compressor
from undrift.core.errors import BadSetting
from undrift.core.layout import Layout
from undrift.core.trees import map_leaves
from undrift.oracle.oracle import GradientOracle, LocalData

LARGEST = torch.finfo(torch.float16).max


class Remembering(NamedTuple):
    """A client's state between rounds."""

    own: Any  # the method's
    error: Any  # e_i, a vector for each vector of the upload


class Sent(NamedTuple):
    """What goes up, as it travels."""

    values: Any  # the upload, with the kept entries [..., b] of each vector
    places: Any  # where they belong, int32 [..., b] for Top-K; [..., 0] where both sides draw the places from the seed


class Uplink:
    """How the vectors [..., P] of an upload are compressed in a round: rbgs:R, randk:R, topk:R or fp16."""

    def __init__(self, spec: str, seed: int, layout: Layout) -> None:
        name, _, ratio = spec.partition(":")
        self.size, self.entries, self.half = (
            layout.size,
            layout.entries,
            name == "fp16",
        )  # what pads a vector is not sent
        self.compressor = None if self.half else make_compressor(name, "flat", float(ratio), seed, [layout.entries])

    def places(self, p: Tensor) -> Tensor:
        """What has to be said about the places of the kept entries."""
        if isinstance(self.compressor, LargestEntries) and p.shape[-1] == self.size:
            return self.compressor.places(p[..., : self.entries]).int()
        return torch.zeros(*p.shape[:-1], 0, dtype=torch.int32, device=p.device)

    def shared(self, t: int, device: torch.device) -> Tensor:
        """[b] the places that both sides draw."""
        assert isinstance(self.compressor, SharedPlaces)
        everything = torch.arange(self.entries, device=device)
        return torch.cat([everything[place] for place in self.compressor.places(t, device)])

    def taken(self, p: Tensor, places: Tensor, t: int) -> Tensor:
        """C(p)'s entries as they travel; what is not a vector of the model's length travels whole."""
        if p.shape[-1] != self.size:
            return p
        if self.half:
            sent = p[..., : self.entries]
            return torch.where(sent.isfinite(), sent.clamp(-LARGEST, LARGEST), sent).half()  # the error keeps the rest
        return p.gather(-1, places.long()) if places.numel() else p[..., self.shared(t, p.device)]

    def put(self, values: Tensor, places: Tensor, t: int, like: Tensor) -> Tensor:
        """C(p) [..., P] from what travelled, as long and of the dtype as `like`."""
        if like.shape[-1] != self.size:
            return values
        if self.half:
            return F.pad(values.to(like.dtype), (0, self.size - self.entries))
        where = places.long() if places.numel() else self.shared(t, values.device).expand(values.shape)
        return values.new_zeros(*values.shape[:-1], self.size).scatter(-1, where, values)


class Compressed:
    """An algorithm whose uploads of round t are compressed; everything else is the algorithm's own."""

    def __init__(self, alg: Algorithm, uplink: Uplink, t: int) -> None:
        self.alg, self.uplink, self.t = alg, uplink, t

    def __getattr__(self, name: str) -> Any:
        return getattr(self.alg, name)

    def client_init(self, down: Any, ids: Tensor, buffers: Tensor) -> Remembering:
        own = self.alg.client_init(down, ids, buffers)
        up, _ = self.alg.local_end(down, own, self.alg.local_start(down, own))  # only to know what it will be like
        return Remembering(own, map_leaves(torch.zeros_like, up))

    def local_start(self, down: Any, client: Remembering) -> Any:
        return self.alg.local_start(down, client.own)

    def prepare(self, down: Any, client: Remembering, work: Any, local: LocalData) -> Any:
        return self.alg.prepare(down, client.own, work, local)

    def local_step(self, down: Any, client: Remembering, work: Any, oracle: GradientOracle) -> Any:
        return self.alg.local_step(down, client.own, work, oracle)

    def local_end(self, down: Any, client: Remembering, work: Any) -> tuple[Sent, Remembering]:
        up, own = self.alg.local_end(down, client.own, work)
        p = map_leaves(torch.add, up, client.error)  # p_i = up_i + e_i
        places = map_leaves(self.uplink.places, p)
        sent = Sent(map_leaves(lambda v, at: self.uplink.taken(v, at, self.t), p, places), places)
        return sent, Remembering(own, map_leaves(torch.sub, p, self.received(sent, p)))  # e_i <- p_i - C(p_i)

    def received(self, sent: Sent, like: Any) -> Any:
        """The upload as the server sees it."""
        return map_leaves(lambda v, at, p: self.uplink.put(v, at, self.t, p), *sent, like)


def check_summed(alg: Algorithm) -> None:
    """Refuse a method whose server looks at single uploads: in each of them most is missing."""
    if looks_at_single_uploads(alg):
        raise BadSetting(
            f"{type(alg).__name__} looks at each client's upload by itself, and in a compressed one most entries are "
            "missing until later; compress goes with methods that need only the uploads' sum, such as fedavg or scaffold"
        )
