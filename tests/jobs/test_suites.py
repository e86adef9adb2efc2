"""The suites of the papers: files, plans, and published numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from undrift.core.errors import BadSetting, UnknownName
from undrift.jobs import suite as suites
from undrift.jobs.batch import Batch, Run
from undrift.jobs.cells import Asked, Work
from undrift.jobs.compare import cost_of_links
from undrift.jobs.results import Results
from undrift.jobs.suite import check_suite, load_suite, names_of_suites
from undrift.report.verdicts import check_claim, read_number

ASKED = {
    *(f"gradma-table{n}" for n in (1, 2)), *(f"gradma-figure{n}" for n in range(1, 8)), *(f"fedmim-table{n}" for n in (1, 2, 3)),
    *(f"domo-table{n}" for n in (16, 17, 18)), *(f"def-table{n}" for n in (5, 6, 8)), *(f"dsp-table{n}" for n in (1, 2, 3)),
    *(f"fedsm-table{n}" for n in (11, 13, 14, 15, 20, 21, 22, 23)),
}  # fmt: skip


def test_every_table_is_there() -> None:
    assert set(names_of_suites()) >= ASKED


@pytest.mark.parametrize("name", names_of_suites())
def test_a_suite_is_planned_and_its_settings_are_valid_for_its_methods(name: str) -> None:
    suite = check_suite(name)
    assert suite.cells and all(cell.row in suite.rows and cell.column in suite.columns for cell in suite.cells)
    if suite.paper and not suite.about.get("whole"):
        assert {(cell.row, cell.column) for cell in suite.cells} == set(suite.paper)
    small = load_suite(name, "small", at_hand=False)
    assert len(small.cells) == len(suite.cells)
    assert max(small.cells[0].config(0, {}).rounds, 6) == 6


@pytest.mark.parametrize("name", [name for name in names_of_suites() if suites.read_paper(name)])
def test_a_papers_claims_hold_in_its_own_numbers(name: str) -> None:
    suite = check_suite(name)
    paper = {place: read_number(text, 3) for place, text in suite.paper.items()}
    for claim in suite.claims:
        found = check_claim(claim, paper, suite.cells[0].score.higher, 10.0)
        assert found["holds"] is not False, (claim["text"], found)
        assert found["holds"] or suite.about.get("whole"), claim["text"]


def test_published_numbers_are_those_of_the_papers() -> None:
    assert suites.read_paper("gradma-table1")["gradma", "mnist-0.01"] == "77.97 ±1.28"
    assert suites.read_paper("gradma-table2")["fedavg", "tiny-1-s10"] == "1,116"
    assert suites.read_paper("def-table6")["ef", "ratio-256"] == "diverge"
    assert suites.read_paper("domo-table17")["fedavglm-z", "svhn-resnet20"] == "87.93 ±0.98"
    assert suites.read_paper("fedsm-table23")["fedsm-extra", "without-5"] == "0.4265"


def key(name: str, row: str, column: str) -> str:
    suite = load_suite(name, columns=[column], rows=[row], at_hand=False)
    (cell,) = suite.cells
    return Run(cell.command, cell.config(0, {}), {}).key


def test_tables_share_runs() -> None:
    assert key("gradma-table1", "mifa", "cifar10-0.1") == key("gradma-table2", "mifa", "cifar10-0.1")
    assert key("fedsm-table11", "fedsm", "average") == key("fedsm-table20", "fedsm", "client-1")
    assert key("def-table6", "sgd", "ratio-16") == key("def-table6", "sgd", "ratio-64"), "SGD has no ratio"
    assert key("def-table6", "def", "ratio-64") == key("def-table6", "def-a", "ratio-64"), "one run gives both"
    assert key("def-table5", "lam-0.3", "def") == key("def-table6", "def", "ratio-64")
    assert key("gradma-table1", "mifa", "mnist-0.1") != key("gradma-table1", "mifa", "mnist-0.01")


def test_data_that_are_not_at_hand_become_noise_for_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "there", lambda dataset: dataset != "tiny-imagenet")
    tiny, mnist = load_suite("gradma-table1", columns=["tiny-1-s5", "mnist-1"], rows=["fedavg"]).cells[::-1]
    assert tiny.missing == "tiny-imagenet" and tiny.settings["dataset"] == "noise(side=64, classes=200)"
    assert tiny.config(0, {}).rounds == 2 and not tiny.grid and not mnist.missing


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'gradma-table1'"):
        load_suite("gradma-tabel1")
    with pytest.raises(UnknownName, match="column of gradma-table1"):
        load_suite("gradma-table1", columns=["mnist-2"])
    with pytest.raises(UnknownName, match="method of gradma-table1"):
        load_suite("gradma-table1", rows=["fedavgg"])
    for seeds in (-1, 2**63):
        with pytest.raises(BadSetting, match="seeds must be at least 1 and at most 10000"):
            load_suite("gradma-table1", seeds=seeds, at_hand=False)


def test_islands_are_tuned_in_one_column_and_say_what_links_cost() -> None:
    """A pick of one column serves all; a long column has one seed; DDP's bytes are those of every island in every step."""
    suite = load_suite("islands", at_hand=False)
    found = {(cell.column, cell.row): cell for cell in suite.cells}
    assert {cell.tuned_in for cell in suite.cells} == {"iid-50"} and len(suite.rows) == len(suite.columns) == 8
    tokens = {cell.config(0, {}).rounds * cell.settings["steps"] * cell.settings["batch"] for cell in suite.cells}
    assert tokens == {5000 * 16, 5000 * 128}, "one client of DDP has all islands' samples"
    batch = Batch(Results(Path("nowhere"), "x"), print)
    work = Work(suite, batch, Asked("islands", Path("nowhere")), {}, {"iid-50/diloco": {"lr": 0.004, "server_lr": 0.5}})
    for column, seeds in (("roles-10", [0, 1]), ("roles-500", [0])):
        cell = found[column, "diloco"]
        picked = work.pick(cell)
        assert picked == {"lr": 0.004, "server_lr": 0.5}
        assert [run.config.seed for run in work.finals(cell, picked)] == seeds
    line = {"bytes": 1000}
    ours, ddp = (cost_of_links(suite, found["iid-10", row], [line, line]) for row in ("diloco", "ddp-adamw"))
    assert ours == {"bytes": 1000, "network_seconds": {"100": 125 * 8 / 1e8, "1000": 125 * 8 / 1e9}}
    assert ddp["bytes"] == 1000 * 8 * 50
