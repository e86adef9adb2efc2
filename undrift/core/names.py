"""Look up objects by name: a registered file name, or `package.module:attribute` for anything else."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

from undrift.core.errors import BadSetting, UnknownName
from undrift.core.outline import PACKAGE, outline

PACKAGES = {
    "algorithms": "undrift.algorithms",
    "datasets": "undrift.data",
    "models": "undrift.models",
    "trackers": "undrift.jobs.track",
}


def names(kind: str) -> list[str]:
    """The registered names of a kind: files of its folder that define an algorithm, `load`, `build` or `Tracker`.

    >>> "gradma-s" in names("algorithms")
    True
    """
    folder = PACKAGE.joinpath(*PACKAGES[kind].split(".")[1:])
    files = [m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_")]
    return sorted(f.replace("_", "-") for f in files if _registers(kind, outline_of(kind, f)))


def describe(kind: str, name: str) -> str:
    """The first line of a registered file's docstring."""
    return (inspect.getdoc(outline_of(kind, name)) or "").splitlines()[0]


def outline_of(kind: str, name: str) -> Any:
    """What the file of a name defines, without importing it."""
    return outline(f"{PACKAGES[kind]}.{name.replace('-', '_')}")


def check_text(what: str, text: str) -> None:
    """Raise BadSetting for text that cannot be a path, or a line of a message or a file: it has control characters.

    >>> check_text("out", "a" + chr(0))
    Traceback (most recent call last):
    undrift.core.errors.BadSetting: out must be text without control characters, not 'a\\x00'
    """
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise BadSetting(f"{what} must be text without control characters, not {text!r}")


def printable(text: str) -> str:
    r"""The text as one line that is safe to print: what would end it or steer a terminal is written as an escape.

    >>> print(printable("a" + chr(10) + chr(27) + "[2J"))
    a\n\x1b[2J
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def with_options(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a name from its options in brackets.

    >>> with_options("unet(depth=3, norm=batch)"), with_options("mlp")
    (('unet', {'depth': 3, 'norm': 'batch'}), ('mlp', {}))
    """
    name, bracket, rest = spec.partition("(")
    options: dict[str, Any] = {}
    if bracket and not rest.endswith(")"):
        raise BadSetting(f"{spec!r} opens a bracket and does not end in one; write name(option=value, option=value)")
    for part in filter(str.strip, rest.removesuffix(")").split(",")):
        option, equals, value = (text.strip() for text in part.partition("="))
        if not equals:
            raise BadSetting(f"{part.strip()!r} in {spec!r} is not option=value; write name(option=value)")
        options[option] = parse_value(value)
    return name.strip(), options


def parse_value(text: str) -> Any:
    """Read a value as TOML, or as text where that fails.

    >>> parse_value("0.5"), parse_value(".5"), parse_value("True"), parse_value("tensor"), parse_value("[0.6, 0.3]")
    (0.5, 0.5, True, 'tensor', [0.6, 0.3])
    """
    for form in (text, text.lower(), f"0{text}"):  # also True, and .5
        try:
            return tomllib.loads(f"value = {form}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):  # the latter from a thousand brackets
            continue
    return text


def call_with_options(function: Any, given: tuple[Any, ...], spec: str) -> Any:
    """Call function(*given, **options of the spec); an unknown option is an error."""
    name, options = with_options(spec)
    if not options:
        return function(*given)
    known = list(inspect.signature(function).parameters)[len(given) :]
    for option, value in options.items():
        if option not in known:
            raise UnknownName(f"option of {name}", option, known) if known else BadSetting(f"{name} takes no options")
        default = inspect.signature(function).parameters[option].default
        if isinstance(default, float) and type(value) is int:
            options[option] = float(value)
        elif type(value) is not type(default):
            raise BadSetting(f"option {option} of {name} must be {type(default).__name__}, not {value!r}")
    return function(*given, **options)


def module_of(kind: str, name: str) -> Any:
    """The module registered under a name; options in brackets are ignored."""
    name = name.partition("(")[0].strip()
    if name not in names(kind):
        raise UnknownName(kind.removesuffix("s"), name, names(kind))
    return importlib.import_module(f"{PACKAGES[kind]}.{name.replace('-', '_')}")


def attribute(reference: str) -> Any:
    """Import `package.module:attribute`; the current folder is searched too, after everything that is installed."""
    path, _, name = reference.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(path)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise BadSetting(f"cannot import {path!r} of {reference!r}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise UnknownName(f"attribute of {path}", name, public) from None


def _registers(kind: str, module: Any) -> bool:
    needed = {"datasets": "load", "models": "build", "trackers": "Tracker"}
    return hasattr(module, needed[kind]) if kind in needed else bool(algorithms_of(module))


def algorithms_of(module: Any) -> list[type[Any]]:
    """The dataclasses of a module, or of its outline, that combine a worker and a server."""
    defined = [getattr(module, name) for name in dir(module)]
    here = [c for c in defined if inspect.isclass(c) and c.__module__ == module.__name__]
    parts = [c for c in here if "__dataclass_fields__" in vars(c) and not inspect.isabstract(c)]
    return [c for c in parts if hasattr(c, "local_step") and hasattr(c, "server_step")]


def methods_with(field: str) -> list[str]:
    """The algorithms that have a field."""
    return [n for n in names("algorithms") for a in algorithms_of(outline_of("algorithms", n)) if has_field(a, field)]


def has_field(kind: type[Any], name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(kind))
