"""The settings that a command is given: those of a file, of --set and of flags."""

from __future__ import annotations

import argparse
from typing import Any

from undrift.cli.flags import Fields
from undrift.cli.mistakes import missing_file
from undrift.core.errors import BadSetting
from undrift.core.names import parse_value
from undrift.jobs.plain_values import from_toml, lr_among_fields, table_of_fields


def read_settings(arguments: argparse.Namespace, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the file, with those of --set under `set`, and those of the flags, which override them."""
    pairs = split_pairs(arguments.set or [])
    config = read_file(arguments, fields)
    flags = {n: v for n in (*fields, "lr") if n != "set" and (v := getattr(arguments, n)) is not None}
    name = flags.get("algorithm", flags.get("method"))
    if name is not None and name != config.get("algorithm", config.get("method")):
        config.pop("set", None)  # the file's fields belong to another algorithm
    if "lr" not in fields:  # an algorithm's field, and so frequent that it has a flag
        config = lr_among_fields(config)
    given = table_of_fields(config.get("set", {}))
    for field, value in pairs:
        if field in flags:
            raise BadSetting(f"--{field.replace('_', '-')} and --set {field} are the same setting; give one of them")
        given[field] = parse_value(value)
    if "lr" in flags and "lr" not in fields:
        given["lr"] = flags.pop("lr")
    return (config | {"set": given} if given else config), flags


def split_pairs(pairs: list[str]) -> list[tuple[str, str]]:
    """The field and the value of each --set."""
    split = [pair.partition("=") for pair in pairs]
    fields = [field for field, _, _ in split]
    for field, equals, value in split:
        if not equals:
            raise BadSetting(f"--set takes FIELD=VALUE, not {field!r}")
        if "," in value and "=" in value:
            raise BadSetting(f"give --set once for each field, not --set {field}={value}")
        if fields.count(field) > 1:
            raise BadSetting(f"{field} is given twice with --set; give it once")
    return [(field, value) for field, _, value in split]


def read_file(arguments: argparse.Namespace, fields: Fields) -> dict[str, Any]:
    """The settings of the file, if one is given."""
    file = arguments.config
    if file is None:
        return {}
    flags = [f"--{name.replace('_', '-')}" for name in fields]
    if not file.exists() and (error := missing_file(str(file), flags, arguments.resume)):
        raise error
    return from_toml(file)
