"""The reference tests of the personal methods notice a wrong sign too: see test_mutation.py."""

from __future__ import annotations

import ast
import copy
import sys

import pytest

from tests.reference.test_mutation import Site, compiled, flipped, mutated, tree
from tests.reference.test_personal import CASES, agree
from undrift.algorithms import pulled
from undrift.jobs.registry import algorithm_class

FILES = ["softpull", "ft", "apfl", "per-fedavg", "pfedme", "fedsm"]
MODULES = {algorithm_class(name).__module__: name for name in FILES} | {pulled.__name__: "fedsm"}  # which builds on it
METHODS = {"pulled", "gather", "local_end", "local_step", "client_init", "serves"}


def sites(module: str) -> list[Site]:
    """Every sign between two terms inside the methods that belong to the maths."""
    source = tree(module)
    number = {id(node): n for n, node in enumerate(ast.walk(source))}
    return [
        Site(module.rpartition(".")[2], node.lineno, function.name, number[id(node)], ast.unparse(node))
        for function in ast.walk(source)
        if isinstance(function, ast.FunctionDef) and function.name in METHODS
        for node in ast.walk(function)
        if isinstance(node, ast.BinOp) and flipped(copy.copy(node))
    ]


MUTANTS = [
    pytest.param(module, site, id=f"{site.file}-{site.line}-{site.method}-{site.number}")
    for module in MODULES
    for site in sites(module)
]


def differs(name: str, kind: type[object]) -> bool:
    """Whether a class parts from the reference in some case, or fails."""
    for case in CASES:
        if case.name == name:
            try:
                agree(case, "stacked", kind)
            except Exception:  # a mutant may fail in any way: what matters is that it is noticed
                return True
    return False


@pytest.mark.parametrize(("module", "site"), MUTANTS)
def test_a_flipped_sign_is_noticed(module: str, site: Site) -> None:
    kind = algorithm_class(MODULES[module])
    names = [f"mutant.{site.file}.{site.number}", f"mutant.of.{site.file}.{site.number}"]
    try:
        made = compiled(mutated(site, module), names[0], {})
        if module != kind.__module__:
            made = compiled(tree(kind.__module__), names[1], {module: names[0]})
        assert differs(MODULES[module], getattr(made, kind.__name__)), site
    finally:
        for name in names:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("name", FILES)
def test_an_unchanged_copy_agrees(name: str) -> None:
    kind = algorithm_class(name)
    try:
        made = compiled(tree(kind.__module__), "copy.personal", {})
        assert not differs(name, getattr(made, kind.__name__))
    finally:
        sys.modules.pop("copy.personal", None)


def test_the_maths_of_every_file_is_mutated() -> None:
    found = {f"{site.file}.{site.method}" for module in MODULES for site in sites(module)}
    assert found >= {
        "pulled.pulled", "pulled.local_end", "softpull.gather", "ft.local_end", "apfl.local_step", "apfl.serves",
        "per_fedavg.local_step",
        "per_fedavg.serves", "pfedme.local_step", "fedsm.local_step",
    }  # fmt: skip
