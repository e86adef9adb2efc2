"""The documents say what is there: fields, quoted lines, links and commands."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from undrift.algorithms.checks import check_algorithm
from undrift.algorithms.optimise import NAMES as OPTIMIZERS
from undrift.algorithms.optimise import LocalOptimizer
from undrift.cli.parser import parse
from undrift.cli.settings import read_settings
from undrift.core.names import names, parse_value
from undrift.core.papers import papers_of
from undrift.dataparallel import command as parallel
from undrift.jobs.config import FIELDS, from_mapping
from undrift.jobs.registry import algorithm_class, make_algorithm
from undrift.jobs.shipped import SWEEPS, find, sweep_file
from undrift.jobs.sweep import plan

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ALGORITHMS = ROOT / "undrift" / "algorithms"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
UNREPEATED = ("momentum2", "epsilon", "warm_steps", "cosine_steps")  # fields that algorithms' pages need not repeat
PAGES = [path for path in TOP if path.exists()] + sorted(DOCS.rglob("*.md"))
ADRS = sorted(path for path in (DOCS / "adr").glob("*.md") if path.name != "README.md")


def title(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def paper_suites() -> dict[str, set[str]]:
    """The algorithms of each suite that holds a paper's settings; every suite must be accepted as it is."""
    planned = {sweep.stem: plan(sweep)[0] for sweep in SWEEPS.glob("*.toml")}
    own = ("demo", "example", "quick", "what-decides")
    return {
        name: {job.config.algorithm for job in jobs if job.kind == "algorithm"}
        for name, jobs in planned.items()
        if name not in own and not name.endswith("-grid")  # what `undrift tune` tried for a suite
    }


def page(name: str) -> str:
    return (DOCS / "algorithms" / f"{name}.md").read_text()


def field_rows(name: str) -> dict[str, str]:
    """The default that a page's table gives for each field."""
    section = page(name).partition("## Fields")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", section, re.MULTILINE))


def code_rows(text: str) -> list[tuple[str, str]]:
    """(code, file) of each row in the tables "Paper | Code | File"."""
    tables = re.findall(r"^\| Paper \| Code \| File \|\n.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    lines = "".join(tables).splitlines()
    rows = [re.fullmatch(r"\| .+? \| `(.+)` \| (\S+) \|", line) for line in lines]
    assert all(rows), "a row is not | words | `code` | file |"
    return [(row[1], row[2]) for row in rows if row]


def quotations() -> list[tuple[str, str, str]]:
    """(page, file, block) of each block that says where it was quoted from."""
    block = re.compile(r"<!-- quoted from (\S+) -->\n```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(title(path), *found) for path in PAGES for found in block.findall(path.read_text())]


def stands(block: str, source: str) -> bool:
    """Whether a block's lines follow each other in the source, all moved by one indentation; `...` stands for lines left out."""
    texts = source, textwrap.dedent(block)
    lines, quoted = ([line.rstrip() for line in text.splitlines() if line.strip()] for text in texts)
    parts = [list(part) for left, part in itertools.groupby(quoted, lambda line: line.strip() == "...") if not left]
    for left in {line[: len(line) - len(line.lstrip())] for line in lines}:
        at = 0
        for part in parts:
            moved = [left + line for line in part]
            at = next((n for n in range(at, len(lines)) if lines[n : n + len(part)] == moved), len(lines)) + len(part)
        if at <= len(lines):
            return True
    return False


def commands() -> list[tuple[str, str]]:
    """Every `undrift` command in a sh block, with the page that it stands on."""
    found = []
    blocks = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for path in PAGES:
        for block in blocks.findall(path.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                while words and re.fullmatch(r"\w+=.*", words[0]):
                    words = words[1:]
                if words and words[0] == "torchrun":
                    words = words[words.index("-m") + 1 :]
                if words and words[0] in ("undrift", ".venv/bin/undrift"):
                    found.append((title(path), shlex.join(words[1:])))
    return found


@pytest.mark.parametrize("name", names("algorithms"))
def test_every_algorithm_has_a_page_with_all_its_fields_and_defaults(name: str) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(algorithm_class(name))}
    fields = {n: list(v) if isinstance(v, tuple) else v for n, v in defaults.items()}  # TOML has lists only
    shown = {field: parse_value(default.strip()) for field, default in field_rows(name).items()}
    common = {
        f.name: f.default for f in dataclasses.fields(LocalOptimizer)
    }  # with their own page, where they are as there
    assert shown == {n: v for n, v in fields.items() if n in shown or common.get(n) != v or n not in UNREPEATED}


def test_the_page_of_base_optimisers_has_all_files_and_fields() -> None:
    text = (DOCS / "optimisers.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", text.partition("## Fields")[2], re.MULTILINE))
    shown = {field: parse_value(default.strip()) for field, default in rows.items()}
    assert shown == {f.name: f.default for f in dataclasses.fields(LocalOptimizer)}
    files = re.findall(r"^\| `(\w+)` \|", text.partition("## Fields")[0], re.MULTILINE)
    assert sorted(files) == list(OPTIMIZERS)


@pytest.mark.parametrize("name", names("algorithms"))
def test_a_page_has_its_parts(name: str) -> None:
    text = page(name)
    assert "## The paper beside the code\n" in text
    for part in ("Fields", "Differences", "Cost per client and round", "Identities", "Run it"):
        assert f"## {part}\n" in text
    assert f"undrift run --algorithm {name} " in text
    assert f"undrift cite {name}\n" in text
    assert f"{name}.md" in (DOCS / "algorithms" / "README.md").read_text()


@pytest.mark.parametrize("name", names("algorithms"))
def test_a_page_links_the_suites_that_run_the_method(name: str) -> None:
    running = {suite for suite, algorithms in paper_suites().items() if name in algorithms}
    linked = re.findall(r"\(\.\./\.\./undrift/jobs/suites/sweeps/(\S+?)\.toml\)", page(name))
    assert running and set(linked) == running


@pytest.mark.parametrize("name", names("algorithms"))
def test_quoted_lines_stand_in_the_algorithms_file(name: str) -> None:
    rows = code_rows(page(name))
    own = f"{name.replace('-', '_')}.py"
    assert own in {file for _, file in rows}
    for code, file in rows:
        source = [line.strip() for line in (ALGORITHMS / file).read_text().splitlines()]
        stands = [line for line in source if line == code or line.startswith(f"{code}  # ")]
        assert stands, f"{code!r} is not in {file}"


def test_there_are_quoted_blocks() -> None:
    assert len(quotations()) > 10


@pytest.mark.parametrize(("where", "file", "block"), quotations())
def test_a_quoted_block_stands_in_its_file(where: str, file: str, block: str) -> None:
    assert stands(block, (ROOT / file).read_text()), (
        f"{where} quotes {file} with other lines, or leaves some out without ..."
    )


def test_a_quotation_that_drops_moves_or_changes_a_line_is_noticed() -> None:
    source = "class A:\n    a = 1\n\n    def f(self):\n        b = 2\n        return b\n"
    assert stands("a = 1\n\n\ndef f(self):\n    b = 2\n", source) and stands("a = 1\n...\n    return b\n", source)
    wrong = "a = 1\nb = 2\n", "a = 1\n    return b\n", "return b\n...\na = 1\n", "def f(self):\nb = 2\n", "b = 3\n"
    assert not any(stands(block, source) for block in wrong)


def test_what_a_block_imports_is_there() -> None:
    blocks = [
        block
        for path in PAGES
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    ]
    imports = [
        found for block in blocks for found in re.findall(r"^from (undrift\S*) import (\w+)$", block, re.MULTILINE)
    ]
    assert imports and all(hasattr(importlib.import_module(module), name) for module, name in imports)


@pytest.mark.parametrize("path", PAGES, ids=title)
def test_relative_links_resolve(path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, part = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), f"{title(path)} links to {link}"
        if part:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert part in anchors, f"{title(path)} links to {link}"


def test_every_page_is_in_the_index() -> None:
    index, decisions = (DOCS / "README.md").read_text(), (DOCS / "adr" / "README.md").read_text()
    for path in DOCS.glob("*.md"):
        assert path.name == "README.md" or f"({path.name})" in index
    assert len({path.name[:5] for path in ADRS}) == len(ADRS)  # no number is given twice
    for path in ADRS:
        assert re.match(r"\d{4}-", path.name) and f"| {int(path.name[:4])} | [" in decisions
        assert f"({path.name})" in decisions


@pytest.mark.parametrize("path", ADRS, ids=title)
def test_a_decision_has_context_choice_and_price(path: Path) -> None:
    assert re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE) == ["Context", "Choice", "Price"]


def test_there_are_commands() -> None:
    assert len(commands()) > 15


@pytest.mark.parametrize(("where", "line"), commands())
def test_commands_parse(where: str, line: str) -> None:
    """The parser takes it; a run's settings and fields exist and have values that are allowed."""
    arguments = parse(shlex.split(line))
    if arguments.command == "run":
        settings = {n: v for n in FIELDS if n != "set" and (v := getattr(arguments, n)) is not None}
        if arguments.local:
            settings["algorithm"] = f"{arguments.local}+{arguments.server}"
        chosen = from_mapping(settings)
        pairs = [pair.split("=", 1) for pair in arguments.set or []]
        fields = {name: parse_value(value) for name, value in pairs}
        if ":" not in chosen.algorithm and arguments.config is None and not arguments.resume:
            built = make_algorithm(algorithm_class(chosen.algorithm), chosen.algorithm, fields, FIELDS)
            check_algorithm(built, chosen.clients, chosen.cohort)
    if arguments.command in ("dataparallel", "dp"):
        config, settings = read_settings(arguments, parallel.FIELDS)
        parallel.from_mapping(parallel.plain(config) | settings)
    if arguments.command == "cite":
        assert papers_of(arguments.name)
    if arguments.command in ("run", "sweep", "tune"):
        file = arguments.config if arguments.command == "run" else arguments.file
        if arguments.command != "run" and file.parts[0] != "runs":
            file = sweep_file(file)
        assert file is None or file.parts[0] == "runs" or (ROOT / file).exists()
    if arguments.command == "suites" and arguments.name:
        assert find(arguments.name)
    if arguments.command == "reproduce" and arguments.suite:
        assert find(arguments.suite).kind == "reproduce"


def test_badges_are_those_of_this_checkout() -> None:
    spec = importlib.util.spec_from_file_location("badges", DOCS / "badges" / "badges.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    covered = re.search(r'"coverage: (\d+%)"', (DOCS / "badges" / "coverage.svg").read_text())
    for name, picture in module.badges(covered[1] if covered else "").items():
        assert (DOCS / "badges" / name).read_text() == picture, f"{name} is old; run docs/badges/badges.py"


def test_tests_that_a_page_names_are_there_and_each_attack_has_one_without_real_processes() -> None:
    rows = [line for line in (ROOT / "docs" / "security.md").read_text().splitlines() if "::test_" in line]
    assert len(rows) > 10
    for row in rows:
        quick = []
        for file, name in re.findall(r"`(\w+\.py)::(test_\w+)`", row):
            source = (ROOT / "tests" / "deploy" / file).read_text()
            found = re.search(rf"\n((?:@.*\n(?:    .*\n|\).*\n|\]\n)*)*)def {name}\(", source)
            assert found, name
            quick.append("mark.system" not in found[1])
        assert any(quick), row
