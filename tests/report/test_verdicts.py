"""Verdicts on numbers that were worked out by hand."""

from __future__ import annotations

import math

import pytest

from undrift.core.errors import BadSetting
from undrift.report.suite_page import as_text
from undrift.report.verdicts import Number, check_claim, column_correlation, error_of, judge, over_seeds, read_number

PAPER = {
    ("a", "c"): Number(60.0, 3.0, 3),
    ("b", "c"): Number(50.0, 3.0, 3),
    ("d", "c"): Number(None, None, 3, "diverge"),
}


def everywhere(place: tuple[str, str]) -> bool:
    return True


def test_a_difference_is_counted_in_standard_errors() -> None:
    # sqrt(3^2 / 3 + 4^2 / 4) = sqrt(7)
    ours = {("a", "c"): Number(64.0, 4.0, 4)}
    verdict = judge(ours, PAPER, everywhere)["a", "c"]
    assert verdict.difference == 4.0 and verdict.errors == pytest.approx(4.0 / math.sqrt(7.0))
    assert verdict.word == "agrees" and verdict.order is None, (
        "1.5 standard errors, and no other method to stand beside"
    )
    far = judge({("a", "c"): Number(66.0, 4.0, 4)}, PAPER, everywhere)["a", "c"]
    assert far.word == "differs" and far.errors == pytest.approx(2.2678, abs=1e-4)


def test_a_single_seed_is_given_the_papers_spread() -> None:
    assert error_of(Number(1.0, None, 1), Number(2.0, 3.0, 3)) == pytest.approx(math.sqrt(9.0 + 3.0))
    assert error_of(Number(1.0, None, 1), Number(2.0, None, 1)) is None


def test_numbers_without_any_spread_agree_where_they_are_the_same_as_printed() -> None:
    paper = {("a", "c"): Number(0.764, 0.0, 5)}
    words = [judge({("a", "c"): Number(n, 0.0, 5)}, paper, everywhere)["a", "c"].word for n in (0.764045, 0.7649)]
    assert words == ["agrees", "differs"]


def test_an_order_agrees_where_numbers_differ() -> None:
    ours = {
        ("a", "c"): Number(80.0, 1.0, 3),
        ("b", "c"): Number(70.0, 1.0, 3),
        ("d", "c"): Number(None, None, 3, "diverge"),
    }
    words = {row: verdict.word for (row, _), verdict in judge(ours, PAPER, everywhere).items()}
    assert words == {"a": "order agrees", "b": "order agrees", "d": "agrees"}
    turned = ours | {("a", "c"): Number(69.0, 1.0, 3)}  # a is no longer ahead of b: one of two stands on the same side
    verdicts = judge(turned, PAPER, everywhere)
    assert verdicts["a", "c"].word == "differs" and verdicts["a", "c"].order == 0.5


def test_other_data_never_agree_but_their_order_may() -> None:
    ours = {("a", "c"): Number(60.0, 1.0, 3), ("b", "c"): Number(50.0, 1.0, 3)}
    verdicts = judge(ours, PAPER, lambda place: False)
    assert {verdict.word for verdict in verdicts.values()} == {"order agrees"}


def test_rank_correlation_puts_what_diverges_last() -> None:
    ours = {
        ("a", "c"): Number(5.0, None, 1),
        ("b", "c"): Number(4.0, None, 1),
        ("d", "c"): Number(None, None, 1, "diverge"),
    }
    assert column_correlation("c", ours, PAPER) == 1.0
    # places 3, 1, 2 against 3, 2, 1: 1 - 6 * (0 + 1 + 1) / (3 * 8)
    other = ours | {("b", "c"): Number(None, None, 1, "diverge"), ("d", "c"): Number(4.0, None, 1)}
    assert column_correlation("c", other, PAPER) == 0.5


def test_means_over_seeds() -> None:
    assert over_seeds([1.0, 2.0, 3.0], "-") == Number(2.0, 1.0, 3)
    assert over_seeds([1.0, None], "diverge") == Number(None, None, 2, "diverge"), "a seed that diverged leaves no mean"
    assert read_number("-", 3).why == "-" and read_number("-0.5 ±0.1", 3) == Number(-0.5, 0.1, 3)
    with pytest.raises(BadSetting, match="no published number"):
        read_number("ninety", 3)


def test_claims() -> None:
    numbers = {
        ("a", "x"): Number(60.0, 0.0, 3), ("b", "x"): Number(58.0, 0.0, 3), ("c", "x"): Number(9.9, 0.0, 3),
        ("a", "y"): Number(50.0, 0.0, 3), ("b", "y"): Number(51.0, 0.0, 3), ("c", "y"): Number(None, None, 3, "diverge"),
    }  # fmt: skip

    def holds(higher: bool = True, **claim: object) -> bool | None:
        found: bool | None = check_claim(claim, numbers, higher, 10.0)["holds"]
        return found

    assert holds(check="best", rows=["a"], count=1, of=2) is True
    assert holds(check="best", rows=["a"]) is False, "in every column"
    assert holds(check="best", rows=["c"], columns=["x"], higher=False) is True
    assert holds(check="lead", rows=["a"], column="x", by=1.9) is True
    assert holds(check="lead", rows=["a"], column="x", by=2.1) is False
    assert holds(check="lead", rows=["a"], column="y", by=-5.0) is False, "who is behind does not lead"
    assert holds(check="above", rows=["a"], others=["c"]) is True, "what diverged is behind"
    assert holds(check="above", rows=["a"], others=["b"]) is False
    assert holds(check="above", rows=["a"], others=["b"], columns=["x"], by=2.0) is False
    assert holds(check="within", rows=["a"], others=["b"], by=1.0) is True
    assert holds(check="within", rows=["a"], others=["b"], by=0.9) is False
    assert holds(check="diverge", rows=["c"]) is True, "9.9 is chance"
    assert holds(check="diverge", rows=["b"]) is False
    assert holds(check="above", rows=["z"], others=["a"]) is None
    whole = {(row, column) for row in "abcd" for column in "xy"}
    claim = {"check": "best", "rows": ["a"], "count": 1, "of": 2}
    assert check_claim(claim, numbers, True, 10.0, whole)["holds"] is None, "d has not been run"


def test_a_claim_of_another_kind_is_refused() -> None:
    with pytest.raises(BadSetting, match="check is one of best"):
        check_claim({"check": "wins", "rows": ["a"]}, {}, True)


def test_a_claim_that_was_not_run_says_so_once() -> None:
    claim = {"text": "A leads", "holds": None, "found": "not run", "in_paper": "1 of 1"}
    verdict = {"columns": {}, "cells": [], "rank_correlation": {"columns": {}}, "claims": [claim]}
    assert list(as_text(verdict))[-1] == "claim: A leads: not run (in the paper 1 of 1)"
    run = {"holds": True, "found": "2 of 2 ahead", "in_paper": None}
    assert (
        list(as_text(verdict | {"claims": [claim | run]}))[-1] == "claim: A leads: yes (2 of 2 ahead; in the paper –)"
    )
