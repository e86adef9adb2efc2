"""Commands without --out: a new folder each time, which two commands at once cannot share, and the last one to resume."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from undrift import cli
from undrift.core.numbered import new_folder, newest_folder

RUN = "run --model logreg --clients 5 --cohort 2 --partition iid --rounds"


def test_a_number_is_never_given_twice(tmp_path: Path) -> None:
    base = tmp_path / "runs" / "x"
    with ExitStack() as stack, ThreadPoolExecutor(8) as threads:
        folders = list(threads.map(lambda _: stack.enter_context(new_folder(base)), range(24)))
        assert {f.name for f in folders} == {"x", *(f"x-{n}" for n in range(2, 26))} - {"x-25"}
        (tmp_path / "runs" / "x-7" / "file").touch()
    assert [f.name for f in base.parent.iterdir()] == ["x-7"], "folders that stay empty are removed"
    (tmp_path / "runs" / "x-1.5").mkdir()
    (tmp_path / "runs" / "x-09").mkdir()
    assert newest_folder(base).name == "x-7"
    with new_folder(base) as folder:
        assert folder.name == "x-8"


def test_nothing_is_left_of_a_series_that_was_not_begun(tmp_path: Path) -> None:
    base = tmp_path / "runs" / "x"
    with new_folder(base) as folder:
        assert folder.is_dir()
    assert not base.parent.exists()
    base.parent.mkdir()
    with new_folder(base):
        pass
    assert base.parent.is_dir() and not any(base.parent.iterdir()), "a folder of the user's stays"


def test_a_place_where_no_folder_can_be_made_is_left_to_the_writer(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("nowhere")
    with new_folder(tmp_path / "runs" / "x") as folder:
        assert folder.name == "x" and not folder.exists()


def test_runs_without_out_do_not_collide_and_resume_goes_on_with_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = []
    for rounds in (1, 2):
        assert cli.main([*RUN.split(), str(rounds)]) == 0
        folders += re.findall(r"^no --out was given, so this goes to (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert folders == ["runs/fedavg-digits-seed0", "runs/fedavg-digits-seed0-2"]
    assert cli.main([*RUN.split(), "3", "--resume"]) == 0
    assert "goes to runs/fedavg-digits-seed0-2\n" in capsys.readouterr().out
    lines = [len((tmp_path / folder / "rounds.jsonl").read_text().splitlines()) for folder in folders]
    assert lines == [1, 3]
    assert cli.main([*RUN.split(), "0"]) == 2 and not (tmp_path / "runs" / "fedavg-digits-seed0-3").exists()
    capsys.readouterr()
    assert cli.main([*RUN.split(), "1", "--out", "mine"]) == 0
    assert "no --out" not in capsys.readouterr().out


def test_a_sweep_goes_to_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text('model = "logreg"\nrounds = 1\nclients = 4\ncohort = 2\n[sweep]\nseeds = [0]\n')
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    assert cli.main(["sweep", "tiny.toml", "--processes", "1"]) == 0
    assert "goes to runs/tiny-2\n" in capsys.readouterr().out
    assert (tmp_path / "runs" / "tiny-2" / "report.html").exists() and not any((tmp_path / "runs" / "tiny").iterdir())
