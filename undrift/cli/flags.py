"""Flags that several commands share: one for each setting of a run, and a few more."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from undrift.cli.command import METAVARS, Argument, arg, flag, path
from undrift.core.errors import BadSetting
from undrift.jobs.config import RECORD, WHAT

Fields = Mapping[str, dataclasses.Field[Any]]  # settings by name
RATE = arg("--lr", "the learning rate of local steps, the same as --set lr=RATE", WHAT, type=float, metavar="RATE")
MINUTES = flag("--minutes", 0.0, "stop after so many minutes; the same command goes on")
DEVICE = flag("--device", "", "where to compute, in place of what the file says", "auto|cpu|cuda")


def training_arguments(settings: Any) -> list[Argument]:
    """The arguments of a command that trains: a file of settings, a flag for each setting, and the run's folder."""
    name = "ALGORITHM" if "algorithm" in settings.FIELDS else "METHOD"
    where = f"the run's folder [a new one, runs/{name}-DATASET-seedN; the last one with --resume]"
    file = "a file of settings, such as a run's run.toml; flags override them"
    return [
        path("config", file, "CONFIG.toml", nargs="?"),
        *setting_flags(settings.FIELDS, settings.TYPES, settings.CHOICES),
        *([] if "lr" in settings.FIELDS else [RATE]),
        path("--out", where, heading=RECORD),
        arg("--resume", "go on from the folder's last checkpoint", RECORD, action="store_true"),
    ]


def setting_flags(
    fields: Fields, types: Mapping[str, Any], choices: Mapping[str, tuple[str, ...]], heading: str = ""
) -> list[Argument]:
    """A flag for each setting; `heading` is that of settings without one."""
    return [
        Argument(
            f"--{name.replace('_', '-')}",
            flag_options(name, field, types[name], choices.get(name, ())),
            field.metadata["heading"] or heading,
        )
        for name, field in fields.items()
    ]


def flag_options(name: str, field: dataclasses.Field[Any], kind: Any, choices: Sequence[str]) -> dict[str, Any]:
    """What `add_argument` takes for a setting. Its help ends with its default in brackets, unless it has brackets already."""
    about, usual = str(field.metadata["help"]), field.default
    options: dict[str, Any] = {"default": None, "help": about}
    if name == "set":
        return options | {"action": "append", "metavar": "FIELD=VALUE"}
    if kind is bool:  # a switch that is on by default gets a --no- form
        return options | {"action": argparse.BooleanOptionalAction if usual else "store_true"}
    if "[" not in about and usual != "":
        options["help"] = f"{about} [{usual:g}]" if kind is float else f"{about} [{usual}]"
    shown = "NAME" if name in ("algorithm", "dataset", "model") else METAVARS[kind]
    return options | {"type": kind, "metavar": "|".join(choices or (shown,))}


def pack_flag(runs: str) -> Argument:
    about = f"run {runs} of equal shapes as one program [on a GPU]"
    return arg("--pack", about, action=argparse.BooleanOptionalAction)


def check_minutes(minutes: float) -> None:
    """Refuse --minutes that are no time; 0 is no limit."""
    if not 0 <= minutes < float("inf"):
        raise BadSetting(f"minutes must be at least 0, not {minutes:g}")
