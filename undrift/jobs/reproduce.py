"""`undrift reproduce`: runs what a paper's table or figure needs, and says how our numbers compare with the published ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from undrift.core import stopping
from undrift.core.errors import UndriftError
from undrift.jobs.batch import Batch, NoTime, Run, Say
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
    batch = Batch(results, say, asked.pack, asked.device, asked.minutes)
    work = Work(suite, batch, asked, read_picks(asked.tune))
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
        except NoTime as reason:
            say(f"stopped before its {asked.minutes:g} minutes are over: {reason}; the same command goes on")
    verdict = write_verdict(work)
    for line in suite_page.as_text(verdict):
        say(line)
    for name, message in work.batch.failed.items():
        say(f"{name} failed: {message}")
    return bool(work.batch.failed)


def plan_of(work: Work) -> Iterator[str]:
    """What there is to do, how long it takes run after run, and how much memory.

    The time of a method's round is that of its finished runs; where it has none, that of the column's first method, which
    is measured.
    """
    suite = work.suite
    sizes = f"{len(suite.columns)} columns, {len(suite.rows)} methods, {len(suite.cells)} cells here"
    yield f"{suite.name}: {suite.about['title']}; {sizes}"
    by_column: dict[str, list[Cell]] = defaultdict(list)
    for cell in suite.cells if "computed" not in suite.about else ():
        by_column[cell.column].append(cell)
    total, seen = 0.0, set[str]()
    for column, cells in by_column.items():
        first, length = cells[0], cells[0].config(0, {}).rounds
        wanted = [left_of(work, cell, seen) for cell in cells]
        runs, left, trials = (sum(each[n] for each in wanted) for n in range(3))
        text = f"  {column}: {len(cells)} cells, "
        text += f"{runs} runs of {length} rounds" if runs else "with the runs of the columns before"
        text += f", {left} of them to do" if left else ", all done" if runs else ""
        text += f", and {trials} rounds of trials, more where settings diverge" if trials else ""
        text += f"; {first.missing} is not at hand: {first.settings['dataset']}" if first.missing else ""
        if left or trials:
            try:
                text, seconds = text + "; ", seconds_of(work, cells, [(each[1], each[2]) for each in wanted], length)
                total += seconds
                text += f"about {duration(seconds)} run after run, {memory_of(work, first) / 1e9:.2f} GB a run"
            except UndriftError as error:
                text += f"not measured: {error}"
        yield text
    yield f"  {duration(total)} run after run, before packing" if total else "  nothing is left to do"


def left_of(work: Work, cell: Cell, seen: set[str]) -> tuple[int, int, int]:
    """Of a cell: its final runs that no cell before has, those of them to do, and rounds of trials; adds to `seen`."""
    picked = work.pick(cell, run=False)
    if picked is None:  # nobody knows yet which runs these are; cells of one search have the same
        keys = {f"{cell.tuned_in} {cell.tuned_as} {run.key}" for run in work.finals(cell, {})} - seen
        done = 0
    else:
        keys = {run.key for run in work.finals(cell, picked)} - seen
        done = sum(work.batch.results.get(key) is not None for key in keys)
    seen |= keys
    trials = 0
    if (
        picked is None
        and (cell.tuned_in, cell.tuned_as) == (cell.column, cell.row)
        and (first := first_trial(work, cell)) not in seen
    ):
        trials = trial_rounds(work, cell)
        seen.add(first)
    return len(keys), len(keys) - done, trials


def first_trial(work: Work, cell: Cell) -> str:
    """The key of the first run of a cell's search, by which two tables' searches are seen to be the same."""
    return f"trial {work.trial(cell, cell.candidates()[0], SEEDS[0], 1).key}"


def seconds_of(work: Work, cells: Sequence[Cell], wanted: Sequence[tuple[int, int]], length: int) -> float:
    """Seconds that final runs and rounds of trials of these cells take, one run after the other."""
    first: Run = next(work.finals(cells[0], {}))
    found = 0.0
    for cell, (left, trials) in zip(cells, wanted, strict=True):
        if left or trials:
            pace = work.batch.pace(next(work.finals(cell, {})))
            found += (left * length + trials) * (work.batch.cost(first).seconds if pace is None else pace)
    return found


def memory_of(work: Work, cell: Cell) -> int:
    """Bytes that a run of this cell needs, as far as they are known before."""
    run = next(work.finals(cell, {}))
    return work.batch.room(run).memory if run.command == "run" else work.batch.cost(run).memory


def trial_rounds(work: Work, cell: Cell) -> int:
    """How many rounds the search of a cell takes, if nothing of it is done."""
    if not cell.grid or cell.missing:
        return 0
    rounds, left, whole = cell.config(0, {}).rounds, len(cell.candidates()), 0.0
    for share in cell.rungs if left > 1 else ():
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
