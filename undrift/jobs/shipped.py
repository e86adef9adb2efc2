"""What comes with the package, by name: sweeps for `undrift sweep`, papers' tables for `undrift reproduce`, and examples."""

from __future__ import annotations

import ast
import itertools
import shutil
import tomllib
from pathlib import Path
from typing import NamedTuple

from undrift.core.errors import BadSetting, UnknownName
from undrift.core.outline import PACKAGE

SWEEPS, PAPERS, EXAMPLES = (PACKAGE / "jobs" / "suites" / name for name in ("sweeps", "papers", "examples"))
FOLDERS = {
    "deploy": "systemd units and a Containerfile for a federation's server and nodes",
    "frameworks": "islands inside Accelerate, the Trainer of transformers and Lightning",
}


class Shipped(NamedTuple):
    """A sweep, a paper's table or an example."""

    name: str
    kind: str  # sweep, reproduce or example
    about: str
    files: tuple[Path, ...]


def list_shipped() -> list[Shipped]:
    """All that there is, sweeps first."""
    sweeps = [Shipped(f.stem, "sweep", first_comment(f), (f,)) for f in sorted(SWEEPS.glob("*.toml"))]
    tables = [Shipped(f.stem, "reproduce", title(f), files_beside(f)) for f in sorted(PAPERS.glob("*.toml"))]
    scripts = [Shipped(f.stem, "example", first_sentence(f), (f,)) for f in sorted(EXAMPLES.glob("*.py"))]
    folders = [
        Shipped(name, "example", about, tuple(sorted(f for f in (EXAMPLES / name).iterdir() if f.is_file())))
        for name, about in FOLDERS.items()
    ]
    return [*sweeps, *tables, *scripts, *folders]


def find(name: str) -> Shipped:
    """The entry of a name.

    >>> find("gradma-table1").kind, [file.name for file in find("gradma-table1").files]
    ('reproduce', ['gradma-table1.toml', 'gradma-table1.csv'])
    """
    entries = {entry.name: entry for entry in list_shipped()}
    if name not in entries:
        raise UnknownName("suite or example", name, entries)
    return entries[name]


def sweep_file(given: Path) -> Path:
    """The file of a sweep: a path, or the name of one that comes with the package.

    >>> sweep_file(Path("demo")).name
    'demo.toml'
    """
    ours = {file.stem: file for file in SWEEPS.glob("*.toml")}
    if given.exists():
        return given
    if str(given) in ours:
        return ours[str(given)]
    if (PAPERS / f"{given}.toml").exists():
        raise BadSetting(f"{given} is a paper's table; run it with 'undrift reproduce {given}'")
    if given.stem in ours:
        raise BadSetting(f"there is no file {given}; {given.stem} comes with the package: give its name alone")
    if given.suffix or given.parent != Path("."):
        raise BadSetting(f"there is no file {given}; 'undrift suites list' shows what comes with the package")
    raise UnknownName("sweep", str(given), ours)


def copy(name: str, folder: Path) -> list[Path]:
    """Copy an entry's files into a folder; nothing that is there is replaced."""
    files = find(name).files
    targets = [folder / file.name for file in files]
    for target in targets:
        if target.exists():
            raise BadSetting(f"{target} exists already; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file, target in zip(files, targets, strict=True):
        shutil.copyfile(file, target)
    return targets


def files_beside(file: Path) -> tuple[Path, ...]:
    """A table's file, and its published numbers where it has any."""
    numbers = file.with_suffix(".csv")
    return (file, numbers) if numbers.exists() else (file,)


def first_comment(file: Path) -> str:
    """The first sentence of the comment with which a file begins."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return " ".join(line.strip("# ") for line in lines).partition(". ")[0].removesuffix(".")


def title(file: Path) -> str:
    return str(tomllib.loads(file.read_text(encoding="utf-8"))["title"])


def first_sentence(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0].removesuffix(".")
