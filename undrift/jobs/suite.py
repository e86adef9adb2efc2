"""The suites of papers: which runs a table or a figure needs, and the published numbers. See docs/reproduce.md."""

from __future__ import annotations

import csv
import functools
import itertools
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from undrift.core.errors import BadSetting, MissingData
from undrift.core.names import with_options
from undrift.data.load import load_dataset
from undrift.jobs.config import JobConfig
from undrift.jobs.plain_values import check_known
from undrift.jobs.shipped import PAPERS, SWEEPS
from undrift.jobs.sweep import KINDS

FOLDER = PAPERS
COMMANDS = {"run": "algorithm", "dp": "method", "pipe": "pipe"}  # to the kinds of jobs of a sweep
KEYS = (
    "title", "paper", "about", "command", "like", "settings", "set", "score", "columns", "rows", "claims", "tune", "small",
    "seeds", "paper_seeds", "stand_in", "only_columns", "only_rows", "computed", "whole", "links",
)  # fmt: skip
PLACES = ("title", "settings", "set", "score", "stand_in", "small")
COLUMN = (*PLACES, "rungs", "seeds", "tuned_in")
ROW = (*PLACES, "algorithm", "method", "grid", "tuned_as", "columns", "synchronous")
# What takes the place of data that are not at hand.
NOISE = {
    "mnist": "noise(side=28, channels=1)",
    "cifar10": "noise",
    "cifar100": "noise(classes=100)",
    "tiny-imagenet": "noise(side=64, classes=200)",
    "svhn": "noise",
    "retina": "synthetic-sites(size=128)",
    "shakespeare": "synthetic-text(roles=8)",
    "heart": "synthetic-patients",
    "brca": "synthetic-patients(sites=6, task=survival, inputs=39)",
}
NOISE_ROUNDS = 2
MOST_SEEDS = 10_000  # for one cell
BLANKS = ("from", "model", "whole", "at")  # parts of a column's score that its methods fill in


@dataclass(frozen=True)
class Score:
    """Which number of a run is compared."""

    field: str = "accuracy"  # a score of the records, or a path such as sites.test.super.dice.0
    take: str = "best"  # best or last over the rounds, or rounds: the first round with at least `target` per cent
    target: int = 0  # per cent, with rounds
    factor: float = 100.0  # from our number to the paper's
    higher: bool = True
    unit: str = "%"


@dataclass(frozen=True)
class Cell:
    """One number of a table: what to run for it, but for the seed and what is tuned."""

    column: str
    row: str
    command: str
    settings: Mapping[str, Any]
    fields: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    score: Score
    tuned_as: str  # the row whose picked fields it takes, often itself
    tuned_in: str  # and the column
    fixed: frozenset[str]  # fields that nothing picked may change
    rungs: tuple[float, ...]  # shares of the rounds that trials have
    missing: str = ""  # the data set that is not at hand, in whose place there is noise
    stand_in: str = ""  # why its data are not the paper's
    seeds: int | None = None  # at most so many
    synchronous: bool = False  # True: all clients would send in every step, where one of them makes all steps here

    def config(self, seed: int, fields: Mapping[str, Any], **settings: Any) -> JobConfig:
        """The settings of a run of this cell."""
        chosen = {**self.settings, "seed": seed, **settings, "set": {**self.fields, **fields}}
        return KINDS[COMMANDS[self.command]].resolve(chosen, {})

    def candidates(self) -> list[dict[str, Any]]:
        """Every combination of the grid."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]


@dataclass(frozen=True)
class Suite:
    """A table or a figure of a paper."""

    name: str
    about: Mapping[str, Any]  # the file's content
    columns: dict[str, str]  # key to title
    rows: dict[str, str]
    cells: list[Cell]  # that are asked for
    others: dict[tuple[str, str], Cell]  # every cell by column and row
    paper: dict[tuple[str, str], str]  # (row, column) to what was printed
    seeds: tuple[int, ...]
    keep: int  # one in so many goes on to the next rung
    validation: float  # the share of the training samples that trials are scored on
    trial: Mapping[str, Any]  # settings of trials only

    @property
    def links(self) -> list[float]:
        """Mbit/s of links for which a column's runs say how long their messages would take."""
        return [float(speed) for speed in self.about.get("links", [])]

    @property
    def claims(self) -> list[dict[str, Any]]:
        return list(self.about.get("claims", []))


def names_of_suites() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


@functools.cache
def read_suite(name: str) -> dict[str, Any]:
    """The content of a suite's file, on top of the one that it is `like`."""
    if (SWEEPS / f"{name}.toml").exists():
        raise BadSetting(f"{name} is a sweep; run it with 'undrift sweep {name}'")
    check_known("suite", [name], names_of_suites())
    content = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    check_known(f"key of the suite {name}", content, KEYS)
    if "like" not in content:
        return content
    base = {n: v for n, v in read_suite(content["like"]).items() if n != "claims"}
    whole = base | {
        n: v for n, v in content.items() if n not in ("columns", "rows", "settings", "set", "small", "score")
    }
    for table in ("columns", "rows"):
        kept = content.get(f"only_{table}", list(base.get(table, {})))
        check_known(f"{table[:-1]} of {content['like']}", kept, base[table])
        given = content.get(table, {})
        whole[table] = {n: base[table].get(n, {}) | given.get(n, {}) for n in dict.fromkeys([*kept, *given])}
    for table in ("settings", "set", "small", "score"):
        whole[table] = base.get(table, {}) | content.get(table, {})
    return whole


def read_paper(name: str) -> dict[tuple[str, str], str]:
    """The published numbers by row and column, as they were printed."""
    file = FOLDER / f"{name}.csv"
    if not file.exists():
        return {}
    header, *lines = csv.reader(file.read_text(encoding="utf-8").splitlines())
    return {
        (row, column): text.strip()
        for row, *texts in lines
        for column, text in zip(header[1:], texts, strict=True)
        if text.strip()
    }


def load_suite(
    name: str,
    scale: str = "full",
    columns: Sequence[str] = (),
    rows: Sequence[str] = (),
    seeds: int = 0,
    at_hand: bool = True,
) -> Suite:
    """Plan a suite; without `at_hand` nobody looks whether the data are there."""
    content, paper = read_suite(name), read_paper(name)
    check_known("scale", [scale], ("full", "small"))
    check_known(f"column of {name}", columns, content["columns"])
    check_known(f"method of {name}", rows, content["rows"])
    if not 0 <= seeds <= MOST_SEEDS:
        raise BadSetting(f"seeds must be at least 1 and at most {MOST_SEEDS}, not {seeds}")
    small = content.get("small", {}) if scale == "small" else {}
    cells, others = [], {}
    for column, row in itertools.product(content["columns"], content["rows"]):
        cell = _cell(content, column, row, small)
        asked = (not columns or column in columns) and (not rows or row in rows)
        if at_hand and (not columns or column in columns):
            cell = _with_noise(cell)
        others[column, row] = cell
        if asked and (not paper or content.get("whole") or (row, column) in paper):
            cells.append(cell)
    tune = content.get("tune", {}) | small.get("tune", {})
    count = seeds or len(small.get("seeds", content.get("seeds", [0, 1, 2])))
    across, down = ({n: str(t.get("title", n)) for n, t in content[kind].items()} for kind in ("columns", "rows"))
    return Suite(
        name, content, across, down, cells, others, paper, tuple(range(count)), int(tune.get("keep", 4)),
        float(tune.get("validation", 0.1)), tune.get("settings", {}),
    )  # fmt: skip


def _cell(content: Mapping[str, Any], column: str, row: str, small: Mapping[str, Any]) -> Cell:
    place, method = content["columns"][column], content["rows"][row]
    check_known(f"key of the column {column}", place, COLUMN)
    check_known(f"key of the method {row}", method, ROW)
    command = str(content.get("command", "run"))
    named = "algorithm" if command == "run" else "method"
    settings = {named: method.get(named, row), **content.get("settings", {}), **place.get("settings", {})}
    settings |= method.get("settings", {})
    fields = {**content.get("set", {}), **place.get("set", {}), **method.get("set", {})}
    fields |= method.get("columns", {}).get(column, {})
    grid = dict(method.get("grid", {}))
    rungs = place.get("rungs", content.get("tune", {}).get("rungs", (0.1, 0.25, 1.0)))
    if small:
        settings |= {**small.get("settings", {}), **place.get("small", {}), **method.get("small", {})}
        fields |= {n: v for n, v in small.get("set", {}).items() if n in fields}
        grid, rungs = {n: values[-2:] for n, values in grid.items() if n == "lr"}, (0.5,)
    score = {**content.get("score", {}), **place.get("score", {}), **method.get("score", {})}
    text = str(score.get("field", "accuracy"))
    for part in BLANKS:  # what a method puts into the place of {from}
        text = text.replace(f"{{{part}}}", str(score.pop(part, "")))
    check_known("key of a score", score, Score.__dataclass_fields__)
    fixed = frozenset(method.get("set", {}) if "tuned_as" in method else ())
    stand_in = str(method.get("stand_in", place.get("stand_in", content.get("stand_in", ""))))
    return Cell(
        column, row, command, settings, fields, grid, Score(**(score | {"field": text})),
        str(method.get("tuned_as", row)), str(place.get("tuned_in", column)), fixed, tuple(rungs), stand_in=stand_in,
        seeds=place.get("seeds"), synchronous=bool(method.get("synchronous", False)),
    )  # fmt: skip


def _with_noise(cell: Cell) -> Cell:
    """The cell on random samples of the right shape, for two rounds, where its data are not at hand."""
    dataset = str(cell.settings["dataset"])
    if there(dataset):
        return cell
    noise = NOISE[with_options(dataset)[0]]
    settings = {**cell.settings, "dataset": noise, "rounds": NOISE_ROUNDS, "eval_every": 1, "lr_drops": ""}
    if cell.command != "run":
        settings["steps"] = 2
    return replace(cell, settings=settings, missing=dataset, grid={})


@functools.cache
def there(dataset: str) -> bool:
    """Whether a data set can be read on this machine."""
    try:
        load_dataset(dataset)
    except MissingData:
        return False
    return True


def number_of(line: Mapping[str, Any], score: Score) -> float | None:
    """A finished run's number in the units of the paper; None where it has none, as after it diverged."""
    if score.take == "rounds":
        reached = line.get("reached", [])
        return float(reached[score.target - 1]) if score.target <= len(reached) else None
    value: Any = line["scores"].get(score.field, {}).get(score.take)
    if value is None and score.field.startswith("sites."):
        value = line["scores"]
        for part in score.field.split("."):
            if isinstance(value, list):
                value = statistics.fmean(value) if part == "mean" else value[int(part)]
            else:
                value = (value or {}).get(part)
            if value is None:
                break
    return None if value is None or line.get("stopped") == "diverged" else float(value) * score.factor


def list_suites() -> Iterator[str]:
    """What `undrift reproduce --list` prints: every suite with its size, and what is not on this machine."""
    for name in names_of_suites():
        suite = load_suite(name, at_hand=False)
        datasets = dict.fromkeys(str(cell.settings["dataset"]) for cell in suite.cells)
        missing = "" if suite.about.get("computed") else ", ".join(d for d in datasets if not there(d))
        text = f"{name:24} {suite.about['title']} ({len(suite.columns)} columns, {len(suite.rows)} methods)"
        yield text + (f"; not at hand: {missing}" if missing else "")


def check_suite(name: str) -> Suite:
    """Load a suite, and build the settings of every run of it; raise BadSetting for the first mistake."""
    suite = load_suite(name, at_hand=False)
    for cell in suite.cells:
        for fields in [{}, *cell.candidates()[:1], *cell.candidates()[-1:]]:
            try:
                cell.config(0, fields)
            except BadSetting as error:
                raise BadSetting(f"{name}, {cell.row} in {cell.column}: {error}") from error
        if cell.tuned_as not in suite.rows:
            raise BadSetting(f"{name}, {cell.row}: it is tuned as {cell.tuned_as}, which is no method of the suite")
        if cell.tuned_in not in suite.columns:
            raise BadSetting(f"{name}, {cell.column}: it is tuned in {cell.tuned_in}, which is no column of the suite")
    for row, column in suite.paper:
        check_known(f"method of {name}.csv", [row], suite.rows)
        check_known(f"column of {name}.csv", [column], suite.columns)
    return suite
