"""The package keeps its shape: few rooms, functions that are named by verbs or nouns, comments that are no fragments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "undrift"
FILES = sorted(PACKAGE.rglob("*.py"))
IRREGULAR = {
    "begun", "bound", "built", "chosen", "done", "drawn", "found", "given", "gone", "grown", "held", "kept", "known", "laid",
    "left", "lost", "made", "meant", "met", "paid", "sent", "seen", "shown", "said", "spent", "taken", "told", "written",
}  # fmt: skip
ALIKE = {"seed", "need", "embed", "feed", "speed", "exceed", "proceed"}  # end like a participle, and are none


def functions(file: Path) -> Iterator[ast.FunctionDef]:
    """The functions of a file, without properties."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and not any("property" in ast.unparse(d) for d in node.decorator_list):
            yield node


def is_participle(name: str) -> bool:
    word = name.strip("_")
    return word in IRREGULAR or ("_" not in word and word.endswith("ed") and word not in ALIKE)


def test_there_are_at_most_sixteen_rooms() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
    assert len(entries) <= 16, sorted(entries)


def test_algorithms_stay_short_and_typed() -> None:
    most = {"base": 220, "scaffold": 65, "gradma_s": 90, "fedsm": 180}
    lines = {name: len((PACKAGE / f"algorithms/{name}.py").read_text().splitlines()) for name in most}
    assert all(lines[name] <= most[name] for name in most), lines
    assert sum(len(re.findall(r"\bAny\b", f.read_text())) for f in (PACKAGE / "algorithms").rglob("*.py")) <= 60


def test_no_function_is_named_by_a_participle_alone() -> None:
    """A stranger guesses `restore_held`, not `restored`; a participle before a noun, as in `named_leaves`, is fine."""
    assert is_participle("told") and is_participle("_restored")
    assert not (is_participle("seed") or is_participle("named_leaves"))
    found = [
        f"{file.relative_to(PACKAGE)}:{f.lineno} {f.name}"
        for file in FILES
        for f in functions(file)
        if is_participle(f.name)
    ]
    assert not found


def test_no_comment_is_a_fragment_that_begins_with_of() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}:{n} {line.strip()}"
        for file in FILES
        for n, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(r"#\s+of\b", line)
    ]
    assert not found
