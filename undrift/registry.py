"""Names to things: the file name is the registered name, and `package.module:attribute` reaches anything else."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from undrift.algorithms.base import Server, Worker
from undrift.errors import BadSetting, UndriftError, UnknownName
from undrift.streams import Purpose, stream

SAME_MEANING = {"qp_scope", "rho"}  # fields of GradMA's two sides that one setting serves
PACKAGES = {"algorithms": "undrift.algorithms", "datasets": "undrift.data", "models": "undrift.models"}


def names(kind: str) -> list[str]:
    """The registered names of a kind: the files of its folder that define an algorithm, `load` or `build`.

    >>> "gradma-s" in names("algorithms")
    True
    """
    package = importlib.import_module(PACKAGES[kind])
    files = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
    return sorted(
        f.replace("_", "-") for f in files if _registers(kind, importlib.import_module(f"{PACKAGES[kind]}.{f}"))
    )


def describe(kind: str, name: str) -> str:
    """The first line of a registered file's docstring."""
    module = importlib.import_module(f"{PACKAGES[kind]}.{name.replace('-', '_')}")
    return (inspect.getdoc(module) or "").splitlines()[0]


def with_options(spec: str) -> tuple[str, dict[str, Any]]:
    """A name and the options behind it in brackets.

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
            raise BadSetting(
                f"{part.strip()!r} in {spec!r} is not option=value; write name(option=value, option=value)"
            )
        options[option] = parse_value(value)
    return name.strip(), options


def parse_value(text: str) -> Any:
    """A value as TOML would read it, and text where TOML would not.

    >>> parse_value("0.5"), parse_value(".5"), parse_value("True"), parse_value("tensor"), parse_value("[0.6, 0.3]")
    (0.5, 0.5, True, 'tensor', [0.6, 0.3])
    """
    for form in (text, text.lower(), f"0{text}"):  # also True, and .5
        try:
            return tomllib.loads(f"value = {form}")["value"]
        except tomllib.TOMLDecodeError:
            continue
    return text


def call_with_options(function: Any, given: tuple[Any, ...], spec: str) -> Any:
    """function(*given, **options of the spec), where an option that it does not have is an error that says so."""
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
    """The module registered under a name, whatever options stand behind it in brackets."""
    name = name.partition("(")[0].strip()
    if name not in names(kind):
        raise UnknownName(kind.removesuffix("s"), name, names(kind))
    return importlib.import_module(f"{PACKAGES[kind]}.{name.replace('-', '_')}")


def build_model(model: Any, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """A model, by its name or by a function of (shape, classes), with its initial weights drawn under the seed.

    They are drawn on the CPU, so that they are the same for every device.
    """
    build, options = model, ""
    if isinstance(model, str):
        if model.startswith("object "):
            raise BadSetting(f"the run's model was {model}; give it again from Python")
        build = attribute(model) if ":" in model else module_of("models", model).build
        options = "" if ":" in model else model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(seed, Purpose.INITIAL) >> 1)
        try:
            made = call_with_options(build, (shape, classes), options)
        except UndriftError:
            raise
        except Exception as error:  # whatever the user's function raises
            raise BadSetting(f"the model function {model} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise BadSetting(f"a model function takes (shape, classes) and returns an nn.Module, not {type(made).__name__}")
    return made


def algorithm_class(name: str) -> type[Any]:
    """The one algorithm defined in the file of that name, LOCAL+SERVER, or the class at `package.module:Class`."""
    if "+" in name:
        return compose(*name.split("+", 1))
    if ":" in name:
        named = attribute(name)
        if not (inspect.isclass(named) and issubclass(named, Worker) and issubclass(named, Server)):
            raise BadSetting(f"{name} is not an algorithm; it must be a class with a worker part and a server part")
        return named
    found = _algorithms(module_of("algorithms", name))
    if len(found) != 1:
        raise BadSetting(f"the file of {name} must define one algorithm, not {len(found)}")
    return found[0]


def half(name: str, kind: type[Any]) -> type[Any]:
    """The worker part or the server part (kind Worker or Server) of a registered algorithm."""
    other = Server if kind is Worker else Worker
    found: type[Any] = next(
        c for c in algorithm_class(name).__mro__ if issubclass(c, kind) and not issubclass(c, other)
    )
    return found


def compose(local: str, server: str) -> type[Any]:
    """An algorithm of one method's worker part and another's server part.

    >>> [c.__name__ for c in compose("fedmim", "gradma-s").__bases__]
    ['MultiStepInertia', 'ServerMemory']
    """
    parts = half(local, Worker), half(server, Server)
    shared = {f.name for f in dataclasses.fields(parts[0])} & {f.name for f in dataclasses.fields(parts[1])}
    clash = sorted(n for n in shared if n not in SAME_MEANING)
    if clash:
        raise BadSetting(
            f"{local} and {server} both have a field {clash[0]!r} with its own meaning; they cannot be combined"
        )
    about = f"The clients of {local} with the server of {server}."
    papers = dict.fromkeys(algorithm_class(n).paper for n in (local, server))
    made = type(f"{parts[0].__name__}With{parts[1].__name__}", parts, {"__doc__": about, "paper": "\n".join(papers)})
    return dataclasses.dataclass(frozen=True)(made)


def attribute(reference: str) -> Any:
    """What `package.module:attribute` names; the current folder is searched too."""
    path, _, name = reference.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(path)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise BadSetting(f"cannot import {path!r} of {reference!r}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise UnknownName(f"attribute of {path}", name, public) from None


def _algorithms(module: Any) -> list[type[Any]]:
    """The classes defined in a module that join a worker part and a server part."""
    here = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    return [c for c in here if issubclass(c, Worker) and issubclass(c, Server) and not inspect.isabstract(c)]


def _registers(kind: str, module: Any) -> bool:
    if kind == "algorithms":
        return bool(_algorithms(module))
    return hasattr(module, "load" if kind == "datasets" else "build")
