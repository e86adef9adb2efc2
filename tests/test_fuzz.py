"""Nonsense is refused in one line: arguments, files of settings and data that no user should give."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests import fuzz

# A damaged pickle can leave CPython with an error that nobody can catch, when its memory is freed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
KINDS: dict[str, Callable[[], st.SearchStrategy[fuzz.Case]]] = {
    "arguments": fuzz.arguments,
    "TOML files": fuzz.toml_files,
    "data files": fuzz.data_files,
}


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder for one case: fifty thousand of them would fill the disk."""
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fuzz_with(kind: str, tries: int, number: int, folder: Path) -> tuple[int, Counter[str]]:
    """Try so many cases of a kind, by this seed; returns their number, and what went wrong how often."""
    tried, wrong = 0, Counter[str]()

    @seed(number)
    @settings(
        max_examples=tries,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(KINDS[kind]())
    def run(case: fuzz.Case) -> None:
        nonlocal tried
        tried += 1
        with scratch(folder / str(tried)) as place:
            if what := fuzz.trouble(case, place):
                wrong[what] += 1

    with fuzz.kept_short():
        run()
    return tried, wrong


@pytest.mark.parametrize("kind", KINDS)
def test_nonsense_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    tried, wrong = fuzz_with(kind, 100, 0, tmp_path)
    assert tried >= 100 and not wrong, wrong


@pytest.mark.system
@pytest.mark.parametrize(("kind", "tries"), [("arguments", 15_000), ("TOML files", 15_000), ("data files", 20_000)])
def test_fifty_thousand_pieces_of_nonsense(kind: str, tries: int, tmp_path: Path, count: Any) -> None:
    tried, wrong = fuzz_with(kind, tries, 1, tmp_path)
    lost = sum(wrong.values())
    count(f"nonsense in {kind}: lost is a traceback", tried=tried, survived=tried - lost, lost=lost, silent=None)
    print(f"{tried} {kind}, {lost} tracebacks")
    assert tried >= tries and not wrong, wrong


@pytest.mark.parametrize("name", ["run", "dp", "pipe"])
def test_no_case_runs_for_longer_than_a_round(name: str, tmp_path: Path) -> None:
    """A whole run would take years: fields are drawn that ask for any number of rounds."""
    words = [name, *fuzz.SMALL[name].replace("--rounds 1", "--rounds 1000000").split(), "--out", str(tmp_path / "o")]
    with fuzz.kept_short(), pytest.raises(fuzz.Enough):
        fuzz.command(*words)


def test_the_fuzzer_sees_tracebacks_and_untidy_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise ValueError("embedded null byte")

    assert "ValueError: embedded null byte" in fuzz.trouble(fail, tmp_path)
    monkeypatch.setattr(fuzz.cli, "main", lambda words: print("undrift: a\nb", file=sys.stderr) or 2)
    assert "Untidy" in fuzz.trouble(lambda folder: fuzz.command("run"), tmp_path)
