"""Settings as plain values, from a TOML file, a mapping or flags: their names, and their types."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from undrift.core.errors import BadSetting, UnknownName
from undrift.core.names import check_text


def from_toml(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, such as run.toml, without its [made] table."""
    return {name: value for name, value in read_toml(path).items() if name != "made"}


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSetting(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or nested a thousand times
        raise BadSetting(f"{path} is not valid TOML: {error}") from error


def convert(settings: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with each value as its type."""
    check_known("setting", settings, types)
    return {name: as_type(name, value, types[name]) for name, value in settings.items()}


def as_type(name: str, value: Any, kind: Any) -> Any:
    """Check the type of a value; an int becomes a float where that is asked for."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise BadSetting(f"{name} must be a finite number, not {value}") from None
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
        raise BadSetting(f"{name} must be {kind.__name__}, not {value!r}")
    if kind is str:
        check_text(name, value)
    return value


def table_of_fields(value: Any) -> dict[str, Any]:
    """The setting `set`; anything but a table is an error."""
    if not isinstance(value, Mapping):
        raise BadSetting(f"set must be a table of the algorithm's or method's fields, not {value!r}")
    return dict(value)


def lr_among_fields(settings: Mapping[str, Any], kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Move `lr`, which every method has, to the fields in `set`; `kept` are those that it joins where no others are given.

    >>> lr_among_fields({"rounds": 5, "lr": 0.1})
    {'rounds': 5, 'set': {'lr': 0.1}}
    """
    rest = dict(settings)
    if "lr" not in rest:
        return rest
    fields = table_of_fields(rest.get("set", kept or {}))
    if "lr" in table_of_fields(rest.get("set", {})):
        raise BadSetting("lr and set lr are the same setting; give one of them")
    fields["lr"] = rest.pop("lr")
    return rest | {"set": fields}


def with_own_fields(settings: Mapping[str, Any], known: Sequence[str], method: str) -> dict[str, Any]:
    """Move the method's fields from `set` to the top level.

    >>> with_own_fields({"seed": 1, "set": {"lam": 0.5}}, ("lam", "lr"), "def")
    {'seed': 1, 'lam': 0.5}
    """
    given = dict(settings)
    fields = table_of_fields(given.pop("set", {}))
    check_known(f"field of {given.get('method', method)}", fields, known)
    return given | fields


def check_known(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise UnknownName for a name that is not known."""
    for name in names:
        if name not in known:
            raise UnknownName(what, name, known)


def words(text: str) -> tuple[str, ...]:
    """The parts of a text with commas.

    >>> words("tensorboard, mlflow,"), words("")
    (('tensorboard', 'mlflow'), ())
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())
