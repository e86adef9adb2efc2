"""What comes with the package: it has names and sentences, can be copied, and is found by the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from undrift import cli
from undrift.jobs import shipped
from undrift.jobs.suite import names_of_suites


def test_everything_has_a_name_of_its_own_and_a_sentence() -> None:
    entries = shipped.list_shipped()
    assert len({entry.name for entry in entries}) == len(entries)
    assert all(entry.about and entry.files for entry in entries)
    kinds = {
        kind: {entry.name for entry in entries if entry.kind == kind} for kind in ("sweep", "reproduce", "example")
    }
    assert {"demo", "quick"} <= kinds["sweep"] and kinds["reproduce"] == set(names_of_suites())
    assert {"my_algorithm", "deploy", "frameworks"} <= kinds["example"]
    assert sum(len(names) for names in kinds.values()) == len(entries)


def test_list_show_and_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["suites", "list"]) == 0
    listed = capsys.readouterr().out
    assert "  demo " in listed and "  gradma-table1 " in listed and "  pipeline_dsp " in listed
    assert cli.main(["suites", "show", "demo"]) == 0
    assert capsys.readouterr().out.strip() == (shipped.SWEEPS / "demo.toml").read_text().strip()
    assert cli.main(["suites", "copy", "gradma-table1", str(tmp_path / "here")]) == 0
    for end in ("toml", "csv"):
        ours = shipped.PAPERS / f"gradma-table1.{end}"
        assert (tmp_path / "here" / ours.name).read_bytes() == ours.read_bytes()
    (tmp_path / "here" / "gradma-table1.toml").unlink()
    assert cli.main(["suites", "copy", "gradma-table1", str(tmp_path / "here")]) == 2
    assert "gradma-table1.csv exists already" in capsys.readouterr().err
    assert not (tmp_path / "here" / "gradma-table1.toml").exists(), "nothing is copied where something is in the way"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sweep demos", "unknown sweep 'demos'; did you mean 'demo'?"),
        ("sweep suites/demo.toml", "demo comes with the package: give its name alone"),
        ("sweep mine.toml", "there is no file mine.toml; 'undrift suites list'"),
        ("sweep gradma-table1", "a paper's table; run it with 'undrift reproduce gradma-table1'"),
        ("reproduce demo", "demo is a sweep; run it with 'undrift sweep demo'"),
        ("suites show", "say which: undrift suites show NAME"),
        ("suites copy dmeo", "did you mean 'demo'?"),
        ("suites lits", "did you mean 'list'?"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split()) == 2
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_file_of_the_users_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").write_text("")
    assert shipped.sweep_file(Path("demo")).resolve() == tmp_path / "demo"
