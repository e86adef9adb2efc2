"""`undrift reproduce`: runs what a paper's table or figure needs, and says how our numbers compare with the published ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from undrift.core import stopping
from undrift.core.errors import UndriftError
from undrift.jobs.batch import Batch, Say
from undrift.jobs.cells import Asked, Work, read_picks
from undrift.jobs.compare import write_verdict
from undrift.jobs.results import Results
from undrift.jobs.suite import Cell
from undrift.jobs.tune import SEEDS
from undrift.report import suite_page


def reproduce(asked: Asked, say: Say) -> bool:
    """Run what is not finished, and write SUITE.json and SUITE.html; return whether a run failed."""
    suite = asked.load()
    results = Results(asked.out, f"{suite.name}-small" if asked.scale == "small" else suite.name)
    work = Work(suite, Batch(results, say, asked.pack, asked.device), asked, read_picks(asked.tune))
    with stopping.within(asked.minutes * 60 or float("inf")) as left:
        for line in plan_of(work):
            say(line)
        say(f"  results go to {results.file}, pages to {asked.out / 'index.html'}")
        if asked.plan:
            return False
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


def plan_of(work: Work) -> Iterator[str]:
    """What there is to do, how long it takes run after run, and how much memory; measured on one run of each column."""
    suite, results = work.suite, work.batch.results
    sizes = f"{len(suite.columns)} columns, {len(suite.rows)} methods, {len(suite.cells)} cells here"
    yield f"{suite.name}: {suite.about['title']}; {sizes}"
    by_column: dict[str, list[Cell]] = defaultdict(list)
    for cell in suite.cells if "computed" not in suite.about else ():
        by_column[cell.column].append(cell)
    total = 0.0
    for column, cells in by_column.items():
        first, length = cells[0], cells[0].config(0, {}).rounds
        runs, left, trials = 0, 0, 0
        for cell in cells:
            picked = work.pick(cell, run=False)
            finals = [] if picked is None else [results.get(run.key) for run in work.finals(cell, picked)]
            runs += len(suite.seeds)
            left += len(suite.seeds) - sum(line is not None for line in finals)
            trials += trial_rounds(work, cell) if picked is None and cell.tuned_as == cell.row else 0
        text = f"  {column}: {len(cells)} cells, {runs} runs of {length} rounds"
        text += f", {left} of them to do" if left else ", all done"
        text += f", and {trials} rounds of trials at most" if trials else ""
        text += f"; {first.missing} is not at hand: {first.settings['dataset']}" if first.missing else ""
        if left or trials:
            try:
                cost = work.batch.cost(next(work.finals(first, {})))
                seconds = cost.seconds * (left * length + trials)
                total += seconds
                text += f"; about {duration(seconds)} run after run, {cost.memory / 1e9:.2f} GB a run"
            except UndriftError as error:
                text += f"; not measured: {error}"
        yield text
    yield f"  {duration(total)} run after run, before packing" if total else "  nothing is left to do"


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
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
