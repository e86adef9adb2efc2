"""Every + and - of a source file, and what happens to a run when one of them is flipped.

A function's code is exchanged in place, so that whoever imported it, or inherits it, runs the other one.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import undrift

ROOT = Path(undrift.__file__).parent
RECORDER = "__recorded_sign__"
SUMS = {"add_to": "alpha", "addcmul": "value", "addcmul_": "value"} | dict.fromkeys(
    ("add", "add_", "sub", "sub_"), "alpha"
)


class Site(NamedTuple):
    """A sign in a source file."""

    file: str  # inside the package, without its ending
    line: int
    function: str  # as it is called in its module; a class or nothing where the sign is in no function
    number: int  # in the order of ast.walk over the file
    expression: str  # the sign and its terms; also what is around a sign before a term

    def __str__(self) -> str:
        return f"{self.file}.py:{self.line} {self.function}: {self.expression}"

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is known by, wherever its line moves."""
        return self.file, self.function, self.expression


def files() -> list[str]:
    """Every file of the algorithms, by listing the folder."""
    return sorted(str(path.relative_to(ROOT).with_suffix("")) for path in (ROOT / "algorithms").rglob("*.py"))


def scaled(call: ast.Call) -> str:
    """The name of the factor of what a call such as v.add_(g, alpha=2) adds; nothing for other calls."""
    return SUMS.get(call.func.attr, "") if isinstance(call.func, ast.Attribute) else ""


def module_of(file: str) -> types.ModuleType:
    parts = [part for part in file.split("/") if part != "__init__"]
    return importlib.import_module(".".join([undrift.__name__, *parts]))


def file_of(kind: type[Any]) -> str:
    """The file that defines a class."""
    return kind.__module__.removeprefix(f"{undrift.__name__}.").replace(".", "/")


def source(file: str) -> str:
    return (ROOT / f"{file}.py").read_text()


def signed(node: ast.AST) -> bool:
    """Whether a node is a + or a - between two terms, in an assignment, in a call such as v.add_(g), or a - before a term."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return isinstance(node.op, (ast.Add, ast.Sub))
    if isinstance(node, ast.Call):
        return bool(scaled(node))
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def flip(node: ast.AST) -> None:
    if isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd()
    elif isinstance(node, ast.Call):
        given = next((keyword for keyword in node.keywords if keyword.arg == scaled(node)), None)
        if given is None:
            node.keywords.append(ast.keyword(scaled(node), ast.Constant(-1)))
        else:
            given.value = ast.UnaryOp(ast.USub(), given.value)
    else:
        assert isinstance(node, (ast.BinOp, ast.AugAssign))
        node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()


@functools.cache
def sites(file: str) -> list[Site]:
    """Every sign of a file, in functions and outside, in the order of the lines."""
    found: list[Site] = []
    tree = ast.parse(source(file))
    number = {id(node): n for n, node in enumerate(ast.walk(tree))}

    def visit(node: ast.AST, names: tuple[str, ...], inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if signed(child):
                assert isinstance(child, (ast.BinOp, ast.AugAssign, ast.UnaryOp, ast.Call))
                around = f" in {ast.unparse(node)}" if isinstance(child, ast.UnaryOp) else ""
                found.append(Site(file, child.lineno, ".".join(names), number[id(child)], ast.unparse(child) + around))
            opens = isinstance(child, (ast.ClassDef, ast.FunctionDef)) and not inside
            within = (*names, child.name) if opens else names  # type: ignore[attr-defined]
            visit(child, within, inside or isinstance(child, ast.FunctionDef))

    visit(tree, (), False)
    return sorted(found, key=lambda site: (site.line, site.number))


def code_in(code: types.CodeType, name: str) -> types.CodeType:
    """The code of a function in that of its module."""
    if code.co_qualname == name:
        return code
    for part in code.co_consts:
        if isinstance(part, types.CodeType) and (name + ".").startswith(part.co_qualname + "."):
            return code_in(part, name)
    raise KeyError(name)


def function_in(module: types.ModuleType, name: str) -> types.FunctionType:
    """The function that a module runs under a name, without what is around it."""
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, functools.cached_property):
        found = found.func
    found = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(found, types.FunctionType), name
    return found


@contextlib.contextmanager
def exchanged(file: str, tree: ast.Module, names: Collection[str]) -> Iterator[None]:
    """Within it some functions of a file run the code of a tree."""
    module = module_of(file)
    code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    functions = [function_in(module, name) for name in names]
    before = [function.__code__ for function in functions]
    try:
        for function, name in zip(functions, names, strict=True):
            function.__code__ = code_in(code, name)
        yield
    finally:
        for function, old in zip(functions, before, strict=True):
            function.__code__ = old


@contextlib.contextmanager
def flipped(site: Site) -> Iterator[None]:
    """Within it a sign is the other one."""
    tree = ast.parse(source(site.file))
    flip(list(ast.walk(tree))[site.number])
    with exchanged(site.file, tree, [site.function]):
        yield


class Recording(ast.NodeTransformer):
    """A copy that does the same and tells which of its signs it computes."""

    def __init__(self, tree: ast.Module, of: Collection[int]) -> None:
        self.number = {id(node): n for n, node in enumerate(ast.walk(tree)) if n in of}

    def told(self, n: int, value: ast.expr) -> ast.expr:
        return ast.Call(ast.Name(RECORDER, ast.Load()), [ast.Constant(n), value], [])

    def visit(self, node: ast.AST) -> Any:
        n = self.number.get(id(node))
        node = self.generic_visit(node)
        if n is None:
            return node
        if isinstance(node, ast.AugAssign):
            node.value = self.told(n, node.value)
            return node
        assert isinstance(node, ast.expr)
        return self.told(n, node)


@contextlib.contextmanager
def recorded(file: str, of: Collection[Site]) -> Iterator[set[int]]:
    """Within it a copy of a file's functions runs, which is unchanged but collects the numbers of signs that it reaches."""
    tree = ast.parse(source(file))
    tree = Recording(tree, {site.number for site in of}).visit(tree)
    reached: set[int] = set()

    def told(n: int, value: Any) -> Any:
        reached.add(n)
        return value

    setattr(builtins, RECORDER, told)
    try:
        with exchanged(file, tree, sorted({site.function for site in of})):
            yield reached
    finally:
        delattr(builtins, RECORDER)


@functools.cache
def imports(file: str) -> frozenset[str]:
    """The files of the algorithms that a file imports itself."""
    tree, found = ast.parse(source(file)), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            path = (node.module or "").split(".")[1:]
            found |= {"/".join([*path, end]) for end in ("__init__", *(name.name for name in node.names))}
            found.add("/".join(path))
    if file == "algorithms/optimise/__init__":  # which imports every file of its folder
        found |= {name for name in files() if name.startswith("algorithms/optimise/")}
    return frozenset(found.intersection(files()))


@functools.cache
def distance(start: str, file: str) -> int | None:
    """How many imports a file is away from another one; None where it does without."""
    seen, front, steps = {start}, {start}, 0
    while front and file not in seen:
        front = {name for one in front for name in imports(one)} - seen
        seen |= front
        steps += 1
    return steps if file in seen else None


class Probe(NamedTuple):
    """A case of a reference, run in one way."""

    name: str
    file: str  # the algorithm's, or that of a function which is tested by itself
    fields: dict[str, Any]
    compare: Callable[[], str]  # the first disagreement, or nothing
    turn: int = 0  # among the cases of an algorithm

    def wrong(self) -> str:
        try:
            return self.compare()
        except Exception as error:  # a mutant may fail in any way: what matters is that it is noticed
            return f"{type(error).__name__}: {error}"


def ranked(file: str, probes: Collection[Probe]) -> list[Probe]:
    """The cases that may compute something in a file: those that name it in a setting first, then by distance and turn."""
    near = [(distance(probe.file, file), probe) for probe in probes]
    chosen = [(file.rpartition("/")[2] not in p.fields.values(), d, p.turn, p) for d, p in near if d is not None]
    return [probe for *_, probe in sorted(chosen, key=lambda entry: entry[:3])]


class Verdict(NamedTuple):
    """Which flipped signs were noticed by whom, which were not, and where an unchanged copy disagreed."""

    noticed: dict[Site, str]
    unnoticed: dict[Site, str]
    spoilt: list[str]


def judge(file: str, of: Collection[Site], probes: Collection[Probe]) -> Verdict:
    """Flip each sign in turn, in cases that compute it, until one notices; first an unchanged copy must agree there."""
    left, noticed, runs, spoilt = list(of), dict[Site, str](), dict.fromkeys(of, 0), list[str]()
    for probe in probes:
        if not left:
            break
        with recorded(file, left) as reached:
            if wrong := probe.wrong():
                spoilt.append(f"{probe.name}: {wrong}")
                continue
        for site in [site for site in left if site.number in reached]:
            runs[site] += 1
            with flipped(site):
                wrong = probe.wrong()
            if wrong:
                noticed[site] = f"{probe.name}: {wrong}"
                left.remove(site)
    return Verdict(noticed, {site: f"{runs[site]} cases compute it, none notices" for site in left}, spoilt)
