"""Suites at the small scale: done once, gone on with, copied, and compared."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from undrift import cli
from undrift.core import stopping
from undrift.jobs import packs
from undrift.jobs import suite as suites
from undrift.jobs.batch import Batch, NoTime
from undrift.jobs.cells import Asked, Work
from undrift.jobs.config import RunConfig
from undrift.jobs.reproduce import reproduce
from undrift.jobs.results import Results, read_lines
from undrift.jobs.suite import COMMANDS
from undrift.jobs.sweep import KINDS


def asked(out: Path, suite: str = "gradma-table1", **changes: Any) -> Asked:
    given = {"columns": ("mnist-0.01",), "rows": ("fedavg", "fedavgm"), "scale": "small", "seeds": 2}
    return Asked(suite, out, **given | changes)


def lines(out: Path) -> dict[str, dict[str, Any]]:
    """The finished runs, without times."""
    found = [line for file in out.glob("*.jsonl") for line in read_lines(file) if "scores" in line]
    return {line["key"]: {n: v for n, v in line.items() if n not in ("seconds", "commit")} for line in found}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small table that was run without interruption."""
    out = tmp_path_factory.mktemp("whole")
    assert not reproduce(asked(out, tune="grid"), lambda text: None)
    return out


def test_every_cell_has_its_numbers_and_a_verdict(whole: Path) -> None:
    verdict = json.loads((whole / "gradma-table1-small.json").read_text())
    assert [cell["row"] for cell in verdict["cells"]] == ["fedavg", "fedavgm"]
    given = "gradma-table1 --columns mnist-0.01 --methods fedavg,fedavgm --seeds 2 --tune grid --scale small"
    assert verdict["command"] == f"undrift reproduce {given}"
    for cell in verdict["cells"]:
        assert cell["ours"]["seeds"] == 2 and cell["verdict"] in ("order agrees", "differs") and cell["errors"] < -2
        assert cell["ours"]["mean"] == pytest.approx(sum(cell["values"]) / 2) and cell["paper"]["deviation"]
        assert len(cell["curves"][0]) == 3 and cell["picked"]["lr"] in (0.01, 0.1)
    assert verdict["rank_correlation"]["mean"] in (-1.0, 1.0) and verdict["spent_on_tuning"]["trials"] == 4
    assert [claim["holds"] for claim in verdict["claims"]] == [None] * len(verdict["claims"]), (
        "other methods are missing"
    )
    page = (whole / "gradma-table1-small.html").read_text()
    assert (
        "46.19 ± 1.29" in page
        and "<polyline" in page
        and "gradma-table1-small.html" in (whole / "index.html").read_text()
    )
    assert not (whole / "runs").exists(), "what is finished is a line, and no folder"


def test_trials_have_seeds_and_samples_of_their_own(whole: Path) -> None:
    trials = [line for line in lines(whole).values() if line.get("trial")]
    finals = [line for line in lines(whole).values() if not line.get("trial")]
    assert {line["seed"] for line in trials} == {100} and {line["seed"] for line in finals} == {0, 1}
    assert all(line["settings"]["val_fraction"] == 0.1 and line["rounds"] == 3 for line in trials)
    assert all("val_fraction" not in line["settings"] and line["rounds"] == 6 for line in finals)


def test_a_finished_cell_is_not_run_again_nor_in_a_copied_folder(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    before = (whole / "gradma-table1-small.jsonl").read_bytes()
    said: list[str] = []
    assert not reproduce(asked(tmp_path / "copy", tune="grid"), said.append)
    assert (tmp_path / "copy/gradma-table1-small.jsonl").read_bytes() == before
    assert "  nothing is left to do" in said and not any("rounds of trials" in text for text in said)


def test_the_second_table_takes_the_runs_of_the_first(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    reproduce(asked(tmp_path / "copy", "gradma-table2", tune="grid"), lambda text: None)
    assert not (tmp_path / "copy/gradma-table2-small.jsonl").exists()
    cell = json.loads((tmp_path / "copy/gradma-table2-small.json").read_text())["cells"][0]
    assert cell["paper"]["mean"] == 493.0 and cell["seeds"] == [0, 1]


def test_interrupted_and_gone_on_equals_uninterrupted(whole: Path, tmp_path: Path) -> None:
    """One run stands at half its rounds, another is done, the last line was cut short by a kill: the rest is done."""
    texts = (whole / "gradma-table1-small.jsonl").read_text().splitlines()
    final = next(text for text in texts if '"seed": 0' in text and '"row": "fedavg"' in text)
    kept = [text for text in texts if text != final]
    (tmp_path / "gradma-table1-small.jsonl").write_text("\n".join(kept[:-1]) + "\n" + kept[-1][: len(kept[-1]) // 2])
    work = Work(asked(tmp_path).load(), Batch(Results(tmp_path, "x"), print), asked(tmp_path))
    cell = work.suite.cells[0]
    picked = json.loads((whole / "gradma-table1-small.json").read_text())["cells"][0]["picked"]
    run = next(work.finals(cell, picked))
    assert run.key == json.loads(final)["key"] and isinstance(run.config, RunConfig)
    folder, config = work.batch.folder(run), work.batch.settings(run)

    def stop(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == 3:
            stopping._end_of_time = 0.0  # as if the minutes were over now

    def begin() -> None:
        with stopping.within(float("inf")):
            packs.run_packed([config], [folder.path], [stop], leave_models=False)  # type: ignore[list-item]

    with pytest.raises(stopping.Stopped):
        begin()
    assert folder.last_checkpoint() == 3 and not folder.is_finished()
    assert not reproduce(asked(tmp_path, tune="grid"), lambda text: None)
    assert lines(tmp_path) == lines(whole) and not (tmp_path / "runs").exists()


def test_it_stops_when_the_minutes_are_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        f"reproduce gradma-table1 --scale small --columns mnist-1 --methods fedavg --seeds 1 --out {tmp_path}".split()
    )
    assert cli.main([*command, "--minutes", "1e-9"]) == 0
    assert "stopped after 1e-09 minutes; the same command goes on" in capsys.readouterr().out
    assert cli.main(command) == 0 and len(lines(tmp_path)) == 1
    said = capsys.readouterr().out
    assert "98.22 ± 0.05" in said and "claim: GradMA has the best" in said


def test_packed_cells_are_those_run_alone(whole: Path, tmp_path: Path) -> None:
    assert not reproduce(asked(tmp_path, rows=("fedavg",), tune="grid", pack=True), lambda text: None)
    for key, line in lines(tmp_path).items():
        assert line["together"] == 2
        assert line["scores"]["accuracy"]["last"] == pytest.approx(
            lines(whole)[key]["scores"]["accuracy"]["last"], abs=0.02
        )


def test_a_picked_file_takes_the_place_of_trials(whole: Path, tmp_path: Path) -> None:
    shutil.copy(whole / "gradma-table1-small.jsonl", tmp_path)
    before = (tmp_path / "gradma-table1-small.jsonl").read_bytes()
    reproduce(asked(tmp_path, tune=str(whole / "gradma-table1-small-picked.toml")), lambda text: None)
    assert (tmp_path / "gradma-table1-small.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("suite", "columns", "rows"),
    [
        ("def-table6", ("ratio-64",), ("sgd", "def", "def-a")),
        ("dsp-table1", ("r98-c10",), ("dsp-110",)),
        ("fedsm-table11", ("client-2", "average"), ("fedsm", "local-2")),
        ("dsp-table2", (), ()),
    ],
)
def test_other_commands(tmp_path: Path, suite: str, columns: tuple[str, ...], rows: tuple[str, ...]) -> None:
    assert not reproduce(asked(tmp_path, suite, columns=columns, rows=rows, seeds=1), lambda text: None)
    verdict = json.loads((tmp_path / f"{suite}-small.json").read_text())
    assert verdict["cells"] and all(cell["ours"]["mean"] is not None for cell in verdict["cells"])
    if suite == "def-table6":
        assert len(lines(tmp_path)) == 2, "DEF and DEF-A are one run"
    if suite == "dsp-table2":
        assert not list(tmp_path.glob("*.jsonl")) and all(claim["holds"] for claim in verdict["claims"])


def test_noise_runs_are_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "there", lambda dataset: False)
    said: list[str] = []
    reproduce(asked(tmp_path, columns=("mnist-1",), rows=("fedavg",), scale="full", seeds=1), said.append)
    (cell,) = json.loads((tmp_path / "gradma-table1.json").read_text())["cells"]
    assert (
        cell["verdict"] == "only for 2 rounds on noise(side=28, channels=1): mnist is not at hand" and not cell["ours"]
    )
    assert any("mnist is not at hand" in text for text in said) and len(lines(tmp_path)) == 1


def test_a_damaged_results_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"key": 3}\n')
    assert cli.main(f"reproduce gradma-table1 --scale small --plan --out {tmp_path}".split()) == 2
    assert "a.jsonl, line 1, holds no finished run" in capsys.readouterr().err
    assert cli.main(["reproduce"]) == 2 and "undrift reproduce --list shows all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("suite", "column", "row"), [("def-table6", "ratio-64", "def"), ("dsp-table1", "r98-c10", "dsp-110")]
)
def test_other_commands_go_on_where_they_stood(tmp_path: Path, suite: str, column: str, row: str) -> None:
    """A run is stopped after its first round; its cuts and the like stay as they were."""
    only = {"columns": (column,), "rows": (row,), "seeds": 1}
    work = Work(asked(tmp_path, suite, **only).load(), Batch(Results(tmp_path, "x"), print), asked(tmp_path, suite))
    (run,) = work.finals(work.suite.cells[0], {})

    def stop(record: dict[str, Any], rounds: int) -> None:
        stopping._end_of_time = 0.0

    def begin() -> None:
        with stopping.within(float("inf")):
            KINDS[COMMANDS[run.command]].run(
                work.batch.given_settings(run), out=work.batch.folder(run).path, progress=stop
            )

    with pytest.raises(stopping.Stopped):
        begin()
    assert work.batch.folder(run).last_checkpoint() == 1
    assert not reproduce(asked(tmp_path, suite, **only), lambda text: None)
    (line,) = lines(tmp_path).values()
    assert line["rounds"] == 2 and len(line["curve"]) == 2 and not (tmp_path / "runs").exists()


def test_what_would_be_cut_off_is_not_begun(whole: Path, tmp_path: Path) -> None:
    """Finished runs tell how long a program takes; one that does not fit waits for a fresh start, others go on."""
    shutil.copytree(whole, tmp_path / "copy")
    (file,) = (tmp_path / "copy").glob("*.jsonl")
    texts = [json.loads(text) for text in file.read_text().splitlines()]
    slow = [text | {"seconds": 100.0} if text.get("row") == "fedavg" else text for text in texts]
    file.write_text("".join(json.dumps(text) + "\n" for text in slow if text.get("seed") != 0))
    said: list[str] = []
    assert not reproduce(asked(tmp_path / "copy", tune="grid", minutes=3.0), said.append)
    assert not [text for text in said if "stopped" in text], "100 s fit into three minutes"
    file.write_text("".join(json.dumps(text) + "\n" for text in slow if text.get("seed") != 0))
    work = Work(asked(tmp_path).load(), Batch(Results(tmp_path / "copy", "x"), print, minutes=3.0), asked(tmp_path))
    work.batch.end -= 100.0  # so much has passed
    runs = [next(work.finals(cell, {"lr": 0.1})) for cell in work.suite.cells]
    slow_run, other = (run._replace(config=dataclasses.replace(run.config, seed=5)) for run in runs)
    with pytest.raises(NoTime, match="fedavg-.* takes about 100 s, and (79|80) s are left"):
        work.batch.do([slow_run])
    assert work.batch.do([other])[0], "which is quick"
    work.batch.whole = 90.0
    work.batch.end = time.monotonic() + 90.0
    work.batch.check_time([slow_run])  # a fresh start would not be long enough either


def test_the_plan_counts_a_run_once(tmp_path: Path) -> None:
    said: list[str] = []
    reproduce(
        asked(tmp_path, "fedsm-table11", columns=("client-2", "average"), rows=("fedavg",), plan=True), said.append
    )
    assert "  client-2: 1 cells, 2 runs of 2 rounds, 2 of them to do; about" in said[1]
    assert said[2] == "  average: 1 cells, with the runs of the columns before"
