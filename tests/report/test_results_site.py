"""The site of results: a page for each paper, from whole and from partial verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from undrift import cli
from undrift.jobs.cells import Asked
from undrift.jobs.reproduce import reproduce


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Verdicts of two papers: a table in virtual time, and one of which most cells were not run."""
    out = tmp_path_factory.mktemp("made")
    reproduce(Asked("dsp-table2", out), lambda text: None)
    reproduce(Asked("gradma-table1", out, ("mnist-0.01",), ("fedavg",), 1, scale="small"), lambda text: None)
    return out


def test_every_paper_has_a_page_and_the_front_leads_to_it(made: Path, tmp_path: Path) -> None:
    assert cli.main(f"results {made} --out {tmp_path}".split()) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dsp.html", "gradma.html", "index.html"]
    front, dsp, gradma = ((tmp_path / f"{name}.html").read_text() for name in ("index", "dsp", "gradma"))
    assert 'href="dsp.html#dsp-table2"' in front and 'href="gradma.html#gradma-table1-small"' in front
    assert "On the Acceleration of Deep Learning Model Parallelism with Staleness" in front
    assert 'id="dsp-table2"' in dsp and "undrift reproduce dsp-table2" in dsp and 'class="order"' in dsp
    assert "11.14<small>≈ paper 8.98" in dsp, "a colour is also a mark"
    assert "nothing here says anything about the paper" in gradma and "<polyline" in gradma
    for page in (front, dsp, gradma):
        assert "<script" not in page and "http://" not in page.replace("http://www.w3.org", ""), "nothing is loaded"


def test_the_committed_results_make_a_site(tmp_path: Path) -> None:
    assert cli.main(f"results {Path(__file__).parents[2] / 'results'} --out {tmp_path}".split()) == 0
    assert (tmp_path / "index.html").exists()


def test_names_in_a_verdict_are_text(made: Path, tmp_path: Path) -> None:
    verdict: dict[str, Any] = json.loads((made / "dsp-table2.json").read_text())
    verdict["title"] = verdict["about"] = "<script>alert(1)</script>"
    verdict["paper"] = "../dsp"
    (tmp_path / "bad.json").write_text(json.dumps(verdict))
    assert cli.main(f"results {tmp_path} --out {tmp_path / 'site'}".split()) == 0
    assert sorted(file.name for file in (tmp_path / "site").iterdir()) == ["index.html", "other.html"]
    assert all("<script>" not in file.read_text() for file in (tmp_path / "site").iterdir())


def test_what_is_no_verdict_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(f"results {tmp_path} --out {tmp_path / 'site'}".split()) == 2
    assert "no verdicts of undrift reproduce in" in capsys.readouterr().err
    (tmp_path / "torn.json").write_text('{"suite": ')
    assert cli.main(f"results {tmp_path} --out {tmp_path / 'site'}".split()) == 2
    assert "torn.json is damaged" in capsys.readouterr().err
    (tmp_path / "torn.json").write_text('{"suite": "x"}')  # another file of JSON is left alone
    assert cli.main(f"results {tmp_path} --out {tmp_path / 'site'}".split()) == 2
