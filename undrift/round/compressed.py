"""Compressed uploads: what a client drops from its upload it remembers, and adds to its next one (error feedback).

    p_i = up_i + e_i;   C(p_i) goes up;   e_i <- p_i - C(p_i)

for every vector of the upload. The server sees C(p_i) in place of up_i, which is right for methods that need only the sum
of the uploads: what is dropped now arrives later. In rounds in which nothing goes up, e_i waits.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.algorithms.checks import looks_at_single_uploads
from undrift.algorithms.wrapper import KeepMoments, Wrapper, at_rate
from undrift.compress import LargestEntries, SharedPlaces, make_compressor
from undrift.core.errors import BadSetting
from undrift.core.layout import MODEL
from undrift.core.trees import Nothing, State, leaves, map_leaves, map_tagged, named_leaves
from undrift.oracle.net import Net
from undrift.round.shapes import Forms

LARGEST = torch.finfo(torch.float16).max
WHOLE = {"int8": 127, "int4": 7}  # the largest whole number that an entry is sent as
BLOCK = 256  # entries that have a scale in common, as whole numbers


class Uplink:
    """How the model's vectors [..., P] in an upload are compressed in a round: rbgs:R, randk:R, topk:R, fp16, int8 or int4."""

    def __init__(self, spec: str, seed: int, net: Net, form: State) -> None:
        name, _, ratio = spec.partition(":")
        self.form = form  # an upload, without memory
        self.layout, self.dtype = net.layout, net.dtype
        self.half, self.most = name == "fp16", WHOLE.get(name, 0)
        self.paired = name == "int4"  # two entries in a byte
        entries = net.layout.entries  # what pads a vector is not sent
        self.compressor = (
            None if self.half or self.most else make_compressor(name, "flat", float(ratio), seed, [entries])
        )

    @property
    def linear(self) -> bool:
        """Whether what travels can be added up as it is."""
        return isinstance(self.compressor, SharedPlaces)

    def places(self, p: Tensor, tag: str) -> Tensor:
        """What has to be said about the places of the kept entries."""
        if not tag and p.shape[-1] == self.layout.size:
            raise BadSetting("an upload has a vector as long as the model that is not annotated `Vec`; annotate it")
        if isinstance(self.compressor, LargestEntries) and tag == MODEL and p.shape[-1]:
            return self.compressor.places(p[..., : self.layout.entries]).int()
        return torch.zeros(*p.shape[:-1], 0, dtype=torch.int32, device=p.device)

    def scales(self, p: Tensor, tag: str) -> Tensor:
        """What 1 stands for in each block of BLOCK entries, where they travel as whole numbers."""
        if not self.most or tag != MODEL or not p.shape[-1]:
            return torch.zeros(*p.shape[:-1], 0, dtype=torch.float32, device=p.device)
        return (self.blocks(p[..., : self.layout.entries]).abs().amax(-1) / self.most).float()

    def blocks(self, p: Tensor) -> Tensor:
        """Entries [..., n] as blocks [..., n / BLOCK, BLOCK]; the last one is filled with zeros."""
        blocks: Tensor = F.pad(p, (0, -p.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        return blocks

    def check(self, up: State) -> None:
        """Raise BadSetting unless the places in an upload rise and lie in the vector: a client may send any."""
        for places in leaves(up.places):
            if places.numel() and not (
                bool((places[..., 1:] > places[..., :-1]).all())
                and int(places.min()) >= 0
                and int(places.max()) < self.layout.entries
            ):
                raise BadSetting(f"the places of its entries do not rise from 0 to {self.layout.entries - 1}")

    def common_places(self, t: int, device: torch.device) -> Tensor:
        """[b] the places that both sides draw."""
        assert isinstance(self.compressor, SharedPlaces)
        everything = torch.arange(self.layout.entries, device=device)
        return torch.cat([everything[place] for place in self.compressor.places(t, device)])

    def pack(self, p: Tensor, tag: str, places: Tensor, scales: Tensor, t: int) -> Tensor:
        """C(p)'s entries as they travel; what is no vector of the model, or an absent one [..., 0], travels as it is."""
        if tag != MODEL or not p.shape[-1]:
            return p
        if self.half:
            sent = p[..., : self.layout.entries]
            return torch.where(sent.isfinite(), sent.clamp(-LARGEST, LARGEST), sent).half()  # the error keeps the rest
        if self.most:
            steps = self.blocks(p[..., : self.layout.entries]) / scales.to(p.dtype).unsqueeze(-1)
            whole = steps.nan_to_num(0.0).round().clamp(-self.most, self.most)  # a block of zeros has the scale 0
            entries = whole.flatten(-2)[..., : self.layout.entries]
            return pair(entries) if self.paired else entries.to(torch.int8)
        return p.take_along_dim(places.long(), -1) if places.numel() else p[..., self.common_places(t, p.device)]

    def unpack(self, values: Tensor, tag: str, places: Tensor, scales: Tensor, t: int) -> Tensor:
        """C(p) [..., P] from what travelled."""
        if tag != MODEL or not values.shape[-1]:
            return values
        if self.half:
            return F.pad(values.to(self.dtype), (0, self.layout.padding))
        if self.most:
            whole = unpair(values, self.layout.entries) if self.paired else values
            steps = self.blocks(whole.to(self.dtype)) * scales.to(self.dtype).unsqueeze(-1)
            return F.pad(steps.flatten(-2)[..., : self.layout.entries], (0, self.layout.padding))
        where = places.long() if places.numel() else self.common_places(t, values.device).expand(values.shape)
        return values.new_zeros(*values.shape[:-1], self.layout.size).scatter(-1, where, values)


class Compressed(Wrapper):
    """An algorithm whose uploads of round t are compressed."""

    extends = frozenset({"client", "up"})

    class Client(NamedTuple):
        inner: State
        error: State  # e_i, a vector for each vector of the upload

    class Up(NamedTuple):
        """What goes up, as it travels."""

        values: State  # the upload, with the kept entries [..., b] of each vector
        places: State  # where they belong, int32 [..., b] for Top-K; [..., 0] where both sides draw the places
        scales: State  # what 1 stands for in each block, float32, for int8 and int4; [..., 0] elsewhere

    def __init__(self, inner: Algorithm, uplink: Uplink, t: int) -> None:
        super().__init__(inner)
        object.__setattr__(self, "uplink", uplink)
        object.__setattr__(self, "t", t)

    def around(self, inner: Algorithm) -> Compressed:
        return Compressed(inner, self.uplink, self.t)

    def open(self, name: str, state: State) -> State:
        """The upload as the server sees it, and the inner method's part of a client's state."""
        if name == "up":
            return map_tagged(
                lambda v, tag, at, of: self.uplink.unpack(v, tag, at, of, self.t),
                state.values, state.places, state.scales,
            )  # fmt: skip
        return super().open(name, state)

    def client_init(self, down: State, ids: Tensor, buffers: Tensor) -> Client:
        error = map_leaves(lambda t: torch.zeros_like(t, device=down.x.device), self.uplink.form)
        return self.Client(self.inner.client_init(down, ids, buffers), error)

    def local_end(self, down: State, client: Client, work: State) -> tuple[Up, Client]:
        up, inner = self.inner.local_end(down, client.inner, work)
        if not leaves(up):
            return self.Up(up, up, up), self.Client(inner, client.error)
        p = map_leaves(torch.add, up, client.error)  # p_i = up_i + e_i
        places, scales = map_tagged(self.uplink.places, p), map_tagged(self.uplink.scales, p)
        values = map_tagged(lambda v, tag, at, of: self.uplink.pack(v, tag, at, of, self.t), p, places, scales)
        sent = self.Up(values, places, scales)
        return sent, self.Client(inner, map_leaves(torch.sub, p, self.open("up", sent)))  # e_i <- p_i - C(p_i)


def pair(whole: Tensor) -> Tensor:
    """Whole numbers from -7 to 7 [..., n], two in a byte [..., (n + 1) / 2].

    >>> pair(torch.tensor([-7.0, 7.0, 1.0])).tolist()
    [241, 137]
    """
    low, high = (F.pad(whole, (0, whole.shape[-1] % 2)) + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    joined: Tensor = low | high << 4
    return joined


def unpair(pairs: Tensor, entries: int) -> Tensor:
    """The whole numbers that `pair` has put together.

    >>> unpair(torch.tensor([241, 137], dtype=torch.uint8), 3).tolist()
    [-7, 7, 1]
    """
    whole = torch.stack([pairs & 15, pairs >> 4], -1).to(torch.int8) - 8
    return whole.flatten(-2)[..., :entries]


def wrap(alg: Algorithm, factor: float = 1.0, uplink: Uplink | None = None, t: int = 0) -> Algorithm:
    """The algorithm of round t with what the settings put around it; its rate is multiplied by `factor`."""
    alg = alg if factor == 1.0 else at_rate(alg, alg.lr * factor)
    alg = KeepMoments(alg) if alg.keep_moments else alg
    return alg if uplink is None else Compressed(alg, uplink, t)


def upload_form(alg: Algorithm, net: Net, clients: int) -> State:
    """What an upload is like, in whichever phase there is one; refuse uploads that change between phases."""
    each = [Forms.of(alg.at(t), net, clients).answers.up for t in (0, sys.maxsize)]
    first, *others = [up for up in each if leaves(up)] or [Nothing()]
    for other in others:
        if [(name, t.shape) for name, t in named_leaves("", other)] != [
            (n, t.shape) for n, t in named_leaves("", first)
        ]:
            raise BadSetting(f"{type(alg).__name__} changes what it sends in its second phase; leave compress out")
    return first


def check_compressed(alg: Algorithm) -> None:
    """Refuse a method whose uploads are small already, or whose server looks at single ones: in each most is missing."""
    if not alg.whole_uploads:
        raise BadSetting(f"{type(alg).__name__} sends only a part of the model's entries by itself; leave compress out")
    if looks_at_single_uploads(alg):
        raise BadSetting(
            f"{type(alg).__name__} looks at each client's upload by itself, and in a compressed one most entries are "
            "missing until later; compress goes with methods that need only the uploads' sum, such as fedavg or scaffold"
        )
