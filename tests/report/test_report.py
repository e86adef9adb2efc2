"""The report on run folders written by hand: numbers, labels, selection, verdict, page and pictures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from torch import nn

import undrift
from tests.small import write_run
from undrift import cli
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.core.run_files import read_settings
from undrift.core.seals import AFTER, BEFORE, Place, append_lines, check, read_lines, seal_toml, unseal
from undrift.report.document import document
from undrift.report.load import Group, group_runs, load
from undrift.report.page import SCRIPTS, html, write
from undrift.report.pictures import partition_picture, partition_text
from undrift.report.records import read_records
from undrift.report.scores import default_target, rank
from undrift.report.summary import pick_settings, summarise, verdict
from undrift.report.text import more_table, table
from undrift.simulate.evaluate import accuracy

COMMON = {"dataset": "digits", "model": "mlp", "partition": "iid", "clients": 4, "cohort": 2, "rounds": 3}
MADE = {"commit": "abc123", "device": "cpu", "versions": {"torch": "2.13"}}


def make_run(
    folder: Path,
    algorithm: str,
    seed: int,
    accuracy: list[float | None],
    fields: dict[str, Any] | None = None,
    val: list[float | None] | None = None,
    **settings: Any,
) -> Path:
    """A run folder with one record for each accuracy; loss is 1 - accuracy unless `loss` lists it."""
    loss = settings.pop("loss", [None if a is None else 1 - a for a in accuracy])
    more = settings.pop("more", {})
    toml = {"algorithm": algorithm, **COMMON, "seed": seed, **settings, "set": fields or {}, "made": MADE}
    records = []
    for place, value in enumerate(accuracy):
        record = {
            "round": place + 1,
            "loss": loss[place],
            "accuracy": value,
            "bytes_down": 600,
            "bytes_up": 400,
            "gradients": 10,
            "consistency": 1.0 / (place + 1),
            "seconds": [0.3, 0.1, 0.2][place % 3],
            "train_loss": 0.5,
            "clients": 2,
            "dropped": 0,
            **more,
        }
        if val:
            record["val_accuracy"] = val[place]
        records.append(record)
    write_run(folder, toml, records)
    return folder


def constant(root: Path, scores: dict[str, list[float]]) -> list[Group]:
    """Groups whose seeds have the given scores in their only evaluated round."""
    for algorithm, values in scores.items():
        for seed, value in enumerate(values):
            make_run(root / f"{algorithm}-{seed}", algorithm, seed, [value])
    return group_runs(load([root]))


def test_the_numbers_of_a_group_and_their_spread_over_seeds(tmp_path: Path) -> None:
    make_run(tmp_path / "a0", "fedavg", 0, [0.5, 0.8, 0.7])
    make_run(tmp_path / "a1", "fedavg", 1, [0.5, None, 0.6])
    (row,) = summarise(group_runs(load([tmp_path])), 0.75)
    # best 0.8 and 0.6: mean 0.7, deviation sqrt(2 * 0.1^2 / 1) = 0.141421
    assert row.best_on_test == pytest.approx((0.7, 0.1414214, 2, 2))
    assert row.at_best_validation is None
    # last 0.7 and 0.6; only seed 0 reaches 0.75, in round 2, after 2 * (600 + 400) bytes
    assert row.last == pytest.approx((0.65, 0.0707107, 2, 2))
    assert row.rounds_to_target == (2.0, None, 1, 2)
    assert row.bytes_to_target == (2000.0, None, 1, 2)
    assert row.bytes_per_round == (1000.0, 0.0, 2, 2) and row.gradients_per_round == (10.0, 0.0, 2, 2)
    assert row.consistency == pytest.approx((1 / 3, 0.0, 2, 2))  # of round 3
    assert row.seconds_per_round == pytest.approx((0.2, 0.0, 2, 2))  # the median of 0.3, 0.1, 0.2


def test_the_table_in_words(tmp_path: Path) -> None:
    make_run(tmp_path / "a0", "fedavg", 0, [0.5, 0.8, 0.7])
    make_run(tmp_path / "a1", "fedavg", 1, [0.5, None, 0.6])
    assert table(group_runs(load([tmp_path])), 0.75) == [
        [
            "method",
            "seeds",
            "best accuracy (chosen on test)",
            "last accuracy",
            "rounds to accuracy 0.75",
            "bytes to accuracy 0.75",
            "bytes per round",
            "gradients per round",
            "consistency at the end",
            "seconds per round",
            "rounds run",
        ],
        [
            "fedavg",
            "2",
            "0.7000 ± 0.1414",
            "0.6500 ± 0.0707",
            "2 (1 of 2)",
            "2 kB (1 of 2)",
            "1 kB",
            "10",
            "0.333 ± 0",
            "0.2 ± 0",
            "3",
        ],
    ]
    assert table(group_runs(load([tmp_path])), 0.99)[1][4:6] == ["-", "-"]


def extended(folder: Path, *more: dict[str, float]) -> None:
    """Put further numbers into the records of a run."""
    records = list(read_lines(folder / "rounds.jsonl", "byhand"))
    settings, _ = read_settings(folder)
    write_run(folder, settings, [record | extra for record, extra in zip(records, more, strict=True)])


def test_further_measures_have_a_table_of_their_own(tmp_path: Path) -> None:
    assert more_table(constant(tmp_path / "none", {"fedavg": [0.5]})) == [["method"], ["fedavg"]]
    first, second = (make_run(tmp_path / name, name, 0, [0.5, 0.8, 0.7]) for name in ("gradma", "fedavg"))
    extended(
        first,
        {"qp_active": 2, "evictions": 1},
        {"qp_active": 4, "evictions": 3, "forgetting": 0.5, "absent_loss": 9.0},
        {"qp_active": 6, "evictions": 8, "forgetting": 0.25, "absent_loss": 1.5, "client_accuracy_p10": 0.125},
    )
    extended(second, {}, {}, {"forgetting": -0.125})
    groups = {group.algorithm: group for group in group_runs(load([first, second]))}
    assert more_table([groups["gradma"], groups["fedavg"]]) == [
        ["method", "forgetting at the end", "mean forgetting", "loss on absent clients", "clients' accuracy, 10 %",
         "server constraints active", "evictions"],
        ["gradma", "0.25", "0.375", "1.5", "0.125", "4", "8"],
        ["fedavg", "-0.125", "-0.125", "-", "-", "-", "-"],
    ]  # fmt: skip
    page = html(load([first, second]), None)
    assert "More measures" in page and "loss on absent clients" in page


def test_time_on_the_network_to_a_target(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", "fedavg", 0, [0.5, 0.8, 0.7])
    extended(folder, *({"network_seconds": seconds} for seconds in (1.5, 2.0, 4.0)))
    (row,) = summarise(group_runs(load([folder])), 0.75)
    assert row.network_seconds_to_target == (3.5, None, 1, 1)
    header, cells = table(group_runs(load([folder])), 0.75)
    assert dict(zip(header, cells, strict=True))["network seconds to accuracy 0.75"] == "3.5"
    (section,) = document(load([folder]), 0.75)["sections"]
    assert [axis["key"] for axis in section["axes"]][-1] == "network"
    assert section["groups"][0]["runs"][0]["spent"]["network"] == [[1, 2, 3], [1.5, 3.5, 7.5]]


def test_the_best_come_first_and_those_without_a_score_last(tmp_path: Path) -> None:
    make_run(tmp_path / "none", "mifa", 0, [None])
    groups = constant(tmp_path, {"fedavg": [0.28, 0.30], "scaffold": [0.5], "gradma": [0.4]})
    assert [group.algorithm for group in rank(groups)] == ["scaffold", "gradma", "fedavg", "mifa"]


def test_default_target_is_the_worst_mean_rounded_down(tmp_path: Path) -> None:
    groups = constant(tmp_path, {"fedavg": [0.28, 0.30], "scaffold": [0.5]})
    assert default_target(groups) == 0.29  # though 0.29 * 100 is just under 29 in floating point
    assert table(groups, None)[2][2] == "0.5000"  # no deviation with a single seed


def test_best_round_is_chosen_by_validation_where_all_runs_have_it(tmp_path: Path) -> None:
    # Best test accuracy is 0.9 in round 2; validation is best in round 3, where the test accuracy is 0.7.
    make_run(tmp_path / "a", "fedavg", 0, [0.5, 0.9, 0.7], val=[0.4, 0.6, 0.8])
    header, row = table(group_runs(load([tmp_path])), 0.5)
    assert header[2] == "accuracy at best validation" and row[2] == "0.7000"
    assert not any("chosen on test" in name for name in header)


def test_mixed_validation_compares_all_on_test_and_says_so(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg", 0, [0.5, 0.9, 0.7], val=[0.4, 0.6, 0.8])
    make_run(tmp_path / "b", "scaffold", 0, [0.5, 0.6, 0.65])
    header, fedavg, scaffold = table(group_runs(load([tmp_path])), 0.5)
    assert header[2:4] == ["accuracy at best validation", "best accuracy (chosen on test)"]
    assert fedavg[2:4] == ["0.7000", "0.9000"] and scaffold[2:4] == ["-", "0.6500"]


def test_settings_are_picked_on_validation_else_on_test(tmp_path: Path) -> None:
    # mu=0.1 is better on test (0.9 > 0.8), mu=1.0 better on validation (0.7 > 0.6).
    for part, val in (("with", True), ("without", False)):
        root = tmp_path / part
        make_run(root / "p1", "fedprox", 0, [0.9], {"mu": 0.1}, val=[0.6] if val else None)
        make_run(root / "p2", "fedprox", 0, [0.8], {"mu": 1.0}, val=[0.7] if val else None)
        make_run(root / "a", "fedavg", 0, [0.7], val=[0.5] if val else None)
    on_validation = {pick.group.label: pick.how for pick in pick_settings(group_runs(load([tmp_path / "with"])))}
    assert on_validation == {"fedavg": "", "fedprox mu=1.0": "setting picked on validation"}
    groups = group_runs(load([tmp_path / "without"]))
    on_test = {pick.group.label: pick.how for pick in pick_settings(groups)}
    assert on_test == {"fedavg": "", "fedprox mu=0.1": "setting picked on test"}
    assert [row[3] for row in table(groups, None)] == ["picked", "", "on test", ""]
    assert "picked on test" in verdict(groups)


def test_without_accuracy_the_loss_decides(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg", 0, [None, None, None], loss=[3.0, 1.234, 2.0])
    make_run(tmp_path / "b", "scaffold", 0, [0.5, 0.5, 0.5], loss=[3.0, 0.5, 0.7])
    groups = group_runs(load([tmp_path]))
    assert default_target(groups) == 1.24  # the worst is 1.234, rounded to the easier side
    header, fedavg, scaffold = table(groups, None)
    assert header[2:5] == ["best loss (chosen on test)", "last loss", "rounds to loss 1.24"]
    assert fedavg[2:5] == ["1.2340", "2.0000", "2"] and scaffold[2:5] == ["0.5000", "0.7000", "2"]
    assert verdict(groups).startswith("scaffold has the best mean")


def test_labels_say_what_differs(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg", 0, [0.5], {"lr": 0.1})
    make_run(tmp_path / "p1", "fedprox", 0, [0.5], {"lr": 0.2, "mu": 0.1})
    make_run(tmp_path / "p2", "fedprox", 0, [0.5], {"lr": 0.2, "mu": 1.0})
    assert [g.label for g in group_runs(load([tmp_path]))] == ["fedavg", "fedprox mu=0.1", "fedprox mu=1.0"]
    make_run(tmp_path / "q", "fedprox", 0, [0.5], {"lr": 0.2, "mu": 1.0}, partition="label:2")
    assert [(g.label, g.task) for g in group_runs(load([tmp_path]))] == [
        ("fedavg", "digits, iid, mlp"),
        ("fedprox mu=0.1", "digits, iid, mlp"),
        ("fedprox mu=1.0", "digits, iid, mlp"),
        ("fedprox", "digits, label:2, mlp"),  # alone in its task
    ]
    make_run(tmp_path / "other" / "b", "scaffold", 0, [0.5], cohort=4)
    make_run(tmp_path / "other" / "a", "fedavg", 0, [0.5], cohort=2)
    assert [g.label for g in group_runs(load([tmp_path / "other"]))] == ["fedavg cohort=2", "scaffold cohort=4"]


def test_labels_of_data_parallel_runs_leave_out_what_a_method_sets_by_itself(tmp_path: Path) -> None:
    line = {"round": 1, "loss": 1.0, "accuracy": 0.5, "seconds": 0.1}
    common = {"dataset": "digits", "model": "mlp", "workers": 4, "seed": 0}
    for method, ratio, lam in (("sgd", 1.0, "auto"), ("def", 64.0, "auto"), ("ef", 64.0, "0")):
        write_run(tmp_path / method, {"method": method, "ratio": ratio, "lam": lam, **common}, [line])
    labels = {run.folder.name: group.label for group in group_runs(load([tmp_path])) for run in group.runs}
    assert labels == {"sgd": "sgd", "def": "def", "ef": "ef"}
    write_run(tmp_path / "more", {"method": "def", "ratio": 256.0, "lam": "auto", **common}, [line])
    labels = {run.folder.name: group.label for group in group_runs(load([tmp_path])) for run in group.runs}
    assert labels == {"sgd": "sgd", "def": "def ratio=64.0", "more": "def ratio=256.0", "ef": "ef"}


def test_a_repeated_seed_does_not_count_twice(tmp_path: Path) -> None:
    make_run(tmp_path / "short", "fedavg", 0, [0.5])
    make_run(tmp_path / "long", "fedavg", 0, [0.5, 0.6])
    (group,) = group_runs(load([tmp_path, tmp_path / "long"]))
    assert [run.folder.name for run in group.runs] == ["long"]
    assert [run.folder.name for run in group.repeats] == ["short"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        # means 0.8, 0.9: deviation 0.1 / sqrt(2) = 0.0707; seeds 0.01; error 0.01 * sqrt(2 / 3) = 0.0082 < 0.05
        (
            {"a": [0.79, 0.80, 0.81], "b": [0.89, 0.90, 0.91]},
            [
                "differ more than the seeds of one method do",
                "0.0707",
                "0.0100",
                "b is best",
                "0.1000, is larger than twice",
                "(0.0082)",
                "with 3 seeds this is an indication, not a proof",
            ],
        ),
        # means 0.80, 0.82: deviation 0.0141; seeds 0.1; error 0.1 * sqrt(2 / 3) = 0.0816 > 0.01
        (
            {"a": [0.70, 0.80, 0.90], "b": [0.72, 0.82, 0.92]},
            [
                "differ no more than the seeds of one method do",
                "but its lead over a, 0.0200, is not",
                "0.0141",
                "(0.0816)",
            ],
        ),
        # The leaders' seeds agree exactly, but c shows that seeds move results by sqrt(0.02): pooled over three
        # groups sqrt(0.02 / 3) = 0.0816, error 0.0816 * sqrt(1 / 2 + 1 / 2) = 0.0816.
        ({"a": [0.91, 0.91], "b": [0.90, 0.90], "c": [0.7, 0.9]}, ["is not larger than twice", "(0.0816)"]),
        ({"a": [0.1], "b": [0.9]}, ["only one seed for every method: nothing can be said without more seeds"]),
        ({"a": [0.1, 0.2], "b": [0.9]}, ["only one seed for b: nothing can be said without more seeds"]),
        ({"a": [0.5, 0.5], "b": [0.6, 0.6]}, ["chance cannot be judged"]),
        ({"a": [0.5, 0.5], "b": [0.5, 0.5]}, ["chance cannot be judged", "have the same mean"]),
    ],
)
def test_verdict(tmp_path: Path, values: dict[str, list[float]], said: list[str]) -> None:
    text = verdict(constant(tmp_path, values))
    assert [words for words in said if words not in text] == [], text
    assert ("is best" in text) == ("b is best" in said), "claims more than the seeds allow"


def test_the_verdict_says_who_forgets_most_and_who_forgets_less(tmp_path: Path) -> None:
    """Means of the second half 0.31, 0.05 and 0.28 with deviations of 0.014 and 0.05: b is apart from a, c is not."""
    for method, late in {"a": [0.30, 0.32], "b": [0.04, 0.06], "c": [0.23, 0.33]}.items():
        for seed, value in enumerate(late):
            folder = make_run(tmp_path / f"{method}-{seed}", method, seed, [0.5 + 0.1 * seed, 0.5])
            extended(folder, {"forgetting": 0.9}, {"forgetting": value})
    text = verdict(group_runs(load([tmp_path])))
    assert "a forgets most: in the second half of the rounds" in text and "is 0.310 ± 0.014 below" in text
    assert text.endswith("by more than twice the standard error of the difference: b (0.050 ± 0.014).")
    text = verdict([group for group in group_runs(load([tmp_path])) if group.algorithm != "b"])
    assert text.endswith("No other method forgets less by more than twice the standard error of the difference.")


def test_verdict_needs_two_methods_and_keeps_tasks_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg", 0, [0.5])
    said = "fedavg has 0.5000 (best accuracy, chosen on test; 1 seed); there is no other score, so nothing to compare."
    assert verdict(group_runs(load([tmp_path]))) == said
    make_run(tmp_path / "b", "scaffold", 0, [0.9], dataset="mnist")
    text = verdict(group_runs(load([tmp_path])))
    assert text.count("nothing to compare") == 2 and "mnist, iid, mlp:" in text


def test_a_torn_last_line_is_left_out_and_a_torn_middle_is_damage(tmp_path: Path) -> None:
    rounds = make_run(tmp_path / "a", "fedavg", 0, [0.5, 0.6, 0.7]) / "rounds.jsonl"
    whole = rounds.read_text()
    rounds.write_text(whole[:-30])
    (run,) = load([tmp_path])
    assert run.records.values("accuracy") == [0.5, 0.6]
    rounds.write_text(whole[30:])
    with pytest.raises(BadRunFolder, match="line 1"):
        load([tmp_path])


def test_names_that_look_like_markup_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a", "x[/red]", 0, [0.5])
    make_run(tmp_path / "b", "[bold]y :smile:", 0, [0.6])
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert "x[/red]" in said and "[bold]y" in said and ":smile:" in said


@pytest.mark.parametrize("value", ["Infinity", "1e999", "1" + "0" * 400, "null", '"x"', "[1]", '{"round": 1}'])
def test_numbers_that_are_none_are_left_out(value: str, tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", "fedavg", 0, [0.5]) / "rounds.jsonl"
    _, before = unseal(first.read_bytes(), "byhand")
    content = f'{{"round": 2, "accuracy": {value}, "loss": 1.0'.encode()
    with first.open("ab") as file:
        file.write(content + BEFORE + check(content, before).encode() + AFTER + b"\n")
    (run,) = load([tmp_path])
    assert run.records.values("accuracy") == [0.5]
    write([tmp_path], tmp_path / "page.html")


@pytest.mark.parametrize(
    "test", [5, {}, {"global": 5}, {"global": {"dice": [0.5]}}, {"global": {"loss": []}}, {"global": {"loss": ["x"]}}]
)
def test_damaged_scores_of_sites_are_said_to_be_so(test: Any, tmp_path: Path) -> None:
    line = {"round": 2, "accuracy": 0.5, "loss": 1.0, "own_dice": 0.5, "sites": {"test": test}}
    folder = make_run(tmp_path / "a", "fedavg", 0, [0.5])
    write_run(folder, read_settings(folder)[0], [line])
    with pytest.raises(BadRunFolder, match="scores of sites in .* are damaged, in round 2"):
        write([tmp_path], tmp_path / "page.html")


def test_columns_are_the_records(tmp_path: Path) -> None:
    lines = [{"round": 1, "loss": 2.0}, {"round": 2, "sites": {"test": {}}, "loss": None}, {"round": 3, "late": 1}]
    write_run(tmp_path, {}, lines)
    records = read_records(tmp_path / "rounds.jsonl", "byhand")
    assert [records.read(place) for place in range(len(records))] == lines
    assert records.column("round").tolist() == [1, 2, 3] and records.values("loss") == [2.0]
    assert np.isnan(records.column("late")).tolist() == [True, True, False] and np.isnan(records.column("none")).all()
    assert records.amounts("late").tolist() == [0, 0, 1] and records.last_with_sites == lines[1]


@pytest.mark.system
def test_a_report_of_a_million_rounds_takes_a_minute_and_a_gigabyte(tmp_path: Path, count: Any) -> None:
    folder = make_run(tmp_path / "a", "fedavg", 0, [0.5])
    line = {
        "loss": 0.1,
        "bytes_down": 5200,
        "bytes_up": 5200,
        "gradients": 10,
        "consistency": 0.2,
        "seconds": 0.1,
        "clients": 2,
    }
    line |= {
        "train_loss": 0.9,
        "dropped": 0,
        "client_accuracy_p10": 0.2,
        "client_accuracy_p50": 0.6,
        "client_accuracy_p90": 0.8,
    }
    with (folder / "rounds.jsonl").open("wb", buffering=0) as file:
        end = Place(0, "byhand")
        for first in range(1, 1_000_001, 1000):
            end = append_lines(
                file, end, *({"round": t, "accuracy": t / 1e6} | line for t in range(first, first + 1000))
            )
    code = (
        "import pathlib, re, sys, time; from undrift import cli; assert cli.main(sys.argv[1:]) == 0; "
        "print(re.search(r'VmHWM:\\s*(\\d+)', pathlib.Path('/proc/self/status').read_text())[1], time.process_time())"
    )
    words = [sys.executable, "-c", code, "report", str(folder), "--out", str(tmp_path / "page.html")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    kilobytes, seconds = map(float, done.stdout.split()[-2:])
    kept = kilobytes < 1e6 and seconds < 60 and "1000000" in (tmp_path / "page.html").read_text()
    count(
        "report of a million rounds within a minute and 1 GB", tried=1, survived=int(kept), lost=int(not kept), silent=0
    )
    assert kept, (kilobytes, seconds)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg", 0, [0.5])
    (make_run(tmp_path / "b", "scaffold", 0, []) / "rounds.jsonl").unlink()
    assert table(group_runs(load([tmp_path])), None)[2][1:4] == ["1", "-", "-"]
    write([tmp_path], tmp_path / "page.html")
    assert "(0 of 3 rounds)" in (tmp_path / "page.html").read_text()


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    for path, word in ((tmp_path, "no run folder"), (tmp_path / "none", "does not exist")):
        with pytest.raises(BadRunFolder, match=word) as error:
            load([path])
        assert "\n" not in str(error.value)
    (tmp_path / "bad").mkdir()
    sealed = (seal_toml(text, "x") for text in ("algorithm = ", "clients = 3", 'algorithm = "x"\nset = 3\n'))
    for content in (b"", b"algorithm = ", b"\xff\xfe", b'algorithm = "x"\n', *sealed):
        (tmp_path / "bad" / "run.toml").write_bytes(content)
        with pytest.raises(BadRunFolder, match=r"run\.toml") as error:
            load([tmp_path])
        assert "\n" not in str(error.value)


def test_runs_are_found_two_levels_deep(tmp_path: Path) -> None:
    make_run(tmp_path / "x" / "y", "fedavg", 0, [0.5])
    make_run(tmp_path / "x" / "y2" / "z", "fedavg", 1, [0.5])
    make_run(tmp_path / ".hidden", "fedavg", 2, [0.5])
    assert [run.folder.name for run in load([tmp_path])] == ["y"]


class Strict(HTMLParser):
    """Collects the tags, and where a file or an address outside the page would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            outside = name in ("src", "href", "xlink:href") and not (value or "").startswith("#")
            self.loads += [value or ""] if outside else []


def test_the_page_is_whole_escaped_and_repeatable(tmp_path: Path) -> None:
    evil = "<script>alert('$x$ & _y')</script>"
    for seed in (0, 1):
        make_run(tmp_path / f"a{seed}", "fedavg", seed, [0.5, 0.6], val=[0.5, 0.6], note=evil)
        make_run(tmp_path / f"<b>{seed}", "fedprox", seed, [0.5, 0.7], {"mu": evil}, [0.5, 0.6], note=evil)
        make_run(tmp_path / f"c{seed}", "scaffold", seed, [0.5, 0.8], {}, [0.5, 0.6], more={"dropped": 1})
        make_run(tmp_path / f"d{seed}", "fedprox", seed, [0.5, 0.8], {"mu": 1}, [0.5, 0.6])
    (tmp_path / "sweep.toml").write_text("[sweep]\ntarget = 0.55\n")
    first, second = tmp_path / "out" / "one.html", tmp_path / "out" / "two.html"
    write([tmp_path], first)
    write([tmp_path], second)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(file.name for file in first.parent.iterdir()) == ["one.html", "two.html"]
    text = first.read_text()
    page = Strict()
    page.feed(text)
    assert not page.tags & {"b", "link", "img", "iframe"} and page.loads == []
    assert not re.search(r"@import|url\((?!#)", text)
    assert text.count("<script") == text.count("</script>") == 1 + len(SCRIPTS), "a name of a run has become a script"
    content = content_of(text)
    (section,) = content["sections"]
    labels = [group.label for group in rank(group_runs(load([tmp_path])))]
    assert [group["label"] for group in section["groups"]] == labels and any(evil in label for label in labels)
    assert [column["name"] for column in section["table"]["columns"]][5] == "rounds to accuracy 0.55"
    assert "Dropped clients" in [table["title"] for table in section["tables"]]
    assert content["made"]["commit"] == "abc123" and content["made"]["versions.torch"] == "2.13"
    commands = [command for group in section["groups"] for command in group["commands"]]
    assert f"undrift run {tmp_path}/a0/run.toml --out NEW" in commands
    assert f"undrift run '{tmp_path}/<b>0/run.toml' --out NEW" in commands


def content_of(page: str) -> dict[str, Any]:
    """The document inside a page."""
    (text,) = re.findall(r'<script type="application/json" id="document">(.*?)</script>', page)
    content: dict[str, Any] = json.loads(text)
    return content


COUNTS = np.array([[8, 0, 0, 0], [4, 4, 0, 0], [1, 1, 1, 1]], dtype=np.int64)


def test_the_partition_in_numbers() -> None:
    # entropies 0, 1 and 2 bits
    assert partition_text(COUNTS)[1] == ["3", "4 / 8 / 8", "1 / 2 / 4", "1.00"]
    with_an_empty_client = np.vstack([COUNTS, np.zeros((1, 4), dtype=np.int64)])
    assert partition_text(with_an_empty_client)[1] == ["4", "0 / 6 / 8", "0 / 1.5 / 4", "1.00"]


def test_partition_pictures_are_real_files(tmp_path: Path) -> None:
    for ending in ("png", "svg"):
        one, two = tmp_path / f"one.{ending}", tmp_path / f"two.{ending}"
        partition_picture(COUNTS, one, "digits $1 <iid>")
        partition_picture(COUNTS, two, "digits $1 <iid>")
        assert one.read_bytes() == two.read_bytes()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(tmp_path.iterdir())) == 4
    with pytest.raises(BadSetting, match="png or"):
        partition_picture(COUNTS, tmp_path / "one.jpg", "digits")


def test_a_picture_of_many_clients_shows_the_first_hundred(tmp_path: Path) -> None:
    partition_picture(np.ones((150, 2), dtype=np.int64), tmp_path / "p.svg", "digits")
    text = " ".join("".join(ElementTree.parse(tmp_path / "p.svg").getroot().itertext()).split())
    assert "digits (first 100 of 150 clients)" in text


def test_other_objects_of_one_name_are_no_seeds(tmp_path: Path) -> None:
    """Runs from Python whose model, data or loss only has the same name are other groups, not seeds of one."""
    draw = np.random.default_rng(0)

    def blob() -> tuple[Any, ...]:
        return tuple(
            values for n in (40, 20) for values in (draw.normal(size=(n, 5)).astype(np.float32), np.arange(n) % 3)
        )

    def module(bend: type[nn.Module]) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), bend(), nn.Linear(4, 3))

    given: dict[str, Any] = {"model": module(nn.ReLU), "data": blob(), "clients": 4, "cohort": 2, "rounds": 1}
    for seed, change in enumerate(
        (
            {}, {}, {"model": module(nn.Tanh)}, {"data": blob()},
            {"loss": nn.CrossEntropyLoss(label_smoothing=0.1), "metrics": {"accuracy": accuracy}},
        )
    ):  # fmt: skip
        undrift.run(**(given | change), partition="iid", seed=seed, out=tmp_path / str(seed))  # type: ignore[arg-type]
    groups = group_runs(load([tmp_path]))
    assert sorted([run.folder.name for run in group.runs] for group in groups) == [["0", "1"], ["2"], ["3"], ["4"]]
    assert len({(group.task, group.label) for group in groups}) == 4
    assert [group.task for group in group_runs(load([tmp_path / "0", tmp_path / "1"]))] == [
        "object, iid, object Sequential"
    ]
