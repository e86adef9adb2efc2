"""`--stop-at`: what ends a run before its last round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from undrift.core.errors import BadSetting, UnknownName

FALLING = ("loss", "perplexity", "bits", "calibration")  # numbers that get smaller as a model learns


class Stop(NamedTuple):
    """What ends a run early: a number of the record that is at least, or below, some value; or the time."""

    name: str
    value: float
    below: bool = False

    def is_reached(self, record: Mapping[str, Any], seconds: float) -> bool:
        now = seconds if self.name == "time" else record.get(self.name)
        if now is None or not is_number(now):
            return False
        return bool(now < self.value if self.below else now >= self.value)

    def unknown(self, record: Mapping[str, Any]) -> str:
        """What to say if a record that was scored has no such number; empty if it has one."""
        known = [name for name, value in record.items() if value is None or is_number(value)]
        if self.name in ("time", *known):
            return ""
        return f"stop_at will not end the run, as no round has it so far: {UnknownName('number', self.name, known)}"


def is_share(name: str) -> bool:
    """Whether a number of the record, or a score, lies between 0 and 1."""
    return any(
        f"{share}_" in f"{name}_" for share in ("accuracy", "dice", "c_index")
    )  # also dice_cup, own_accuracy_all


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def parse_stop(text: str) -> dict[str, Stop]:
    """Parse --stop-at.

    >>> [*parse_stop("accuracy=0.9,time=10m").values()]
    [Stop(name='accuracy', value=0.9, below=False), Stop(name='time', value=600.0, below=False)]
    >>> parse_stop("loss<0.2")["loss"].below
    True
    """
    stops: dict[str, Stop] = {}
    for part in filter(None, text.split(",")):
        below = "<" in part
        name, _, value = part.partition("<" if below else "=")
        unit = {"s": 1, "m": 60, "h": 3600}.get(value[-1:]) if name == "time" else None
        try:
            number = float(value[:-1]) * unit if unit else float(value)
        except ValueError:
            number = math.nan  # refused below
        share = is_share(name)
        wrong = not name.isidentifier() or not math.isfinite(number) or (name == "time" and (below or number <= 0))
        if share and not wrong and not 0 < number <= 1:
            raise BadSetting(f"stop_at {part!r}: {name} lies between 0 and 1, so write {name}=0.9 for 90 %")
        if name.endswith(FALLING) and not below and not wrong:
            raise BadSetting(f"stop_at {part!r} would end the run while {name} is still large; write {name}<{value}")
        if wrong:
            raise BadSetting(f"stop_at {part!r} is not understood; write accuracy=0.9, loss<0.2 or time=10m")
        stops[name] = Stop(name, number, below)
    return stops
