"""What the server makes of clients' uploads where a method needs only their sum.

They are added up as they arrive, so that none has to be kept. With masks (`masks.py`) the server sees the sum alone: the
clients' part is in `secure.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.algorithms.checks import looks_at_single_uploads
from undrift.core.errors import BadSetting
from undrift.core.trees import Nothing, State, leaves, map_leaves
from undrift.deploy import masks
from undrift.deploy.client import MEASURE, TRAIN, Measured, Reply, Request
from undrift.deploy.masks import KEY, LEAST, MARK, SEALED, SEED, mark_of, threshold
from undrift.deploy.messages import Encoded, Letter, Refused, pack, unpack
from undrift.deploy.secure import (
    KEYS,
    REQUEST,
    SHARES,
    UNMASK,
    Left,
    Masked,
    Opened,
    Peers,
    Public,
    Shares,
    Task,
    context_of,
    empty,
    hash_settings,
    octets,
    task_context,
)  # fmt: skip
from undrift.oracle.net import Net
from undrift.round.aggregate import MEAN
from undrift.round.clients import Answers
from undrift.round.private import PART
from undrift.round.shapes import Forms
from undrift.round.who import Who
from undrift.simulate.settings import Settings
from undrift.simulate.work import LocalWork

if TYPE_CHECKING:
    from undrift.deploy.remote import Remote


class Total:
    """The sum of clients' uploads, to which each is added as it arrives."""

    def __init__(self) -> None:
        self.count, self.sum = 0, Nothing()

    def add(self, up: State) -> None:
        """Add an upload, in float64: the order in which they arrive must not be seen."""
        self.count += 1
        self.sum = map_leaves(add_in_parts, self.sum, up) if self.count > 1 else map_leaves(copy, up)

    def rows(self, form: State, x: Tensor, clients: int) -> State:
        """Their mean, for each of so many clients: rows [S, ...] that are all the same memory."""
        if not self.count:
            return map_leaves(lambda v: v.expand(clients, *v.shape), fill(form, x))
        return map_leaves(lambda v, f: v.div_(self.count).to(f.dtype).expand(clients, *f.shape), self.sum, form)


def copy(v: Tensor) -> Tensor:
    return v.to(torch.float64, copy=True, memory_format=torch.contiguous_format)


def add_in_parts(total: Tensor, v: Tensor) -> Tensor:
    """Add v to a total of another type in place; PyTorch would convert all of v first, as large as the total."""
    for into, part in zip(total.view(-1).split(PART), v.flatten().split(PART), strict=True):
        into.add_(part)
    return total


def fill(form: State, x: Tensor, value: float = torch.nan) -> State:
    """A state of this form on the device of x, with one value everywhere, or 0 where numbers are whole."""

    def full(v: Tensor) -> Tensor:
        return torch.full(v.shape, value if v.is_floating_point() else 0, dtype=v.dtype, device=x.device)

    return map_leaves(full, form)


class SecureLetters:
    """Asks the clients of one round by letter, and learns the sum of their answers and nothing else of them."""

    def __init__(self, remote: Remote, work: LocalWork) -> None:
        self.remote, self.work = remote, work

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Tensor:
        form = Measured(torch.empty_like(down.x, device="meta"))
        mean, there, _ = self.add_up(MEASURE, Request(down, buffers), form, 0, down.x)
        sent: Tensor = mean.sent
        rows: Tensor = torch.where(there.unsqueeze(-1), sent, torch.nan)
        return rows

    def train(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Answers:
        form, clients, x = Forms.of(alg, self.work.net, self.work.data.clients).answers, len(who.ids), down.x
        form = form._replace(client=Nothing())
        mean, there, (loss, *facts) = self.add_up(
            TRAIN, Request(down, buffers), Reply(form.up, form.buffers), 1 + len(form.facts), x
        )

        def each(number: float) -> Tensor:
            number_of_each: Tensor = x.new_full((clients, 1), number)
            return number_of_each

        numbers = type(form.facts)(*map(each, facts))
        none = x.new_full((clients, 1), torch.nan)
        return Answers(mean.up, Nothing(), mean.buffers, none, each(loss), numbers, there)

    def add_up(
        self, exchange: str, request: Request, form: State, more: int, x: Tensor
    ) -> tuple[Any, Tensor, list[float]]:
        """The mean of what clients send in an exchange, as rows [S, ...]; whose it is [S]; and means of further numbers."""
        ids, net = self.work.ids.tolist(), self.work.net
        sizes = [*(leaf.numel() for leaf in leaves(net.without_padding(form))), more, min(more, 1)]
        found = self.find_sum(exchange, request, sum(sizes))
        if found is None:
            rows = map_leaves(lambda v: v.expand(len(ids), *v.shape), fill(form, x))
            return rows, torch.zeros(len(ids), dtype=torch.bool, device=x.device), [math.nan] * more
        mean, left = torch.from_numpy(found[0] / len(found[1])), found[1]
        *parts, numbers, cut = mean.split(sizes)
        part = iter(parts)

        def row(whole: Tensor) -> Tensor:
            flat = next(part).to(whole.dtype)
            shape = (*whole.shape[:-1], flat.numel() // max(1, math.prod(whole.shape[:-1])))
            vector = F.pad(flat.view(shape), (0, whole.shape[-1] - shape[-1])).to(x.device)
            return vector.expand(len(ids), *whole.shape)

        there = torch.tensor([id in left for id in ids], device=x.device)
        if cut.any():
            self.remote.say(
                f"round {self.work.round + 1}: the loss, or another number for the record, is larger than "
                f"secure_bound={self.remote.secure_bound:g} at some client, so that the record has none"
            )
        return map_leaves(row, form), there, numbers.tolist() if not cut.any() else [math.nan] * more

    def find_sum(self, exchange: str, request: Request, entries: int) -> tuple[NDArray[np.float64], set[int]] | None:
        """The sum of clients' numbers, and whose it is; None if too few clients stay to the end."""
        remote, net = self.remote, self.work.net
        keys = self.step(exchange + KEYS, {id: {} for id in self.work.ids.tolist()}, 0, self.open_keys)
        public = {id: bytes(answer.keys.tolist()) for id, answer in keys.items()}
        place, n = {id: at for at, id in enumerate(public)}, len(public)
        if not self.enough(n, LEAST, "keys"):
            return None
        least, context = threshold(n), context_of(remote.letter(0, self.work.round, exchange, {}), exchange)
        peers = pack(Peers(torch.tensor([*public]), octets(*public.values())), net)
        form = Shares(empty(n, SEALED), empty(MARK))
        shares = self.step(exchange + SHARES, dict.fromkeys(public, peers), n, lambda a: self.open(a, form))
        if not self.enough(m := len(shares), least, "shares"):
            return None
        packed = {f"{REQUEST}{name}": array for name, array in pack(request, net).items()}
        tasks = {}
        for id in shares:
            theirs = torch.stack([share.sealed[place[id]] for share in shares.values()])
            tasks[id] = pack(Task(torch.tensor([*shares]), theirs, Nothing()), net) | packed
        total = np.zeros(entries, np.uint32)

        def add(letter: Letter) -> bool:
            sent = self.open(letter, Masked(empty(entries, dtype=torch.int32)))
            np.add(total, sent.numbers.numpy().view(np.uint32), out=total)
            return True

        left = self.step(exchange, tasks, m, add)
        if not self.enough(k := len(left), least, "numbers"):
            return None
        asked = dict.fromkeys(left, pack(Left(torch.tensor([*left])), net))
        opened = self.step(
            exchange + UNMASK, asked, k, lambda a: self.open(a, Opened(empty(k, SEED), empty(m - k, KEY)))
        )
        if not self.enough(len(opened), least, "opened shares"):
            return None
        seeds, gone = {}, {}
        for at, id in enumerate(left):
            seeds[id] = masks.join({place[other]: bytes(o.seeds[at].tolist()) for other, o in opened.items()}, least)
        for at, id in enumerate(other for other in shares if other not in left):
            gone[id] = masks.join({place[other]: bytes(o.keys[at].tolist()) for other, o in opened.items()}, least)
        wrong = [id for id, seed in seeds.items() if mark_of(seed, context) != bytes(shares[id].mark.tolist())]
        wrong += [id for id, key in gone.items() if masks.public_key(key) != public[id][KEY:]]
        if wrong:
            names = ", ".join(remote.names[id] for id in wrong)
            remote.say(
                f"round {self.work.round + 1}: the shares of {names} do not fit together; the model stays as it is"
            )
            return None
        masks.unmask(
            total, [*seeds.values()], {place[id]: key for id, key in gone.items()},
            {place[id]: public[id] for id in left}, task_context(context, hash_settings(remote.settings), packed),
        )  # fmt: skip
        return masks.to_floats(total, remote.secure_bound, n), {*left}

    def open_keys(self, letter: Letter) -> Public:
        """A client's keys; its masks come off only where it has the run's settings."""
        found: Public = self.open(letter, Public(empty(2 * KEY), empty(MARK)))
        if bytes(found.settings.tolist()) != hash_settings(self.remote.settings):
            raise Refused("it was given other settings of the run, so that its masks would not come off")
        return found

    def open(self, letter: Letter, form: Any) -> Any:
        return unpack(letter.arrays, form, self.work.net, torch.device("cpu"))

    def step(
        self, exchange: str, arrays: Mapping[int, dict[str, Encoded]], clients: int, read: Callable[[Letter], Any]
    ) -> dict[int, Any]:
        """Send a letter about so many clients to each; the answers that count, by id."""
        remote, sizes = self.remote, self.work.data.sizes
        letters = {
            id: remote.letter(id, self.work.round, exchange, mine, clients=clients) for id, mine in arrays.items()
        }
        answers = remote.visit(letters, sizes, read, "is not in the sum any more") if letters else []
        return {id: answer for id, answer in zip(letters, answers, strict=True) if answer is not None}

    def enough(self, found: int, least: int, what: str) -> bool:
        least = max(least, self.remote.least)
        if found < least:
            self.remote.say(
                f"round {self.work.round + 1}: {found} clients have sent {what}, fewer than the {least} that a sum needs; "
                "the model stays as it is"
            )
        return found >= least


def check_secure(alg: Algorithm, net: Net, how: Settings, clients: int) -> None:
    """Refuse a method, or settings, for which a sum is not enough."""
    for part in (alg.at(0), alg.at(sys.maxsize)):
        if looks_at_single_uploads(part) or leaves(Forms.of(part, net, clients).reply):
            raise BadSetting(
                f"secure_bound hides single uploads, and {type(part).__name__} needs them; use a method that needs only "
                "the sum, such as fedavg or scaffold"
            )
    for wrong, why in (
        (how.cohort < LEAST, f"give a cohort of at least {LEAST}, not {how.cohort}: a sum of two hides nothing"),
        (how.weights != "uniform", "give --weights uniform: the sum has one weight for all"),
        (how.aggregate != MEAN, f"leave aggregate={how.aggregate} out: a rule looks at single uploads"),
        (bool(how.compress), "leave compress out: what is masked cannot be compressed"),
        (how.privacy is not None, "leave privacy_clip out: the server clips each update, and must see it for that"),
        (net.buffer_layout.size > 0, "the model has BatchNorm, whose counters are no sum; use group normalisation"),
    ):
        if wrong:
            raise BadSetting(f"secure_bound: {why}")
