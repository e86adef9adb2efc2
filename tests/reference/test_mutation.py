"""The reference tests notice a wrong sign: each + and - of the algorithms' maths is flipped, one at a time.

A mutant must part from the reference in at least one case of its algorithm, or raise. One that does not is
named with its file, line and expression.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import undrift.algorithms.base as base
import undrift.algorithms.gradient_memory.memory as memory
from tests.reference.test_algorithms import CASES, CLASSES, Case, first_disagreement

SHARED = {base.__name__: "fedavg", memory.__name__: "gradma-s"}  # files that algorithms build on, and one that does
METHODS = {
    "companion_init", "broadcast", "gather", "companion_step", "client_init", "local_start", "local_step",
    "local_end", "rest", "move", "server_init", "server_step", "mem_red", "remember", "empty", "second_moment", "start",
    "sent", "sharp_gradient", "inertia",
}  # fmt: skip

# Mutants that compute the same: file, method and the flipped expression in its surroundings.
EQUIVALENT = {
    ("memory", "remember", "self.age[place].unsqueeze(-1)"): (
        "a dimension, not a sign: behind the only dimension of `age[place]` the places -1 and 1 are the same"
    ),
    ("base", "move", "work.k + 1"): "FedAvg does not look at k; SCAFFOLD and DOMO-S do, and part with it",
    (
        "gradma_w",
        "local_step",
        "work.active + active",
    ): "a count for the record, which tests/simulate/test_metrics.py checks",
}


class Site(NamedTuple):
    """A sign in a source file."""

    file: str
    line: int
    method: str
    number: int  # in the order of ast.walk over the file
    expression: str  # with its surroundings

    def __str__(self) -> str:
        return f"{self.file}.py:{self.line} {self.method}: {self.expression}"


def flipped(node: ast.AST) -> bool:
    """Flip the sign of this node, if it has one."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Add, ast.Sub)):
        node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return True
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node.op = ast.UAdd()
        return True
    return False


def tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def sites(module: str) -> Iterator[Site]:
    """Every sign inside the methods that belong to the maths."""
    source = tree(module)
    number = {id(node): n for n, node in enumerate(ast.walk(source))}
    for function in ast.walk(source):
        if not isinstance(function, ast.FunctionDef) or function.name not in METHODS:
            continue
        around = {id(child): node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(function):
            if flipped(copy.copy(node)):
                assert isinstance(node, (ast.BinOp, ast.AugAssign, ast.UnaryOp))
                shown = around[id(node)] if isinstance(node, ast.UnaryOp) else node
                file = module.rpartition(".")[2]
                yield Site(file, node.lineno, function.name, number[id(node)], ast.unparse(shown))


def compiled(source: ast.Module, name: str, instead: dict[str, str]) -> types.ModuleType:
    """A module of this source under its own name, which imports other modules in place of some."""
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and node.module in instead:
            node.module = instead[node.module]
    made = types.ModuleType(name)
    sys.modules[name] = made  # dataclasses look their module up
    exec(compile(ast.fix_missing_locations(source), name, "exec"), made.__dict__)
    return made


def mutated(site: Site, module: str) -> ast.Module:
    source = tree(module)
    assert flipped(list(ast.walk(source))[site.number])
    return source


def disagreement(kind: type[Any] | None, cases: list[Any], compare: Callable[..., str] = first_disagreement) -> str:
    """The first case in which a class parts from the reference, and how; nothing where it never does."""
    for case, execution in [(cases[0], "stacked"), (cases[0], "pool"), *((case, "stacked") for case in cases[1:])]:
        try:
            wrong = compare(case, execution, kind)
        except Exception as error:  # a mutant may fail in any way: what matters is that it is noticed
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            return f"{case}: {wrong}"
    return ""


def cases_of(algorithm: str) -> list[Case]:
    return [case for case in CASES if case.algorithm == algorithm]


MUTANTS = [
    pytest.param(algorithm, kind.__module__, site, id=f"{site.file}-{site.line}-{site.method}-{site.number}")
    for algorithm, kind in CLASSES.items()
    for site in sites(kind.__module__)
] + [
    pytest.param(algorithm, module, site, id=f"{site.file}-{site.line}-{site.method}-{site.number}")
    for module, algorithm in SHARED.items()
    for site in sites(module)
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "module", "site"), MUTANTS)
def test_a_flipped_sign_is_noticed(algorithm: str, module: str, site: Site) -> None:
    names = [f"mutant.{site.file}.{site.number}", f"mutant.{algorithm}.of.{site.number}"]
    try:
        made = compiled(mutated(site, module), names[0], {})
        kind = CLASSES[algorithm]
        if module in SHARED:
            made = compiled(tree(kind.__module__), names[1], {module: names[0]})
        wrong = disagreement(getattr(made, kind.__name__), cases_of(algorithm))
    finally:
        for name in names:
            sys.modules.pop(name, None)
    reason = EQUIVALENT.get((site.file, site.method, site.expression))
    if reason is None:
        assert wrong, f"{site}: flipping its sign changes nothing that the reference tests see"
    else:
        assert not wrong, f"{site} is listed as equivalent ({reason}), but {wrong}"


@pytest.mark.parametrize("algorithm", CLASSES)
def test_an_unchanged_copy_agrees_in_every_case(algorithm: str) -> None:
    """Otherwise the mutants would be noticed for nothing: the copy is made in the same way as they are."""
    kind = CLASSES[algorithm]
    names = ["copy.shared", "copy.algorithm"]
    copied = {module: names[0] for module, through in SHARED.items() if through == algorithm}
    try:
        for module in copied:
            compiled(tree(module), names[0], {})
        made = compiled(tree(kind.__module__), names[1], copied)
        assert disagreement(getattr(made, kind.__name__), cases_of(algorithm)) == ""
    finally:
        for name in names:
            sys.modules.pop(name, None)


def test_the_maths_of_every_file_is_mutated() -> None:
    """No method with signs is passed over, and what is listed as equivalent is still in the source."""
    modules = (*SHARED, *(kind.__module__ for kind in CLASSES.values()))
    found = [site for module in modules for site in sites(module)]
    assert len(found) == len(MUTANTS)
    places = {f"{site.file}.{site.method}" for site in found}
    assert places >= {
        "base.move", "base.local_end", "base.server_step", "fedprox.local_step", "fedavgm.server_step",
        "scaffold.local_step", "scaffold.local_end", "scaffold.gather",
        "gradma_s.server_step", "memory.mem_red", "memory.remember", "fedadam.server_step", "fedadam.second_moment",
        "fedyogi.second_moment", "fedadagrad.second_moment", "fedsam.sharp_gradient", "fedcm.local_step",
        "mofedsam.local_step", "fedavglm.local_end", "feddyn.local_step", "feddyn.local_end", "feddyn.gather",
        "mifa.local_end", "mifa.gather", "fedmim.local_step", "fedmim.companion_step", "domo.local_start", "domo.sent",
        "domo.companion_step", "domo.server_step", "gradma_w.local_step", "gradma_w.local_end",
    }  # fmt: skip
    assert EQUIVALENT.keys() <= {(site.file, site.method, site.expression) for site in found}
