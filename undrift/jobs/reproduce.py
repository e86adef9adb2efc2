"""`undrift reproduce`: runs what a paper's table or figure needs, and says how our numbers compare with the published ones."""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from undrift.core import stopping
from undrift.core.errors import BadSetting, UndriftError
from undrift.core.files import make_folder, replaced, writing
from undrift.jobs.batch import Batch, Run, Say
from undrift.jobs.results import Line, Results
from undrift.jobs.suite import Cell, Suite, load_suite, number_of
from undrift.jobs.tune import SEEDS, Spent, halve, mean_score
from undrift.pipeline.engines import schedule_of
from undrift.pipeline.schedule import Schedule
from undrift.pipeline.straggle import finishing_time, increase
from undrift.report import suite_page
from undrift.report.verdicts import Number, check_claim, column_correlation, judge, over_seeds, read_number

BATCHES = 500  # of a schedule that is played in virtual time


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
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # picked fields of a file, by method or column/method
    picked: dict[str, dict[str, Any]] = field(default_factory=dict)  # by column/row
    spent: dict[str, Spent] = field(default_factory=dict)

    def do(self) -> None:
        for cell in self.suite.cells if "computed" not in self.suite.about else ():
            self.batch.do(list(self.finals(cell, self.pick(cell))))

    def pick(self, cell: Cell) -> dict[str, Any]:
        """The fields that are tuned for a cell: those of a file, those that win trials, or none."""
        name = f"{cell.column}/{cell.row}"
        if cell.tuned_as != cell.row:
            like = next((c for c in self.suite.cells if (c.column, c.row) == (cell.column, cell.tuned_as)), None)
            return {} if like is None else {n: v for n, v in self.pick(like).items() if n not in cell.fixed}
        if name not in self.picked:
            if self.asked.tune == "grid" and cell.grid and not cell.missing:
                self.picked[name] = self.search(cell, name)
            else:
                self.picked[name] = dict(self.given.get(name, self.given.get(cell.row, {})))
        return self.picked[name]

    def search(self, cell: Cell, name: str) -> dict[str, Any]:
        """Successive halving over the grid of a cell."""
        spent = self.spent.setdefault(name, Spent())
        rounds = cell.config(0, {}).rounds

        def score(candidates: list[dict[str, Any]], length: int) -> list[float | None]:
            runs = [self.trial(cell, fields, seed, length) for fields in candidates for seed in SEEDS]
            lines = self.batch.do(runs)
            spent.add(lines, rounds)
            return [mean_score(lines[n : n + len(SEEDS)]) for n in range(0, len(lines), len(SEEDS))]

        best = halve(cell.candidates(), rounds, score, cell.rungs, self.suite.keep)
        self.batch.say(f"{name}: {best}; {len(cell.candidates())} settings, {spent}")
        return best

    def trial(self, cell: Cell, fields: Mapping[str, Any], seed: int, rounds: int) -> Run:
        held_out = {"rounds": rounds, "val_fraction": self.suite.validation}
        usual = int(cell.settings.get("eval_every", 1))
        held_out["eval_every"] = max(usual, min(rounds, rounds // 20 or 1))  # twenty looks are enough to pick
        config = cell.config(seed, fields, **held_out, **self.suite.trial)
        return Run(cell.command, config, self.about(cell) | {"trial": True})

    def finals(self, cell: Cell, fields: Mapping[str, Any]) -> Iterator[Run]:
        for seed in self.suite.seeds:
            yield Run(cell.command, cell.config(seed, fields), self.about(cell))

    def about(self, cell: Cell) -> dict[str, Any]:
        return {"suite": self.suite.name, "column": cell.column, "row": cell.row}

    def lines(self, cell: Cell) -> list[Line]:
        """The finished final runs of a cell."""
        name = f"{cell.column}/{cell.tuned_as}"
        if self.asked.tune == "grid" and name not in self.picked and self.tuned(cell):
            return []  # its trials are not over
        found = [self.batch.results.get(run.key) for run in self.finals(cell, self.pick(cell))]
        return [line for line in found if line is not None]

    def tuned(self, cell: Cell) -> bool:
        like = [c for c in self.suite.cells if (c.column, c.row) == (cell.column, cell.tuned_as)]
        return any(c.grid and not c.missing for c in like)


def reproduce(asked: Asked, say: Say) -> bool:
    """Run what is not finished, and write SUITE.json and SUITE.html; return whether a run failed."""
    suite = asked.load()
    results = Results(asked.out, f"{suite.name}-small" if asked.scale == "small" else suite.name)
    work = Work(suite, Batch(results, say, asked.pack, asked.device), asked, read_picks(asked.tune))
    for line in plan_of(work):
        say(line)
    say(f"  results go to {results.file}, pages to {asked.out / 'index.html'}")
    if asked.plan:
        return False
    with stopping.within(asked.minutes * 60 or float("inf")) as left:
        try:
            work.do()
        except stopping.Stopped:
            if left() > 0:
                raise
            say(f"stopped after {asked.minutes:g} minutes; the same command goes on")
    verdict = write_verdict(work)
    for line in suite_page.as_text(verdict):
        say(line)
    for name, message in work.batch.failed.items():
        say(f"{name} failed: {message}")
    return bool(work.batch.failed)


def read_picks(tune: str) -> dict[str, dict[str, Any]]:
    """The fields of a file that `undrift tune` or `reproduce` wrote, by method or by column/method."""
    if tune in ("none", "grid"):
        return {}
    try:
        content = tomllib.loads(Path(tune).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadSetting(f"--tune takes grid, none, or a file that undrift tune wrote, not {tune!r}: {error}") from error
    if "picked" in content:
        return {str(name): dict(fields) for name, fields in content["picked"].items()}
    if "sweep" in content:
        return {str(name): dict(fields) for name, fields in content["sweep"].get("only", {}).items()}
    name = content.get("algorithm", content.get("method"))
    if name is None:
        raise BadSetting(f"{tune} names no method; give a file that undrift tune or undrift reproduce wrote")
    return {str(name): dict(content.get("set", {}))}


def plan_of(work: Work) -> Iterator[str]:
    """What there is to do, how long it takes run after run, and how much memory; measured on one run of each column."""
    suite, results = work.suite, work.batch.results
    yield f"{suite.name}: {suite.about['title']}; {len(suite.columns)} columns, {len(suite.rows)} methods, {len(suite.cells)} cells here"
    by_column: dict[str, list[Cell]] = defaultdict(list)
    for cell in suite.cells:
        by_column[cell.column].append(cell)
    total = 0.0
    for column, cells in by_column.items():
        if "computed" in suite.about:
            break
        first = cells[0]
        run = next(work.finals(first, {}))
        finals = [results.get(r.key) for cell in cells for r in work.finals(cell, work.given.get(cell.row, {}))]
        rounds = [run.config.rounds] * sum(line is None for line in finals)
        trials = sum(trial_rounds(work, cell) for cell in cells if cell.tuned_as == cell.row) if work.asked.tune == "grid" else 0
        text = f"  {column}: {len(cells)} cells, {len(finals)} runs of {run.config.rounds} rounds"
        text += f", up to {trials} rounds of trials" if trials else ""
        text += f"; {first.missing} is not at hand: {first.settings['dataset']} for {run.config.rounds} rounds" if first.missing else ""
        if sum(rounds) + trials:
            try:
                cost = work.batch.cost(run)
                seconds = cost.seconds * (sum(rounds) + trials)
                total += seconds
                text += f"; about {duration(seconds)} run after run, {cost.memory / 1e9:.2f} GB a run"
            except UndriftError as error:
                text += f"; not measured: {error}"
        else:
            text += "; all done"
        yield text
    yield f"  about {duration(total)} run after run; what was picked and packed makes it less" if total else "  nothing is left to do"


def trial_rounds(work: Work, cell: Cell) -> int:
    """How many rounds the search of a cell takes, if nothing of it is done."""
    if not cell.grid or cell.missing:
        return 0
    rounds, left, whole = cell.config(0, {}).rounds, len(cell.candidates()), 0.0
    for share in cell.rungs:
        if left > 1:
            whole, left = whole + left * share * rounds, -(-left // work.suite.keep)
    return round(whole * len(SEEDS))


def duration(seconds: float) -> str:
    """
    >>> duration(40), duration(600), duration(9000)
    ('40 s', '10 min', '2.5 h')
    """
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def write_verdict(work: Work) -> dict[str, Any]:
    """Compare, and write SUITE.json, SUITE.html, SUITE-picked.toml and index.html."""
    verdict, out = verdict_of(work), work.asked.out
    name = work.batch.results.file.stem
    files = {f"{name}.json": json.dumps(verdict, indent=1, allow_nan=False) + "\n", f"{name}.html": suite_page.page(verdict)}
    if picked := {n: fields for n, fields in work.picked.items() if fields}:
        files[f"{name}-picked.toml"] = tomli_w.dumps({"picked": picked})
    with writing(out):
        make_folder(out)
        for file, text in files.items():
            with replaced(out / file) as temporary:
                temporary.write_text(text, encoding="utf-8")
        with replaced(out / "index.html") as temporary:
            temporary.write_text(suite_page.index(out), encoding="utf-8")
    return verdict


def verdict_of(work: Work) -> dict[str, Any]:
    """The comparison as plain data: every cell, every column's rank correlation, every claim, and what it cost."""
    suite = work.suite
    paper_seeds = int(suite.about.get("paper_seeds", 3))
    paper = {place: read_number(text, paper_seeds) for place, text in suite.paper.items()}
    ours: dict[tuple[str, str], Number] = {}
    lines = {(cell.row, cell.column): work.lines(cell) for cell in suite.cells}
    cells = {(cell.row, cell.column): cell for cell in suite.cells}
    for place, own in lines.items():
        cell = cells[place]
        if own and not cell.missing:
            why = "-" if cell.score.take == "rounds" else "diverge"
            ours[place] = over_seeds([number_of(line, cell.score) for line in own], why)
    ours |= {place: Number(value, None, 1) for place, value in computed(suite).items() if place in cells}
    higher = suite.cells[0].score.higher if suite.cells else True
    signed = {p: n if higher or n.mean is None else n._replace(mean=-n.mean) for p, n in ours.items()}
    printed = {p: n if higher or n.mean is None else n._replace(mean=-n.mean) for p, n in paper.items()}
    comparable = work.asked.scale == "full"
    verdicts = judge(signed, printed, lambda place: comparable and not cells[place].stand_in)
    chance = 10.0 if higher else 0.0
    correlations = {c: column_correlation(c, signed, printed) for c in suite.columns}
    known = [value for value in correlations.values() if value is not None]
    content: dict[str, Any] = {
        "suite": work.batch.results.file.stem, "title": suite.about["title"], "about": suite.about.get("about", ""),
        "paper": suite.about.get("paper", ""), "scale": work.asked.scale, "tune": tuned_with(work.asked.tune), "unit": unit_of(suite),
        "columns": suite.columns, "rows": suite.rows, "cells": [],
        "rank_correlation": {"columns": correlations, "mean": sum(known) / len(known) if known else None},
        "claims": [
            {"text": claim["text"]} | check_claim(claim, ours, higher, chance)
            | {"in_paper": check_claim(claim, paper, higher, chance)["found"] if paper else ""}
            for claim in suite.claims
        ],
    }  # fmt: skip
    for place, cell in cells.items():
        content["cells"].append(cell_of(work, cell, ours.get(place), paper.get(place), verdicts.get(place), lines[place]))
    every = [line for own in lines.values() for line in own]
    content["devices"] = sorted({line["device"] for line in every})
    content["commits"] = sorted({line["commit"] for line in every if line["commit"]})
    content["seconds"] = round(sum({line["key"]: line["seconds"] for line in every}.values()), 1)
    spent = [s for s in work.spent.values() if s.runs]
    content["spent_on_tuning"] = {"trials": sum(s.runs for s in spent), "full_runs": round(sum(s.whole for s in spent), 2),
                                  "seconds": round(sum(s.seconds for s in spent), 1)}  # fmt: skip
    return content


def cell_of(
    work: Work, cell: Cell, ours: Number | None, paper: Number | None, verdict: Any, lines: Sequence[Line]
) -> dict[str, Any]:
    """One cell as data."""
    found: dict[str, Any] = {"row": cell.row, "column": cell.column, "ours": _number(ours), "paper": _number(paper)}
    state = "not run" if not lines and ours is None else "run"
    if cell.missing:
        state = f"only for {cell.settings['rounds']} rounds on {cell.settings['dataset']}: {cell.missing} is not at hand"
    found["verdict"] = state if verdict is None else verdict.word
    if verdict is not None:
        found |= {"difference": verdict.difference, "errors": verdict.errors, "order": verdict.order}
        if not cell.score.higher:  # the verdict was made on negative numbers
            found |= {n: -found[n] for n in ("difference", "errors") if found[n] is not None}
    if cell.stand_in:
        found["stand_in"] = cell.stand_in
    if lines:
        found["picked"] = work.pick(cell)
        found["seeds"] = [line["seed"] for line in lines]
        found["values"] = [number_of(line, cell.score) for line in lines]
        found["curves"] = [line["curve"] for line in lines if line.get("curve")]
    return found


def _number(number: Number | None) -> dict[str, Any] | None:
    return None if number is None else number._asdict()


def unit_of(suite: Suite) -> str:
    return suite.cells[0].score.unit if suite.cells else "%"


def tuned_with(tune: str) -> str:
    return tune if tune in ("none", "grid") else Path(tune).name


def computed(suite: Suite) -> dict[tuple[str, str], float]:
    """Numbers from schedules in virtual time, without training: the slowdown by slow devices, or the speed-up over backpropagation."""
    what, found = suite.about.get("computed"), {}
    for cell in suite.cells if what else ():
        own: dict[str, Any] = {"method": "dsp", "queues": "", "blocks": 0, **cell.settings}
        schedule = schedule_of(own["method"], own["blocks"], own["queues"])
        if what == "stragglers":
            found[cell.row, cell.column] = round(increase(schedule, float(cell.column)), 3)
        else:  # blocks of equal size, and no cost of sending
            times = [finishing_time(s, np.ones((s.blocks, BATCHES + s.m[0]))) for s in (schedule, Schedule.bp(schedule.blocks))]
            found[cell.row, cell.column] = round(times[1] / times[0], 3)
    return found
