"""A suite's results beside the published numbers: the verdict as data, and its files."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from undrift.core.files import make_folder, replacing, writing
from undrift.jobs.cells import Asked, Work
from undrift.jobs.results import Line
from undrift.jobs.suite import Cell, Suite, number_of
from undrift.pipeline.engines import schedule_of
from undrift.pipeline.schedule import Schedule
from undrift.pipeline.straggle import finishing_time, increase
from undrift.report import suite_page
from undrift.report.verdicts import (
    Number,
    Verdict,
    check_claim,
    column_correlation,
    judge,
    or_diverged,
    over_seeds,
    read_number,
)

BATCHES = 500  # batches for which a schedule is played in virtual time


def write_verdict(work: Work) -> dict[str, Any]:
    """Compare, and write SUITE.json, SUITE.html, SUITE-picked.toml and index.html."""
    verdict, out = verdict_of(work), work.asked.out
    name = work.batch.results.file.stem
    files = {
        f"{name}.json": as_json(verdict),
        f"{name}.html": suite_page.page(verdict),
    }
    if picked := {n: fields for n, fields in work.picked.items() if fields}:
        files[f"{name}-picked.toml"] = tomli_w.dumps({"picked": picked})
    with writing(out):
        make_folder(out)
        for file, text in files.items():
            with replacing(out / file) as temporary:
                temporary.write_text(text, encoding="utf-8")
        with replacing(out / "index.html") as temporary:
            temporary.write_text(suite_page.index(out), encoding="utf-8")
    return verdict


def as_json(verdict: dict[str, Any]) -> str:
    """JSON with a line for each cell, so that versions can be compared.

    >>> print(as_json({"title": "T", "cells": [{"row": "a"}, {"row": "b"}]}))
    {
     "title": "T",
     "cells": [
      {"row": "a"},
      {"row": "b"}
     ]
    }
    <BLANKLINE>
    """

    def text(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(json.dumps(each, allow_nan=False) for each in value) + "\n ]"
        return json.dumps(value, allow_nan=False)

    return "{\n " + ",\n ".join(f"{json.dumps(name)}: {text(value)}" for name, value in verdict.items()) + "\n}\n"


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
    ours |= {place: Number(value, None, 1) for place, value in compute(suite).items() if place in cells}
    higher = suite.cells[0].score.higher if suite.cells else True
    chance = 10.0 if higher else 0.0  # per cent, of ten classes
    ours = {place: or_diverged(number, paper.get(place), chance) for place, number in ours.items()}
    signed = {p: n if higher or n.mean is None else n._replace(mean=-n.mean) for p, n in ours.items()}
    printed = {p: n if higher or n.mean is None else n._replace(mean=-n.mean) for p, n in paper.items()}
    comparable = work.asked.scale == "full"
    verdicts = judge(signed, printed, lambda place: comparable and not cells[place].stand_in)
    table = suite.paper or set(itertools.product(suite.rows, suite.columns))
    correlations = {c: column_correlation(c, signed, printed) for c in suite.columns}
    known = [value for value in correlations.values() if value is not None]
    content: dict[str, Any] = {
        "suite": work.batch.results.file.stem, "command": command_of(work.asked),
        "title": suite.about["title"], "about": suite.about.get("about", ""), "paper": suite.about.get("paper", ""),
        "scale": work.asked.scale, "tune": tuning_name(work.asked.tune),
        "unit": unit_of(suite),
        "columns": suite.columns, "rows": suite.rows, "cells": [],
        "rank_correlation": {"columns": correlations, "mean": sum(known) / len(known) if known else None},
        "claims": [
            {"text": claim["text"]} | check_claim(claim, ours, higher, chance, table)
            | {"in_paper": check_claim(claim, paper, higher, chance)["found"] if paper else ""}
            for claim in suite.claims
        ],
    }  # fmt: skip
    for place, cell in cells.items():
        content["cells"].append(
            cell_of(work, cell, ours.get(place), paper.get(place), verdicts.get(place), lines[place])
        )
    every = [line for own in lines.values() for line in own]
    content["devices"] = sorted({line["device"] for line in every})
    content["commits"] = sorted({line["commit"] for line in every if line["commit"]})
    content["seconds"] = round(sum({line["key"]: line["seconds"] for line in every}.values()), 1)
    spent = [s for s in work.spent.values() if s.runs]
    content["spent_on_tuning"] = {"trials": sum(s.runs for s in spent), "full_runs": round(sum(s.whole for s in spent), 2),
                                  "seconds": round(sum(s.seconds for s in spent), 1)}  # fmt: skip
    return content


def cell_of(
    work: Work, cell: Cell, ours: Number | None, paper: Number | None, verdict: Verdict | None, lines: Sequence[Line]
) -> dict[str, Any]:
    """One cell as data."""
    found: dict[str, Any] = {"row": cell.row, "column": cell.column, "ours": _number(ours), "paper": _number(paper)}
    state = "not run" if not lines and ours is None else "run"
    if cell.missing:
        state = (
            f"only for {cell.settings['rounds']} rounds on {cell.settings['dataset']}: {cell.missing} is not at hand"
        )
    found["verdict"] = state if verdict is None else verdict.word
    if verdict is not None:
        found |= {"difference": verdict.difference, "errors": verdict.errors, "order": verdict.order}
        if not cell.score.higher:  # the verdict was made on negative numbers
            found |= {n: -found[n] for n in ("difference", "errors") if found[n] is not None}
    if cell.stand_in:
        found["stand_in"] = cell.stand_in
    if lines:
        found["picked"] = work.pick(cell, run=False)
        found["seeds"] = [line["seed"] for line in lines]
        found["values"] = [number_of(line, cell.score) for line in lines]
        found["curves"] = [line["curve"] for line in lines if line.get("curve")]
        if work.suite.links and all("bytes" in line for line in lines):
            found |= cost_of_links(work.suite, cell, lines)
    return found


def cost_of_links(suite: Suite, cell: Cell, lines: Sequence[Line]) -> dict[str, Any]:
    """Bytes of all messages of a run, and how long they would take: each client has a link, and all send at the same time."""
    clients = int(cell.settings["clients"])
    times = clients * int(cell.settings["steps"]) if cell.synchronous else 1
    total = times * sum(line["bytes"] for line in lines) / len(lines)
    each = total / clients
    return {"bytes": total, "network_seconds": {f"{speed:g}": each * 8 / (speed * 1e6) for speed in suite.links}}


def command_of(asked: Asked) -> str:
    """The command that makes this verdict, but for the folder and the time that it has."""
    words = ["undrift", "reproduce", asked.suite]
    for flag, value in (("--columns", ",".join(asked.columns)), ("--methods", ",".join(asked.rows))):
        words += [flag, value] if value else []
    words += ["--seeds", str(asked.seeds)] if asked.seeds else []
    words += ["--tune", tuning_name(asked.tune)] if asked.tune != "none" else []
    words += ["--scale", asked.scale] if asked.scale != "full" else []
    return shlex.join(words)


def _number(number: Number | None) -> dict[str, Any] | None:
    return None if number is None else number._asdict()


def unit_of(suite: Suite) -> str:
    return suite.cells[0].score.unit if suite.cells else "%"


def tuning_name(tune: str) -> str:
    return tune if tune in ("none", "grid") else Path(tune).name


def compute(suite: Suite) -> dict[tuple[str, str], float]:
    """Numbers from schedules in virtual time: the slowdown by slow devices, or the speed-up over backpropagation."""
    what, found = suite.about.get("computed"), {}
    for cell in suite.cells if what else ():
        own: dict[str, Any] = {"method": "dsp", "queues": "", "blocks": 0, **cell.settings}
        schedule = schedule_of(own["method"], own["blocks"], own["queues"])
        if what == "stragglers":
            found[cell.row, cell.column] = round(increase(schedule, float(cell.column)), 3)
        else:  # blocks of equal size, and no cost of sending
            times = [
                finishing_time(s, np.ones((s.blocks, BATCHES + s.m[0])))
                for s in (schedule, Schedule.bp(schedule.blocks))
            ]
            found[cell.row, cell.column] = round(times[1] / times[0], 1)  # as printed
    return found
