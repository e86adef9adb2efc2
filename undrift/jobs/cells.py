"""The runs of a suite's cells: what is picked for each, its trials, and its final runs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from undrift.core.errors import BadSetting
from undrift.jobs.batch import Batch, NoTime, Run
from undrift.jobs.results import Line
from undrift.jobs.suite import Cell, Suite, load_suite
from undrift.jobs.tune import SEEDS, Spent, halve, mean_score


@dataclass
class Asked:
    """What the command was asked for."""

    suite: str
    out: Path
    columns: Sequence[str] = ()
    rows: Sequence[str] = ()
    seeds: int = 0
    tune: str = "none"  # none, grid, or a file of settings
    scale: str = "full"
    minutes: float = 0.0  # 0: as long as it takes
    pack: bool | None = None
    device: str = ""
    plan: bool = False  # print the plan and end

    def load(self) -> Suite:
        return load_suite(self.suite, self.scale, self.columns, self.rows, self.seeds)


@dataclass
class Work:
    """The runs of a suite, one cell after the other."""

    suite: Suite
    batch: Batch
    asked: Asked
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # a file's, by method or column/method
    picked: dict[str, dict[str, Any]] = field(default_factory=dict)  # by column/row
    spent: dict[str, Spent] = field(default_factory=dict)

    def do(self) -> None:
        """Run all cells; those that would be cut off wait, and the last one's reason is raised at the end."""
        waits: NoTime | None = None
        for cell in self.suite.cells if "computed" not in self.suite.about else ():
            try:
                self.batch.do(list(self.finals(cell, self.pick(cell) or {})))
            except NoTime as error:
                waits = error
        if waits is not None:
            raise waits

    def pick(self, cell: Cell, run: bool = True) -> dict[str, Any] | None:
        """The fields that are tuned for a cell: those of a file, those that win trials, or none.

        Without `run` nothing is run: None where trials are missing.
        """
        if (cell.tuned_in, cell.tuned_as) != (cell.column, cell.row):
            if cell.missing:
                return {}
            found = self.pick(self.suite.others[cell.tuned_in, cell.tuned_as], run)
            return None if found is None else {n: v for n, v in found.items() if n not in cell.fixed}
        name = f"{cell.column}/{cell.row}"
        if name not in self.picked:
            if self.asked.tune == "grid" and cell.grid and not cell.missing:
                found = self.search(cell, name, run)
                if found is None:
                    return None
                self.picked[name] = found
            else:
                self.picked[name] = dict(self.given.get(name, self.given.get(cell.row, {})))
        return self.picked[name]

    def search(self, cell: Cell, name: str, run: bool) -> dict[str, Any] | None:
        """Successive halving over the grid of a cell; None where a trial is missing and may not be run."""
        spent, rounds, before = Spent(), cell.config(0, {}).rounds, len(self.batch.results.lines)

        def score(candidates: list[dict[str, Any]], length: int) -> list[float | None]:
            runs = [self.trial(cell, fields, seed, length) for fields in candidates for seed in SEEDS]
            lines = self.batch.do(runs) if run else [self.batch.results.lines[run.key] for run in runs]
            spent.add(lines, rounds)
            return [mean_score(lines[n : n + len(SEEDS)], take="best") for n in range(0, len(lines), len(SEEDS))]

        try:
            best = halve(cell.candidates(), rounds, score, cell.rungs, self.suite.keep)
        except KeyError:
            return None
        self.spent[name] = spent
        if best is None:
            best = cell.candidates()[0]
            self.batch.say(f"{name}: every setting diverged or failed; the first one stands for them")
        if len(self.batch.results.lines) > before:
            self.batch.say(f"{name}: {best}; {len(cell.candidates())} settings, {spent}")
        return best

    def trial(self, cell: Cell, fields: Mapping[str, Any], seed: int, rounds: int) -> Run:
        held_out = {"rounds": rounds, "val_fraction": self.suite.validation}
        usual = int(cell.settings.get("eval_every", 1))
        held_out["eval_every"] = max(usual, rounds // 10)  # ten looks are enough to pick
        config = cell.config(seed, fields, **held_out, **self.suite.trial)
        return Run(cell.command, config, self.about(cell) | {"trial": True})

    def finals(self, cell: Cell, fields: Mapping[str, Any]) -> Iterator[Run]:
        for seed in self.suite.seeds[: cell.seeds]:
            yield Run(cell.command, cell.config(seed, fields), self.about(cell))

    def about(self, cell: Cell) -> dict[str, Any]:
        return {"suite": self.suite.name, "column": cell.column, "row": cell.row}

    def lines(self, cell: Cell) -> list[Line]:
        """The finished final runs of a cell; none before its trials are over."""
        picked = self.pick(cell, run=False)
        if picked is None or "computed" in self.suite.about:
            return []
        found = [self.batch.results.get(run.key) for run in self.finals(cell, picked)]
        return [line for line in found if line is not None]


def read_picks(tune: str) -> dict[str, dict[str, Any]]:
    """The fields of a file that `undrift tune` or `reproduce` wrote, by method or by column/method."""
    if tune in ("none", "grid"):
        return {}
    try:
        content = tomllib.loads(Path(tune).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadSetting(
            f"--tune takes grid, none, or a file that undrift tune wrote, not {tune!r}: {error}"
        ) from error
    if "picked" in content:
        return {str(name): dict(fields) for name, fields in content["picked"].items()}
    if "sweep" in content:
        return {str(name): dict(fields) for name, fields in content["sweep"].get("only", {}).items()}
    name = content.get("algorithm", content.get("method"))
    if name is None:
        raise BadSetting(f"{tune} names no method; give a file that undrift tune or undrift reproduce wrote")
    return {str(name): dict(content.get("set", {}))}
