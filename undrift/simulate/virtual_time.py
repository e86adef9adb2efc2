"""The course of a simulation on its virtual clock, as its settings ask for it."""

from __future__ import annotations

from undrift.algorithms.base import Algorithm
from undrift.core import ranks
from undrift.core.errors import BadSetting
from undrift.core.layout import MODEL
from undrift.core.trees import leaves, nbytes
from undrift.oracle.net import Net
from undrift.round.aggregate import MEAN
from undrift.round.clock import Traffic
from undrift.round.compressed import Uplink, wrap
from undrift.round.shapes import Forms
from undrift.round.timeline import Asynchronous, Recorded, Synchronous, Timeline, check_asynchronous
from undrift.simulate.settings import Settings


def make_timeline(settings: Settings, alg: Algorithm, uplink: Uplink | None, net: Net, clients: int) -> Timeline | None:
    """Who answers when; None for a run without a clock."""
    clock = settings.clock
    if clock is None and not settings.concurrent:
        return None
    forms = Forms.of(wrap(alg.at(0), 1.0, uplink), net, clients)
    if settings.concurrent or isinstance(clock, Recorded):
        check_asynchronous(alg, bool(leaves(forms.reply)))
        check_apart(settings)
    if clock is None or isinstance(clock, Recorded):
        return clock
    traffic = measure_traffic(alg, forms, net)
    if settings.concurrent:
        return Asynchronous(clock, traffic, settings.concurrent)
    if settings.cohort + settings.over_select > clients:
        raise BadSetting(
            f"over_select: a cohort of {settings.cohort} and {settings.over_select} more are more than {clients} clients"
        )
    return Synchronous(clock, traffic, settings.over_select)


def measure_traffic(alg: Algorithm, forms: Forms, net: Net) -> Traffic:
    """What a client receives and sends in a round."""
    messages = [net.without_padding(state) for state in (forms.down, forms.answers.up, forms.reply)]
    messages += [forms.buffers, forms.buffers]
    if alg.measures:
        messages.append(net.without_padding(net.start()[0], MODEL))
    return Traffic(sum(map(nbytes, messages)), 2 if alg.measures else 1)


def check_apart(settings: Settings) -> None:
    """Refuse settings that need clients that are there together."""
    together = {
        "compress": bool(settings.compress), "privacy_clip": settings.privacy is not None,
        "aggregate": settings.aggregate != MEAN, "over_select": settings.over_select > 0,
        "sampling": settings.sampling != "fixed", "torchrun": ranks.count() > 1,
    }  # fmt: skip
    for name in (name for name, given in together.items() if given):
        raise BadSetting(f"asynchronous: {name} is for rounds whose clients are there together; leave it out")
