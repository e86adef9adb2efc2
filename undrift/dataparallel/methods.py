"""The methods of `undrift dataparallel` by name."""

from __future__ import annotations

from dataclasses import replace

from undrift.core.errors import BadSetting, UnknownName
from undrift.dataparallel import adamw, def_, def_adamw, ef, ef21, ef21_sgdm, psync, saef, sgd
from undrift.dataparallel.def_ import Detached
from undrift.dataparallel.def_adamw import DetachedAdamW
from undrift.dataparallel.sgd import SGDMethod

Method = Detached | SGDMethod
METHODS: dict[str, Method] = {
    "sgd": sgd.METHOD,
    "adamw": adamw.METHOD,
    "ef": ef.METHOD,
    "saef": saef.METHOD,
    "psync": psync.METHOD,
    "ef21": ef21.METHOD,
    "ef21-sgdm": ef21_sgdm.METHOD,
    "def": Detached(returns="y"),
    "def-a": Detached(returns="x"),
    "def-adamw": DetachedAdamW(returns="y"),
}
FILES = {
    "sgd": sgd,
    "adamw": adamw,
    "ef": ef,
    "saef": saef,
    "psync": psync,
    "ef21": ef21,
    "ef21-sgdm": ef21_sgdm,
    "def": def_,
    "def-a": def_,
    "def-adamw": def_adamw,
}


def make_method(name: str, lam: str, average_every: int) -> Method:
    """Build a method; `lam` is for DEF, DEF-A and DEF-AdamW, `average_every` for SAEF."""
    if name not in METHODS:
        raise UnknownName("method", name, METHODS)
    if average_every and name != "saef":
        raise BadSetting(f"average_every is SAEF's; {name} does not average errors")
    method = METHODS[name]
    if isinstance(method, Detached) and name.startswith("def"):
        return replace(method, lam=parse_lam(lam))
    return replace(method, average_every=average_every) if isinstance(method, Detached) else method


def parse_lam(lam: str) -> float | str:
    """A number, or "auto"."""
    try:
        return lam if lam == "auto" else float(lam)
    except ValueError:
        raise BadSetting(f"lam must lie in [0, 1] or be 'auto', not {lam!r}") from None
