"""Our numbers beside the published ones: differences in standard errors, orders, and the papers' own claims as checks."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from undrift.core.errors import BadSetting

CLEAR = 2.0  # standard errors from which two numbers are apart
ALIKE = 0.9  # the share of methods that must stand on the same side for an order to agree
PRINTED = 1e-4  # relative: tables have four digits at most
DIVERGED, NEVER = "diverge", "-"
CHANCE = 1.5  # times chance, up to which a score says that nothing was learned
Place = tuple[str, str]  # row, column


class Number(NamedTuple):
    """A mean, its standard deviation over seeds where that is known, and the number of seeds."""

    mean: float | None  # None: diverged, or never reached
    deviation: float | None
    seeds: int
    why: str = ""  # why there is no mean: "diverge" or "-"


def read_number(text: str, seeds: int) -> Number:
    """A number as it was printed.

    >>> read_number("98.22 ±0.05", 3), read_number("1,071", 3).mean, read_number("diverge", 3).why
    (Number(mean=98.22, deviation=0.05, seeds=3, why=''), 1071.0, 'diverge')
    """
    if text in (DIVERGED, NEVER):
        return Number(None, None, seeds, text)
    found = re.fullmatch(r"([-+]?[\d,.]+)(?:\s*±\s*([\d.]+))?", text)
    if found is None:
        raise BadSetting(f"{text!r} is no published number; write 98.22 ±0.05, 98.22, - or diverge")
    mean, deviation = found.groups()
    return Number(float(mean.replace(",", "")), None if deviation is None else float(deviation), seeds)


def over_seeds(values: Sequence[float | None], why: str) -> Number:
    """Our number over seeds; where one seed has none, there is no mean. `why` says what a missing one means.

    >>> over_seeds([1.0, 3.0], "-")
    Number(mean=2.0, deviation=1.4142135623730951, seeds=2, why='')
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return Number(None, None, len(values), why)
    return Number(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def error_of(a: Number, b: Number) -> float | None:
    """The standard error of a difference; None where no spread is known.

    A number without a spread, such as that of one seed, is taken to have the other's.
    """
    known = [n.deviation for n in (a, b) if n.deviation is not None]
    if not known:
        return None
    parts = [(known[-1] if n.deviation is None else n.deviation) ** 2 / n.seeds for n in (a, b)]
    return math.sqrt(sum(parts)) or None


def or_diverged(ours: Number, paper: Number | None, chance: float) -> Number:
    """Our number; where the paper says that a method diverges and ours is no better than chance, it diverges too.

    >>> or_diverged(Number(10.0, 0.0, 3), Number(None, None, 3, "diverge"), 10.0).why
    'diverge'
    """
    nothing = ours.mean is not None and ours.mean <= CHANCE * chance
    return Number(None, None, ours.seeds, DIVERGED) if nothing and paper and paper.why == DIVERGED else ours


class Verdict(NamedTuple):
    """What is said about one cell."""

    difference: float | None  # ours minus the paper's
    errors: float | None  # the same in standard errors
    order: float | None  # the share of clearly different methods of its column that stand on the same side
    word: str  # agrees, differs, order agrees, or why nothing can be said


def judge(
    ours: Mapping[Place, Number], paper: Mapping[Place, Number], same_data: Callable[[Place], bool]
) -> dict[Place, Verdict]:
    """A verdict on every cell that both have.

    It agrees within two standard errors of the difference, or where all digits that are printed are the same. Otherwise its order
    agrees where nine in ten of the methods of its column from which the paper sets it clearly apart stand on the same side of it
    in our runs.
    """
    found = {}
    for place in paper:
        if place not in ours:
            continue
        mine, theirs = ours[place], paper[place]
        difference = None if mine.mean is None or theirs.mean is None else mine.mean - theirs.mean
        error = error_of(mine, theirs)
        errors = None if difference is None or error is None else difference / error
        order = share_on_same_side(place, ours, paper)
        alike = mine.why == theirs.why and mine.mean is None and theirs.mean is None
        same = difference is not None and abs(difference) <= PRINTED * abs(theirs.mean or 0.0)  # without any spread
        agrees = alike or same or (errors is not None and abs(errors) <= CLEAR)
        word = "agrees" if agrees and same_data(place) else "differs"
        if word == "differs" and order is not None and order >= ALIKE:
            word = "order agrees"
        found[place] = Verdict(difference, errors, order, word)
    return found


def share_on_same_side(place: Place, ours: Mapping[Place, Number], paper: Mapping[Place, Number]) -> float | None:
    """Of the methods of a column that the paper sets clearly apart from one, the share that ours sets on the same side."""
    row, column = place
    same = []
    for other in paper:
        if other[1] != column or other[0] == row or other not in ours:
            continue
        theirs = gap(paper[place], paper[other])
        error = error_of(paper[place], paper[other]) or 0.0
        if abs(theirs) > CLEAR * error:
            same.append(gap(ours[place], ours[other]) * theirs > 0)
    return sum(same) / len(same) if same else None


def gap(a: Number, b: Number) -> float:
    """a - b, where what has no number is worse than all that have one."""
    if a.mean is None or b.mean is None:
        return 0.0 if a.mean is b.mean else math.inf if b.mean is None else -math.inf
    return a.mean - b.mean


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's, with mean ranks for ties; None where there is nothing to rank.

    >>> rank_correlation([(1, 10), (2, 30), (3, 20)]), rank_correlation([(1, 1), (2, 1)])
    (0.5, None)
    """
    if len(pairs) < 2:
        return None
    a, b = (ranks([pair[side] for pair in pairs]) for side in (0, 1))
    if len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return round(statistics.correlation(a, b), 12)


def ranks(values: Sequence[float]) -> list[float]:
    """Places from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [statistics.fmean(n + 1 for n, each in enumerate(ordered) if each == value) for value in values]


def column_correlation(
    column: str, ours: Mapping[Place, Number], paper: Mapping[Place, Number], worst: float = -1e300
) -> float | None:
    """The rank correlation of the methods of a column; what has no number comes last."""
    places = [place for place in paper if place[1] == column and place in ours]

    def value(number: Number) -> float:
        return worst if number.mean is None else number.mean

    return rank_correlation([(value(ours[place]), value(paper[place])) for place in places])


def check_claim(
    claim: Mapping[str, Any],
    numbers: Mapping[Place, Number],
    higher: bool,
    chance: float = 0.0,
    table: Collection[Place] = (),
) -> dict[str, Any]:
    """What becomes of a paper's claim with these numbers: whether it holds (None: nothing can be said), and what was found.

    `table` are the places of the whole table; a column in which some are missing says nothing about the best.

    `best`: one of `rows` has the best number in at least the share `count` / `of` of the complete columns.
    `lead`: every one of `rows` is ahead of the best other method of `column`, and by `by` within two standard errors;
    methods in `aside` do not count.
    `above`: `rows` are ahead of `others` by more than `by` in every one of `columns`.
    `within`: `rows` are at most `by` behind `others` in every one of `columns`.
    `diverge`: `rows` have no number, or no better one than chance, in all of `columns`.
    """
    kind = str(claim["check"])
    if kind not in CHECKS:
        raise BadSetting(f"a claim's check is one of {', '.join(CHECKS)}, not {kind!r}")
    sign = 1.0 if higher else -1.0
    whole = {column for _, column in numbers} - {column for row, column in table if (row, column) not in numbers}
    partial = kind in ("best", "lead")
    signed = {
        place: n._replace(mean=None if n.mean is None else sign * n.mean)
        for place, n in numbers.items()
        if place[1] in whole or not partial
    }
    return CHECKS[kind](claim, signed, chance)


def _columns(claim: Mapping[str, Any], numbers: Mapping[Place, Number]) -> list[str]:
    return list(claim.get("columns") or dict.fromkeys(column for _, column in numbers))


def _best(claim: Mapping[str, Any], numbers: Mapping[Place, Number], chance: float) -> dict[str, Any]:
    complete, won = [], []
    for column in _columns(claim, numbers):
        own = {row: n for (row, c), n in numbers.items() if c == column}
        if len(own) < 2 or not set(claim["rows"]) & set(own):
            continue
        complete.append(column)
        best = max((n.mean for n in own.values() if n.mean is not None), default=None)
        won += (
            [column] if any(row in own and own[row].mean == best for row in claim["rows"]) and best is not None else []
        )
    if not complete:
        return {"holds": None, "found": "not run"}
    share = claim.get("count", len(complete)) / claim.get("of", len(complete))
    return {
        "holds": len(won) >= share * len(complete) - 1e-9,
        "found": f"best in {len(won)} of {len(complete)} whole columns",
    }


def _lead(claim: Mapping[str, Any], numbers: Mapping[Place, Number], chance: float) -> dict[str, Any]:
    column, by = str(claim["column"]), float(claim.get("by", 0.0))
    own = [n for row in claim["rows"] if (n := numbers.get((row, column))) is not None]
    aside = {*claim["rows"], *claim.get("aside", ())}
    others = [n for (row, c), n in numbers.items() if c == column and row not in aside]
    if not own or not others or len(own) < len(claim["rows"]):
        return {"holds": None, "found": "not run"}
    first = min(own, key=lambda n: -math.inf if n.mean is None else n.mean)
    best = max(others, key=lambda n: -math.inf if n.mean is None else n.mean)
    lead, slack = gap(first, best), CLEAR * (error_of(first, best) or 0.0)
    return {"holds": lead > 0 and lead >= by - slack, "found": f"{lead:+.2f} ± {slack / CLEAR:.2f}"}


def _pairs(claim: Mapping[str, Any], numbers: Mapping[Place, Number]) -> list[tuple[str, float]]:
    """The column and the gap of each of `rows` and each of `others`."""
    found = []
    for column in _columns(claim, numbers):
        for row in claim["rows"]:
            for other in claim["others"]:
                if (row, column) in numbers and (other, column) in numbers and row != other:
                    found.append((column, gap(numbers[row, column], numbers[other, column])))
    return found


def _above(claim: Mapping[str, Any], numbers: Mapping[Place, Number], chance: float) -> dict[str, Any]:
    pairs, by = _pairs(claim, numbers), float(claim.get("by", 0.0))
    if not pairs:
        return {"holds": None, "found": "not run"}
    held = [lead > by for _, lead in pairs]
    least = min(lead for _, lead in pairs)
    return {"holds": all(held), "found": f"{sum(held)} of {len(held)} ahead, the least by {least:+.2f}"}


def _within(claim: Mapping[str, Any], numbers: Mapping[Place, Number], chance: float) -> dict[str, Any]:
    pairs, by = _pairs(claim, numbers), float(claim["by"])
    if not pairs:
        return {"holds": None, "found": "not run"}
    held = [lead >= -by - 1e-9 for _, lead in pairs]
    least = min(lead for _, lead in pairs)
    return {"holds": all(held), "found": f"{sum(held)} of {len(held)} within {by:g}, the worst {least:+.2f}"}


def _diverge(claim: Mapping[str, Any], numbers: Mapping[Place, Number], chance: float) -> dict[str, Any]:
    own = [n for (row, c), n in numbers.items() if row in claim["rows"] and c in _columns(claim, numbers)]
    if not own:
        return {"holds": None, "found": "not run"}
    gone = [n.mean is None or n.mean <= CHANCE * chance for n in own]
    return {"holds": all(gone), "found": f"{sum(gone)} of {len(gone)} learn nothing"}


CHECKS = {"best": _best, "lead": _lead, "above": _above, "within": _within, "diverge": _diverge}
