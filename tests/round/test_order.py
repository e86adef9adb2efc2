"""One round: the order of its calls stands in one place of the package, and every way of asking goes through it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import undrift
from undrift.round import order

PACKAGE = Path(undrift.__file__).parent
ONCE = ("broadcast", "gather", "server_step", "reply", "RoundRecord", "Cohort")


def calls(source: str) -> Counter[str]:
    """How often each of these names is called, whatever stands before the dot."""
    nodes = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = [f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in nodes]
    return Counter(name for name in names if name in ONCE)


def test_every_call_of_a_round_stands_once() -> None:
    files = [file for file in PACKAGE.rglob("*.py") if "algorithms" not in file.relative_to(PACKAGE).parts]
    found = sum((calls(file.read_text()) for file in files), Counter[str]())
    assert found == Counter(dict.fromkeys(ONCE, 1))


def test_a_second_call_would_be_seen() -> None:
    assert calls("a.b.gather(1)\nCohort(2)") == Counter({"gather": 1, "Cohort": 1})


def test_the_order_is_short() -> None:
    tree = ast.parse(Path(order.__file__).read_text())
    (play,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "play")
    assert play.end_lineno is not None and play.end_lineno - play.lineno < 100
