"""Queues of tensors between neighbouring processes: sends under way and receives posted ahead.

A receive posted early lets the transfer run while the block computes. It is posted only for a batch that is certain to
come, so that a run can stop at any time. Activations and error gradients have separate process groups, because on NCCL
a pending receive blocks the sends of its communicator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from undrift.core.errors import BadSetting

Group = Any  # torch's ProcessGroup, or None where distributed is not built in
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
LONGEST = 8  # dimensions of a shape
TAGS = 1 << 20  # a batch's tag is its number modulo this; NCCL ignores tags and relies on order
SHAPE_TAG, WHOLE_TAG = TAGS, TAGS + 1

MessageForm = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a message


class LostNeighbour(Exception):
    """A message could not be delivered: the other process has ended or given up."""


@contextlib.contextmanager
def translate_errors(failures: type[Exception] = RuntimeError) -> Iterator[None]:
    """Turn errors of torch.distributed into LostNeighbour."""
    try:
        yield
    except failures as error:
        raise LostNeighbour(f"{type(error).__name__}: {error}".partition("\n")[0]) from None


class Outbox:
    """Sends to one neighbour, at most `cap` under way."""

    def __init__(self, to: int, group: Group, cap: int) -> None:
        self.to, self.group, self.cap = to, group, cap
        self.under_way: list[tuple[Any, Tensor]] = []
        self.header: tuple[Any, Tensor] | None = None  # under way
        self.form: MessageForm | None = None
        self.rows: int | None = None  # samples in the batch with this form
        self.bytes = 0

    def send(self, n: int, tensor: Tensor, announce: bool = False, rows: int | None = None) -> None:
        """Send the tensor of a batch with so many samples; with `announce` its shape goes before the first one."""
        tensor = tensor.contiguous()
        form = tuple(tensor.shape), tensor.dtype
        if announce and self.form is None:
            self.form, self.rows = form, rows
            header = header_of(tensor)
            with (
                translate_errors()
            ):  # without waiting: the neighbour may wait for this process at the end of a timestamp
                self.header = dist.isend(header, self.to, self.group, SHAPE_TAG), header
        if announce and self.form is not None and resize(self.form, self.rows, rows) != form:
            raise BadSetting(
                f"all batches must have the same shape but for their number of samples, and what blocks hand on rows for each "
                f"sample; but {form[0]} came after {self.form[0]}"
            )
        with translate_errors():
            self.under_way.append((dist.isend(tensor, self.to, self.group, n % TAGS), tensor))
            self.bytes += tensor.nbytes
            while len(self.under_way) > self.cap:
                self.under_way.pop(0)[0].wait()

    def finish(self) -> None:
        """Wait until all messages are delivered."""
        with translate_errors():
            if self.header is not None:
                self.header[0].wait()
            self.header = None
            while self.under_way:
                self.under_way.pop(0)[0].wait()

    def cut(self) -> None:
        """Drop everything that keeps the connection open."""
        self.under_way, self.header, self.group = [], None, None


class Inbox:
    """Receives from one neighbour, at most `depth` posted ahead."""

    def __init__(self, source: int, group: Group, depth: int, device: torch.device) -> None:
        self.source, self.group, self.depth, self.device = source, group, depth, device
        self.posted: dict[int, tuple[Any, Tensor]] = {}
        self.received: dict[int, Tensor] = {}  # and not yet taken
        self.next = 0  # the first batch for which no receive is posted
        self.form: MessageForm | None = None
        self.rows: int | None = None  # samples in the batch with this form

    def post(self, last: int, form: Callable[[int], MessageForm], depth: int | None = None) -> None:
        """Post receives for batches up to `last`, which are certain to come."""
        while self.next <= last and len(self.posted) < (self.depth if depth is None else depth):
            shape, dtype = form(self.next)
            buffer = torch.empty(shape, dtype=dtype, device=self.device)
            with translate_errors():
                self.posted[self.next] = dist.irecv(buffer, self.source, self.group, self.next % TAGS), buffer
            self.next += 1

    def take(self, n: int) -> Tensor:
        """Wait for batch n's tensor."""
        if n in self.received:
            return self.received.pop(n)
        buffer = self.posted[n][1]
        with translate_errors():
            self.posted.pop(n)[0].wait()  # no variable: an exception would keep it alive
        return buffer

    def drain(self, last: int, form: Callable[[int], MessageForm]) -> None:
        """Receive all batches up to `last`, which the neighbour has sent already."""
        self.post(last, form, depth=1 << 30)
        for n in list(self.posted):
            if n <= last:
                self.received[n] = self.take(n)

    def cut(self) -> None:
        """Drop everything that keeps the connection open."""
        self.posted, self.group = {}, None

    def announced_form(self, n: int, rows: Mapping[int, int]) -> MessageForm:
        """The form of the neighbour's message for batch n; that of the first one is received before it."""
        if self.form is None:
            self.form, self.rows = receive_form(self.source, self.group, self.device), rows.get(n)
        return resize(self.form, self.rows, rows.get(n))


def resize(form: MessageForm, rows: int | None, wanted: int | None) -> MessageForm:
    """The form for a batch of other size; what is not known is the same.

    >>> resize(((8, 3), torch.float32), 4, 1)
    ((2, 3), torch.float32)
    """
    (first, *rest), dtype = form
    if rows is None or wanted is None or rows == wanted or first % rows:
        return form
    return (first // rows * wanted, *rest), dtype


def header_of(tensor: Tensor) -> Tensor:
    if tensor.dim() > LONGEST or tensor.dtype not in DTYPES:
        raise BadSetting(f"a block cannot send {tensor.dtype} of {tensor.dim()} dimensions")
    header = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *[0] * (LONGEST - tensor.dim())]
    return torch.tensor(header, device=tensor.device)


def send_form(tensor: Tensor, to: int, group: Group) -> None:
    with translate_errors():
        dist.send(header_of(tensor), to, group, SHAPE_TAG)


def receive_form(source: int, group: Group, device: torch.device) -> MessageForm:
    header = torch.zeros(2 + LONGEST, dtype=torch.int64, device=device)
    with translate_errors():
        dist.recv(header, source, group, SHAPE_TAG)
    dtype, dimensions, *shape = header.tolist()
    return tuple(shape[:dimensions]), DTYPES[dtype]


def send_whole(tensor: Tensor, to: int, group: Group) -> None:
    """Send a tensor of any shape, outside the schedule."""
    send_form(tensor, to, group)
    with translate_errors():
        dist.send(tensor.contiguous(), to, group, WHOLE_TAG)


def receive_whole(source: int, group: Group, device: torch.device) -> Tensor:
    shape, dtype = receive_form(source, group, device)
    buffer = torch.empty(shape, dtype=dtype, device=device)
    with translate_errors():
        dist.recv(buffer, source, group, WHOLE_TAG)
    return buffer
