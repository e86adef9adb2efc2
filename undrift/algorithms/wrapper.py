"""Wrap an algorithm, the `inner` one, in another that changes a part of it.

Functions that the wrapper does not define are forwarded to `inner`. A wrapper with more state keeps the inner method's state in
a field `inner`; `extends` names these states, and forwarding unwraps and wraps them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple, Self, cast

from torch import Tensor

from undrift.algorithms.base import Algorithm, Server, Worker
from undrift.core.trees import State
from undrift.oracle.oracle import LocalData

# The states that a function returns, in order; "" is not a state. Arguments are recognised by their names.
RETURNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("companion_init", "companion_networks", "companion_step", "gather_measured"), ("companion",)),
    **dict.fromkeys(("client_init", "receive"), ("client",)),
    **dict.fromkeys(("local_start", "local_step", "take_moments", "move", "arrive"), ("work",)),
    **{"broadcast": ("down",), "gather": ("", "companion"), "local_end": ("up", "client")},
    **{"server_init": ("server",), "server_step": ("", "server")},
}
STATES = ("companion", "down", "client", "work", "up", "server")


class WorkerWrapper(Worker):
    """A worker part around another one."""

    inner: Any
    extends: ClassVar[frozenset[str]] = frozenset()  # the STATES that have a field `inner`

    def forward(self, name: str, given: dict[str, Any]) -> Any:
        """Call `inner`'s function of this name, with unwrapped states, and wrap the states that it returns."""
        unwrapped = {n: self.open(n, value) if n in STATES else value for n, value in given.items()}
        result = getattr(self.inner, name)(**unwrapped)
        roles = RETURNS.get(name, ())
        if not self.extends.intersection(roles):
            return result
        values = result if len(roles) > 1 else (result,)
        wrapped = [given[r]._replace(inner=v) if r in self.extends else v for r, v in zip(roles, values, strict=True)]
        return tuple(wrapped) if len(roles) > 1 else wrapped[0]

    def open(self, name: str, state: State) -> State:
        """The inner method's part of a state."""
        return state.inner if name in self.extends else state

    def local_step(self, *given: Any) -> State:
        raise NotImplementedError  # forwarded, see below

    def check(self, clients: int, cohort: int) -> None:
        self.inner.check(clients, cohort)
        super().check(clients, cohort)


class Wrapper(WorkerWrapper, Algorithm):
    """A whole algorithm around another one, whose fields are its settings."""

    def __init__(self, inner: Algorithm) -> None:
        object.__setattr__(self, "inner", inner)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "inner"), name)

    def around(self, inner: Algorithm) -> Self:
        """The same wrapper around another algorithm."""
        return type(self)(inner)

    def at_rate(self, lr: float | Tensor) -> Wrapper:
        """The same with another local rate."""
        return self.around(at_rate(self.inner, lr))

    def server_step(self, *given: Any) -> tuple[Tensor, State]:
        raise NotImplementedError  # forwarded, see below

    def at(self, t: int) -> State:
        inner = self.inner.at(t)
        return self if inner is self.inner else self.around(inner)


def _forwarding(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    parameters = [p for p in inspect.signature(hook).parameters if p != "self"]

    def call(self: WorkerWrapper, *given: Any, **named: Any) -> Any:
        return self.forward(name, dict(zip(parameters, given, strict=False)) | named)

    call.__name__, call.__doc__ = name, hook.__doc__
    return call


def _forward_all(wrapper: type, part: type, base: type) -> None:
    """Let the wrapper forward every public name of a part, except fields, its own definitions and those of `base`."""
    for name in dir(part):
        defined = name in vars(wrapper) and name not in ("local_step", "server_step")
        setting = name == "varies" or name in {f.name for f in fields(part)}
        if name.startswith("_") or defined or setting or hasattr(base, name):
            continue
        hook = inspect.getattr_static(part, name)
        plain = inspect.isfunction(hook)
        setattr(wrapper, name, _forwarding(name, hook) if plain else _property(name))


def _property(name: str) -> property:
    return property(lambda self: getattr(self.inner, name))


_forward_all(WorkerWrapper, Worker, object)
_forward_all(Wrapper, Server, Worker)
for _field in (*fields(Worker), *fields(Server)):
    setattr(Wrapper, _field.name, _property(_field.name))


class KeepMoments(Wrapper):
    """Lets clients keep the base optimiser's state between rounds."""

    extends = frozenset({"client"})

    class Client(NamedTuple):
        inner: State
        opt: State

    def client_init(self, down: State, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(self.inner.client_init(down, ids, buffers), self.inner.rest(down.x))

    def local_start(self, down: State, client: Client, local: LocalData) -> State:
        work = self.inner.local_start(down, client.inner, local)
        return self.inner.take_moments(client.inner, work, client.opt)

    def local_end(self, down: State, client: Client, work: State) -> tuple[State, Client]:
        up, after = self.inner.local_end(down, client.inner, work)
        return up, self.Client(after, self.inner.leave_moments(work, client.opt))


def at_rate(alg: Algorithm, lr: float | Tensor) -> Algorithm:
    """The algorithm with another local rate."""
    return alg.at_rate(lr) if isinstance(alg, Wrapper) else replace(alg, lr=cast(float, lr))


def innermost(alg: Any) -> Any:
    """The algorithm inside all wrappers."""
    return innermost(alg.inner) if isinstance(alg, Wrapper) else alg
