"""Algorithms and models by name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn

from undrift.algorithms.base import Server, Worker
from undrift.core.errors import BadSetting, UndriftError, UnknownName, closest
from undrift.core.names import algorithms_of, attribute, call_with_options, methods_with, module_of, names
from undrift.core.outline import outline
from undrift.core.pinned import PREFIX
from undrift.core.streams import Purpose, stream
from undrift.jobs.plain_values import as_type
from undrift.models._hugging_face import build as hugging_face
from undrift.round.aggregate import NAMES as RULES


def build_model(model: Any, shape: tuple[int, ...], classes: int, seed: int, positions: int = 0) -> nn.Module:
    """Build a model from its name or a function of (shape, classes); the CPU draws its weights under the seed.

    `positions` is the number of dimensions of one target: 0 for a label, 1 for a label of each token.
    """
    build, options = model, ""
    if isinstance(model, str) and model.startswith(PREFIX):
        build = functools.partial(hugging_face, model, positions=positions)
    elif isinstance(model, str):
        if model.startswith("object "):
            raise BadSetting(f"the run's model was {model}; give it again from Python")
        build = attribute(model) if ":" in model else module_of("models", model).build
        options = "" if ":" in model else model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(seed, Purpose.INITIAL) >> 1)
        try:
            module = call_with_options(build, (shape, classes), options)
        except UndriftError:
            raise
        except Exception as error:  # whatever the user's function raises
            called = f"called with (shape, classes) = ({shape}, {classes})"
            raise BadSetting(
                f"the model function {model}, {called}, failed: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise BadSetting(f"a model function takes (shape, classes) and returns an nn.Module, not {kind}")
    return module


def check_not_elsewhere(name: str) -> None:
    """Raise BadSetting for a method of another command and for a rule, which people take for algorithms."""
    if name in names("algorithms"):
        return
    if "," in name:
        raise BadSetting(f"a run has one algorithm, not {name!r}; several are a sweep: see 'undrift sweep --help'")
    for command, module in (("dataparallel", "undrift.dataparallel.methods"), ("pipe", "undrift.pipeline.engines")):
        if name in outline(module).METHODS:
            raise BadSetting(f"{name} is a method of another command: write 'undrift {command} --method {name}'")
    if name in RULES:
        raise BadSetting(f"{name} is a rule that goes with an algorithm: give --aggregate {name}")


def algorithm_class(name: str) -> type[Any]:
    """The one algorithm defined in the file of that name, LOCAL+SERVER, or the class at `package.module:Class`."""
    if "+" in name:
        return compose(*name.split("+", 1))
    if ":" in name:
        kind = attribute(name)
        if not (inspect.isclass(kind) and issubclass(kind, Worker) and issubclass(kind, Server)):
            raise BadSetting(f"{name} is not an algorithm; it must be a class with a worker part and a server part")
        return kind
    check_not_elsewhere(name)
    kinds = algorithms_of(module_of("algorithms", name))
    if len(kinds) != 1:
        raise BadSetting(f"the file of {name} must define one algorithm, not {len(kinds)}")
    return kinds[0]


def make_algorithm(kind: type[Any], name: str, given: Mapping[str, Any], settings: Collection[str]) -> Any:
    """Build an algorithm with the given fields; its `name` and the names of a run's `settings` are for error messages."""
    hints = get_type_hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}
    for unknown in given:
        if unknown not in known:
            raise unknown_field(name, unknown, known, settings)
    return kind(**{n: as_field(n, v, hints[n]) for n, v in given.items()})


def unknown_field(algorithm: str, field: str, known: Collection[str], settings: Collection[str]) -> UndriftError:
    """The error for a field that the algorithm lacks; it says where the field is, if anywhere."""
    if closest(field, known):
        return UnknownName(f"field of {algorithm}", field, known)
    if field in settings:
        return BadSetting(
            f"{field} is no field of {algorithm}, but a setting of the run: give --{field.replace('_', '-')}"
        )
    if others := methods_with(field):
        return BadSetting(f"{algorithm} has no field {field!r}; these have it: {', '.join(others)}")
    return UnknownName(f"field of {algorithm}", field, known)


def as_field(name: str, value: Any, kind: Any) -> Any:
    """A field's value as its type; a list, or a single number, becomes a tuple where that is asked for."""
    if kind == tuple[float, ...]:
        return tuple(as_type(name, v, float) for v in (value if isinstance(value, list | tuple) else [value]))
    # `check_choices` checks the value of a Literal.
    return as_type(name, value, type(get_args(kind)[0]) if get_origin(kind) is Literal else kind)


def half(name: str, kind: type[Any]) -> type[Any]:
    """The worker part or the server part (kind Worker or Server) of a registered algorithm."""
    other: type[Any] = Server if kind is Worker else Worker
    return next(c for c in algorithm_class(name).__mro__ if issubclass(c, kind) and not issubclass(c, other))


def compose(local: str, server: str) -> type[Any]:
    """Join one method's worker part and another's server part.

    >>> [c.__name__ for c in compose("fedmim", "gradma-s").__bases__]
    ['MultiStepInertia', 'ServerMemory']
    """
    parts = half(local, Worker), half(server, Server)
    ours, theirs = ({f.name: f for f in dataclasses.fields(part)} for part in parts)
    shared = [name for name in ours if name in theirs]
    for name in shared:
        if origin(parts[0], name) is not origin(parts[1], name):
            raise BadSetting(
                f"{local} and {server} both have a field {name!r} with its own meaning; they cannot be combined"
            )
    hidden = [n for n in (*ours, *theirs) if n not in shared and all(hasattr(part, n) for part in parts)]
    if hidden:
        raise BadSetting(
            f"{hidden[0]!r} is a field in one of {local} and {server} and something else in the other; "
            "they cannot be combined"
        )
    about = f"The clients of {local} with the server of {server}."
    defaults = {name: theirs[name].default for name in shared}
    types = {"__annotations__": {name: get_type_hints(parts[1])[name] for name in shared}}
    combined = type(f"{parts[0].__name__}With{parts[1].__name__}", parts, {"__doc__": about} | types | defaults)
    return dataclasses.dataclass(frozen=True)(combined)


def origin(part: type[Any], field: str) -> type[Any]:
    """The class that introduces a field; its subclasses may change the default."""
    return next(c for c in reversed(part.__mro__) if field in inspect.get_annotations(c))
