"""What a file of this package defines, read without running it: to list algorithms takes no PyTorch, which takes seconds.

An outline looks like the module: functions have names and docstrings but do nothing, classes have their bases, fields and
class variables. Calls are not made; their values, and whatever comes from other packages, are `...`.
"""

from __future__ import annotations

import ast
import functools
from abc import ABCMeta, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

PACKAGE = Path(__file__).parents[1]


@functools.cache
def outline(name: str) -> Outline:
    """The outline of a module of this package.

    >>> outline("undrift.data.partition").iid.__doc__.partition(":")[0]
    'iid'
    """
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return Outline(name, path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


class Outline(ModuleType):
    """A module whose names are looked up in its source when they are asked for."""

    def __init__(self, name: str, path: Path) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        super().__init__(name, ast.get_docstring(tree))
        self._defined = {n: s for s in tree.body for n in _names(s) if not isinstance(s, ast.ImportFrom)}
        self._imported = {n: s for s in tree.body for n in _names(s) if isinstance(s, ast.ImportFrom)}

    def __dir__(self) -> list[str]:
        return list(self._defined)

    def __getattr__(self, name: str) -> Any:
        if name in self._defined:
            value = self._definition(self._defined[name])
        elif name in self._imported:
            value = _from(self._imported[name], name)
        else:
            raise AttributeError(f"{self.__name__} defines no {name}")
        setattr(self, name, value)
        return value

    def _definition(self, statement: ast.stmt) -> Any:
        if isinstance(statement, ast.FunctionDef):
            return _function(statement)
        if isinstance(statement, ast.ClassDef):
            return self._class(statement)
        return self._value(getattr(statement, "value", None))

    def _class(self, node: ast.ClassDef) -> Any:
        body: dict[str, Any] = {"__doc__": ast.get_docstring(node), "__module__": self.__name__}
        types = {}
        for statement in node.body:
            for name in _names(statement):
                if not isinstance(statement, ast.AnnAssign) or statement.value is not None:
                    body[name] = self._definition(statement)
                if isinstance(statement, ast.AnnAssign):
                    types[name] = ClassVar if ast.unparse(statement.annotation).startswith("ClassVar") else Any
        bases = [base for base in map(self._value, node.bases) if isinstance(base, type)]
        kind: Any = ABCMeta(node.name, tuple(bases), body | {"__annotations__": types})
        if "dataclass" in map(_name_of_call, node.decorator_list):
            kind = dataclass(init=False, repr=False, eq=False)(kind)  # for its fields; methods take time to make
        return kind

    def _value(self, node: ast.expr | None) -> Any:
        if node is None:
            return ...
        code = compile(ast.Expression(_WithoutCalls().visit(node)), self.__name__, "eval")
        try:
            return eval(code, {"__builtins__": {}}, _Known(self))
        except (AttributeError, LookupError, TypeError):  # a value that is not known
            return ...


class _Known(dict[str, Any]):
    """The names of a module for an expression."""

    def __init__(self, module: Outline) -> None:
        self.module = module

    def __missing__(self, name: str) -> Any:
        return getattr(self.module, name, ...)


class _WithoutCalls(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        return ast.copy_location(ast.Constant(...), node)


def _names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _from(statement: ast.ImportFrom, name: str) -> Any:
    module = statement.module or ""
    if module.partition(".")[0] != PACKAGE.name:
        return ...
    there = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
    return getattr(outline(module), there) if hasattr(outline(module), there) else outline(f"{module}.{there}")


def _function(node: ast.FunctionDef) -> Any:
    def function() -> None: ...

    function.__name__, function.__doc__ = node.name, ast.get_docstring(node)
    return abstractmethod(function) if "abstractmethod" in map(_name_of_call, node.decorator_list) else function


def _name_of_call(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
