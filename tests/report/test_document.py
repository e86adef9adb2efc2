"""The document behind the page: curves that are thinned, tests between methods, settings, kinds of runs, clients and classes."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import undrift
from tests.report.test_report import COMMON, MADE, content_of, make_run
from tests.small import QUICK, write_run
from undrift import cli
from undrift.core.run_files import DEPLOYED
from undrift.data.load import class_counts, load_dataset
from undrift.report.curves import CORNERS, LEAST_POINTS, axes_of, corners, curve
from undrift.report.document import document
from undrift.report.load import group_runs, load
from undrift.report.page import LIVE, SCRIPTS, STYLES, UPLOT, WEB, page_of, write
from undrift.report.significance import difference, holm, two_sided


def only_section(*folders: Path, **given: Any) -> dict[str, Any]:
    (section,) = document(load(list(folders)), None, **given)["sections"]
    return dict(section)


def test_the_t_test_is_that_of_scipy() -> None:
    for freedom in range(1, 30):
        for t in (0.0, 0.3, -2.0, 7.0):
            assert two_sided(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), abs=1e-12)
    random = np.random.default_rng(0)
    for seeds in (2, 3, 10):
        a, b = random.normal(size=(2, seeds)).tolist()
        found = difference(dict(zip("abcdefghij", a, strict=False)), dict(zip("abcdefghij", b, strict=False)))
        expected = stats.ttest_rel(a, b)
        assert found is not None and found.p == pytest.approx(expected.pvalue) and found.seeds == seeds


def test_seeds_are_paired_and_what_cannot_be_tested_has_no_p() -> None:
    a, b = {"0": 0.5, "1": 0.7, "5": 0.9}, {"1": 0.6, "0": 0.5, "7": 0.1}
    found = difference(a, b)  # seeds 0 and 1: differences 0.0 and 0.1
    assert (
        found is not None and found.mean == pytest.approx(0.05) and found.seeds == 2 and found.p == pytest.approx(0.5)
    )
    assert difference(a, {"9": 1.0}) is None and difference({"0": 1.0}, {"0": 0.5}) == (0.5, None, 1)
    assert difference({"0": 0.6, "1": 0.7}, {"0": 0.5, "1": 0.6}) == (pytest.approx(0.1), None, 2)
    assert difference({"0": 0.6, "1": 0.7}, {"0": 0.6, "1": 0.7}) == (0.0, 1.0, 2)
    assert holm([]) == [] and holm([0.9, 0.8]) == [1.0, 1.0]


def test_every_pair_of_methods_is_tested(tmp_path: Path) -> None:
    scores = {"fedavg": [0.5, 0.55, 0.53], "scaffold": [0.8, 0.79, 0.85], "mifa": [0.6, 0.62, 0.65]}
    for name, values in scores.items():
        for seed, value in enumerate(values):
            make_run(tmp_path / f"{name}{seed}", name, seed, [value])
    tests = only_section(tmp_path)["tests"]
    assert tests["groups"] == [0, 1, 2] and [tests["rows"][k][k] for k in range(3)] == [None] * 3
    ps = holm([stats.ttest_rel(scores[name], scores["scaffold"]).pvalue for name in ("mifa", "fedavg")])
    assert [row[1] for row in tests["rows"][0][1:]] == pytest.approx(ps, rel=1e-3)
    assert tests["rows"][0][2][0] == pytest.approx(-0.2867, abs=1e-4) and tests["rows"][2][0][0] == pytest.approx(
        0.2867, abs=1e-4
    )


def test_a_thinned_curve_keeps_its_ends_and_the_extremes_of_its_mean(tmp_path: Path) -> None:
    random, n = np.random.default_rng(0), 3000
    table = random.normal(size=(2, n)).round(3) + 10
    table[:, 1234] = 99.0
    for seed, values in enumerate(table.tolist()):
        make_run(tmp_path / f"s{seed}", "fedavg", seed, [None] * n, loss=values)
    (group,) = group_runs(load([tmp_path]))
    found = curve(group, "loss", 200)
    assert found is not None and found.thinned and 150 < len(found.rounds) <= 202
    assert found.rounds[0] == 1 and found.rounds[-1] == n and sorted(set(found.rounds)) == found.rounds
    mean = table.mean(0)
    assert {1235, int(mean.argmin()) + 1} <= set(found.rounds)
    for row, values in zip(found.runs, table, strict=True):
        assert row == pytest.approx([values[t - 1] for t in found.rounds], rel=1e-3)
    whole = curve(group, "loss", n)
    assert whole is not None and not whole.thinned and whole.rounds == list(range(1, n + 1))
    assert only_section(tmp_path)["points"] == 1000


def test_seeds_of_unequal_length_keep_their_own_values(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg", 0, [0.1, None, 0.3])
    make_run(tmp_path / "b", "fedavg", 1, [0.2, 0.4])
    (group,) = group_runs(load([tmp_path]))
    assert curve(group, "accuracy", 100) == ([1, 2, 3], [[0.1, None, 0.3], [0.2, 0.4, None]], False)


def test_costs_are_lines_of_few_corners(tmp_path: Path) -> None:
    n = 2000
    folder = make_run(tmp_path / "a", "fedavg", 0, [0.5] * n)
    (run,) = load([folder])
    axes = {axis.key: axis for axis in axes_of(group_runs([run]))}
    assert list(axes) == ["gradients", "bytes", "seconds"]  # no network was simulated
    assert corners(run, axes["bytes"]) == [[1, n], [1000, 1000 * n]]
    # Three rates, and one round that took as long as all others: what a straight line says is nearly what was spent.
    spent = np.where(np.arange(n) < 500, 1.0, 4.0)
    spent[1500] = 5000.0
    run.records.columns["seconds"] = spent
    rounds, amounts = corners(run, axes["seconds"])
    assert len(rounds) <= CORNERS
    told = np.interp(np.arange(1, n + 1), rounds, amounts)
    assert np.abs(told - np.cumsum(spent)).max() <= 0.002 * spent.sum() + 1


def test_only_settings_that_differ_or_are_no_defaults_are_shown(tmp_path: Path) -> None:
    quick = ["--clients", "4", "--cohort", "2", "--rounds", "1", "--model", "logreg", "--set", "lr=0.05"]
    for name in ("fedavg", "fedprox"):
        more = ["--set", "mu=0.5"] if name == "fedprox" else []
        assert cli.main(["run", "--algorithm", name, *quick, *more, "--out", str(tmp_path / name)]) == 0
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    (section,) = content_of((tmp_path / "page.html").read_text())["sections"]
    shared = section["settings"]["shared"]
    assert shared == {"clients": "4", "cohort": "2", "rounds": "1", "model": "logreg", "lr": "0.05"}
    assert section["settings"]["defaults"] > 15
    differing = {group["algorithm"]: group["settings"] for group in section["groups"]}
    assert differing["fedprox"]["mu"] == "0.5" and "mu" not in differing["fedavg"]


def test_a_run_that_has_diverged_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="nan|finite|diverged"):
        undrift.run(QUICK | {"model": "mlp", "algorithm": "fedavgm", "lr": 8.0, "rounds": 60}, out=tmp_path / "wild")
    undrift.run(QUICK, out=tmp_path / "tame")
    made = document(load([tmp_path]), None)
    (note,) = made["notes"]
    assert note.startswith(f"Diverged, and ended early: {tmp_path / 'wild'} (") and note.endswith(" of 60 rounds)")
    tables = [section["table"] for section in made["sections"]]
    ends = [row[-1][0] for table in tables for row in table["rows"] if table["columns"][-1]["name"] == "rounds run"]
    assert sum(end.endswith("(1 diverged)") for end in ends) == 1 and len(ends) == 2


def test_runs_that_ended_without_a_score_do_not_sound_as_if_one_would_come(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="nan|finite|diverged"):
        undrift.run(QUICK | {"model": "mlp", "lr": 1e6, "rounds": 20, "eval_every": 20}, out=tmp_path / "wild")
    (section,) = document(load([tmp_path]), None)["sections"]
    assert section["verdict"] == "No run has a score: all of them diverged before their first test."


def test_a_column_without_values_is_left_out(tmp_path: Path) -> None:
    lines = [{"round": 1, "loss": 1.0, "accuracy": 0.5, "seconds": 0.1}]
    write_run(tmp_path / "a", {"algorithm": "dsp", "command": "pipe", **COMMON, "seed": 0, "made": MADE}, lines)
    names = [column["name"] for column in only_section(tmp_path)["table"]["columns"]]
    assert "seconds per round" in names and "consistency at the end" not in names


def test_kinds_of_runs_have_sections_of_their_own(tmp_path: Path) -> None:
    make_run(tmp_path / "simulated", "fedavg", 0, [0.5])
    (make_run(tmp_path / "deployed", "fedavg", 0, [0.4]) / DEPLOYED).write_text("{}")
    lines = [{"round": 1, "loss": 1.0, "accuracy": 0.5}]
    write_run(tmp_path / "dp", {"method": "def", "dataset": "digits", "model": "mlp", "workers": 2, "seed": 0}, lines)
    write_run(tmp_path / "pipe", {"command": "pipe", "algorithm": "dsp", "dataset": "digits", "model": "mlp"}, lines)
    sections = document(load([tmp_path]), None)["sections"]
    assert {section["title"]: [group["label"] for group in section["groups"]] for section in sections} == {
        "Real federation: digits, iid, mlp": ["fedavg"],
        "Data-parallel training: digits, mlp": ["def"],
        "One network in blocks: digits, mlp": ["dsp"],
        "Simulated federation: digits, iid, mlp": ["fedavg"],
    }
    commands = {section["kind"]: section["groups"][0]["commands"][0].split()[1] for section in sections}
    assert commands == {"run": "run", "deploy": "run", "dp": "dp", "pipe": "pipe"}


def test_what_a_run_records_of_clients_and_classes_is_shown(tmp_path: Path) -> None:
    words = [
        "run",
        "--clients=5",
        "--cohort=5",
        "--rounds=4",
        "--eval-every=1",
        "--model=logreg",
        "--partition=dirichlet:0.3",
    ]
    for seed in (0, 1):
        assert cli.main([*words, "--seed", str(seed), "--out", str(tmp_path / str(seed))]) == 0
    section = only_section(tmp_path)
    held = section["holdings"]
    assert held["clients"] == 5 and held["seed"] == "0" and held["names"] is None
    counts = np.array(held["counts"])
    expected, _ = class_counts(load_dataset("digits"), "dirichlet:0.3", 5, 0)
    assert counts.tolist() == expected.tolist()
    runs = load([tmp_path])
    (group,) = section["groups"]
    quantiles = np.mean([run.records.read(3)["client_accuracies"] for run in runs], 0)
    assert group["client_accuracies"] == pytest.approx(quantiles.tolist(), rel=1e-3) and len(quantiles) == 21
    (classes,) = section["classes"]
    accuracies = np.array([[run.records.read(t)["class_accuracies"] for t in range(4)] for run in runs], dtype=float)
    assert classes["rounds"] == [1, 2, 3, 4]
    np.testing.assert_allclose(np.array(classes["accuracy"]).T, accuracies.mean(0), atol=1e-3)
    forgotten = np.maximum.accumulate(accuracies, 1) - accuracies
    np.testing.assert_allclose(np.array(classes["forgetting"]).T, forgotten.mean(0), atol=1e-3)


@pytest.mark.parametrize(
    "made", [{"holdings": 3}, {"holdings": []}, {"holdings": ["1 2", "3"]}, {"holdings": ["a b"]}, {"holdings": [[1]]}]
)
def test_holdings_of_another_form_are_left_out(made: dict[str, Any], tmp_path: Path) -> None:
    line = {"round": 1, "loss": 1.0, "accuracy": 0.5, "class_accuracies": 3, "client_accuracies": ["x"]}
    write_run(tmp_path / "a", {"algorithm": "fedavg", **COMMON, "seed": 0, "made": MADE | made}, [line])
    section = only_section(tmp_path)
    assert section["holdings"] is None and section["classes"] == []
    assert section["groups"][0]["client_accuracies"] == []


def test_papers_of_known_methods_are_cited(tmp_path: Path) -> None:
    for name in ("fedavg", "fedmim+gradma-s", "mine.py:Method"):
        make_run(tmp_path / name, name, 0, [0.5])
    cited = " ".join(document(load([tmp_path]), None)["cite"])
    assert "{mcmahan2017fedavg," in cited and "{luo2023gradma," in cited and cited.count("@") >= 3


def many_runs(root: Path, groups: int, seeds: int, rounds: int) -> None:
    random = np.random.default_rng(0)
    for group in range(groups):
        for seed in range(seeds):
            noise = iter(random.random((rounds, 12)).tolist())
            lines = []
            for t in range(1, rounds + 1):
                a, b, c, d, e, f, *classes = next(noise)
                lines.append({
                    "round": t, "loss": a, "accuracy": b, "val_accuracy": c, "val_loss": d, "train_loss": e, "consistency": f,
                    "forgetting": a * b, "seconds": c, "bytes_down": 1000, "bytes_up": 1000 + t, "gradients": 50, "clients": 10,
                    "dropped": 0, "network_seconds": d, "class_accuracies": [round(v, 4) for v in (*classes, a, b, c, d)],
                })  # fmt: skip
            settings = {"algorithm": f"method{group}", **COMMON, "rounds": rounds, "seed": seed}
            held = {"holdings": [" ".join(["12"] * 10)] * 100}
            write_run(root / f"{group}-{seed}", {**settings, "made": MADE | held}, lines)


def test_the_page_of_ninety_runs_is_small(tmp_path: Path) -> None:
    many_runs(tmp_path, 30, 3, 130)
    write([tmp_path], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 1.5e6
    section = content_of((tmp_path / "page.html").read_text())["sections"][0]
    assert len(section["groups"]) == 30 and len(section["shown"]) == 10 and len(section["measures"]) > 8
    assert all(len(rounds) >= LEAST_POINTS for rounds in section["rounds"]) and section["points"]


def test_our_scripts_make_no_markup_and_every_file_is_used() -> None:
    files = {file.name for file in WEB.iterdir()}
    assert files == {*LIVE, *STYLES, "uplot.LICENSE"}
    for name in LIVE:
        text = (WEB / name).read_text()
        assert "</script" not in text and "<!--" not in text, name
        if not name.startswith("uplot"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|https?://(?!www\.w3\.org)", text
            ), name
    assert UPLOT.split(",")[0].replace("uPlot ", "(v") in (WEB / "uplot.min.js").read_text()


def test_nothing_in_the_document_ends_its_script() -> None:
    evil = "</script><!-- \u2028 & \udcff"
    parts: dict[str, Any] = {"facts": "", "notes": [], "tables": [], "sections": []}
    content = {"title": "</title><script>", "evil": evil, **parts}
    page = page_of(content)
    assert content_of(page) == json.loads(json.dumps(content)) and page.count("<script") == 1 + len(SCRIPTS)
    assert "</title><script>" not in page and "<!-- \u2028" not in page


def test_the_tables_are_in_the_page_from_the_start(tmp_path: Path) -> None:
    for seed, score in enumerate((0.5, 0.6)):
        make_run(tmp_path / str(seed), "<b>mine</b>", seed, [score])
    write([tmp_path], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    before = page[: page.index('<script type="application/json"')]  # nothing of it is made by a script
    (section,) = content_of(page)["sections"]
    assert html.escape(section["verdict"]) in before and "<b>mine" not in before
    for row in section["table"]["rows"]:
        first, *cells = (html.escape(cell[0]) for cell in row)
        assert f'<th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) in before


def test_growing_runs_keep_their_order_and_are_no_news(tmp_path: Path) -> None:
    for name, score in (("a", 0.1), ("b", 0.9)):
        make_run(tmp_path / name, name, 0, [score], rounds=9)
    runs = load([tmp_path])
    whole, growing = document(runs, None), document(runs, None, growing=True)
    assert [g["label"] for g in whole["sections"][0]["groups"]] == ["b", "a"] and "Not finished" in whole["notes"][0]
    assert [g["label"] for g in growing["sections"][0]["groups"]] == ["a", "b"] and growing["notes"] == []
    assert [row[0] for row in growing["sections"][0]["table"]["rows"]] == [["a"], ["b"]]


def test_a_loss_that_has_run_away_gets_a_logarithmic_axis(tmp_path: Path) -> None:
    for name, last in (("a", 0.5), ("b", 1e9)):
        lines = [
            {"round": t, "loss": loss, "accuracy": 0.5, "train_loss": 1.0 / t} for t, loss in ((1, 2.3), (2, last))
        ]
        write_run(tmp_path / name, {"algorithm": name, **COMMON, "seed": 0, "made": MADE}, lines)
    wide = {m["key"]: m["log"] for m in only_section(tmp_path)["measures"]}
    assert wide == {"accuracy": False, "loss": True, "train_loss": False}
