"""Benchmarks are not run here, but what they take from the package must be there."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_it_imports_is_there(script: Path) -> None:
    taken = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    for node in taken:
        if (node.module or "").partition(".")[0] != "undrift":
            continue
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")


def test_a_piece_of_the_papers_goes_on_from_what_came_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are joined by their keys, checkpoints come along as far as they fit, and what is here already stays."""
    monkeypatch.syspath_prepend(str(SCRIPTS[0].parent))
    papers = importlib.import_module("papers")
    first, second, back = (tmp_path / name for name in ("first", "second", "back"))
    (first / "runs/small/checkpoint").mkdir(parents=True)
    (first / "runs/large").mkdir()
    (first / "runs/small/checkpoint/7.bin").write_bytes(b"seven")
    (first / "runs/large/1.bin").write_bytes(os.urandom(papers.LARGEST + 1))
    (first / "t.jsonl").write_text('{"key": "a", "n": 1}\n{"key": "b", "n": 1}\n')
    assert list(papers.send_back(first, back)) == ["large does not fit (16 MB); elsewhere it begins anew"]
    assert sorted(file.name for file in back.iterdir()) == ["results.tar.xz", "unfinished-1.tar.xz"]
    second.mkdir()
    (second / "t.jsonl").write_text('{"key": "b", "n": 2}\n')
    for _ in range(2):  # twice changes nothing
        papers.bring(back, second)
        assert (second / "t.jsonl").read_text() == '{"key": "b", "n": 2}\n{"key": "a", "n": 1}\n'
        assert (second / "runs/small/checkpoint/7.bin").read_bytes() == b"seven"


def test_the_papers_come_in_the_order_of_their_importance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS[0].parent))
    papers = importlib.import_module("papers")
    items = {item.name: item for item in papers.QUEUE}
    assert next(iter(items)) == "mnist" and len(items) == len(papers.QUEUE)
    seen: set[str] = set()
    half = papers.rounds_of(items["domo-beta"], tmp_path, seen)
    assert half == {"domo": (4 * 20, 6 * 100)}, "one search of four rates for all"
    assert papers.rounds_of(items["domo-beta"], tmp_path, seen) == {"domo": (0, 0)}, (
        "what is counted is not counted again"
    )
