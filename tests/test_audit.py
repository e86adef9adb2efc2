"""The audit of other frameworks: its page says what its results say, and what is called wrong can be seen to be so."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "audit.md").read_text()
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "audit.json").read_text())
SHOWN = re.findall(
    r"### (.*?)\n.*?```python\n(.*?)```\n\n```text\n(.*?)```",
    re.sub(r"```\n\n```python", "```\n\n### \n```python", PAGE),
    re.S,
)
ROOMS = {"fluke-fl": "fluke", "flwr": ""}  # where a package is installed, if not under its own name; "": here


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("audit")


def test_the_page_has_the_table_of_the_results(audit: ModuleType) -> None:
    findings = [audit.Finding(**finding) for finding in RESULTS["findings"]]
    assert audit.table(findings) in PAGE
    verdicts = {finding.verdict for finding in findings}
    assert verdicts == {"equal to 1e-6", "another variant", "wrong", "does not run"}, "a difference is not explained"
    assert all(finding.line for finding in findings if not finding.verdict.startswith("equal"))


def test_all_that_is_called_wrong_is_shown() -> None:
    titles = re.findall(r"### (\w+): (.*)", PAGE)
    for finding in RESULTS["findings"]:
        if finding["verdict"] in ("wrong", "does not run"):
            method = re.split(r"[,:]", finding["method"])[0]
            method = {"FedOpt": "FedAdam"}.get(method, method)
            assert any(framework == finding["framework"] and method in title for framework, title in titles), finding
    assert len(SHOWN) == PAGE.count("```python")


def test_frameworks_are_compared_and_not_only_run(audit: ModuleType) -> None:
    """Another method is told apart, explained by what explains it, and not by what does not."""
    problem = importlib.import_module("audited.problem")
    some = problem.course()

    def us(name: str, **fields: float) -> object:
        return lambda: problem.ours(name, fields, some)

    plain, prox = us("fedavg"), us("fedprox", mu=1.0)
    assert audit.judge("us", "0", problem.Row("FedAvg", lambda: problem.played(some), plain)).verdict == "equal to 1e-6"
    unexplained = audit.judge("us", "0", problem.Row("FedProx", prox, plain, faults={"half": us("fedprox", mu=0.5)}))
    assert (unexplained.verdict, unexplained.round, unexplained.quantity) == ("not explained", 1, problem.MODEL)
    assert unexplained.size > 1e-3
    explained = audit.judge("us", "0", problem.Row("FedProx", prox, plain, faults={"a pull": prox}))
    assert (explained.verdict, explained.why) == ("wrong", "a pull")


def run(code: str) -> str:
    """What a block prints, run by the Python that has its framework, in the version that it names."""
    package, version = re.match(r"# (\S+) ([\d.]*\d)", code).groups()  # type: ignore[union-attr]
    room = ROOMS.get(package, package)
    python = ROOT / ".rivals" / room / "bin" / "python" if room else Path(sys.executable)
    if not python.exists():
        pytest.skip(f"{package} is not installed; make rivals does it")
    asked = (
        f"from importlib.metadata import version\nassert version('{package}') == '{version}', version('{package}')\n"
    )
    done = subprocess.run(
        [python, "-W", "ignore", "-c", asked + code], capture_output=True, text=True, check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.stdout


def test_what_is_shown_of_flower_is_so() -> None:
    blocks = [(code, printed) for _, code, printed in SHOWN if code.startswith("# flwr")]
    assert blocks
    for code, printed in blocks:
        assert run(code) == printed


def test_flowers_findings_are_those_of_the_results(audit: ModuleType) -> None:
    found = [finding._asdict() for finding in audit.ask("Flower") or []]
    assert [(f["method"], f["verdict"], f["why"]) for f in found] == [
        (f["method"], f["verdict"], f["why"]) for f in RESULTS["findings"] if f["framework"] == "Flower"
    ]


@pytest.mark.system
@pytest.mark.parametrize("number", [n for n, (_, code, _) in enumerate(SHOWN) if not code.startswith("# flwr")])
def test_what_is_shown_is_so(number: int) -> None:
    _, code, printed = SHOWN[number]
    assert run(code) == printed


@pytest.mark.system
@pytest.mark.parametrize("framework", ["fluke", "pfl", "NVFlare", "APPFL", "FedLab"])
def test_findings_are_those_of_the_results(audit: ModuleType, framework: str) -> None:
    if not (audit.ROOMS / framework.lower()).exists():
        pytest.skip(f"{framework} is not installed; make rivals does it")
    found = [finding._asdict() for finding in audit.ask(framework) or []]
    assert [(f["method"], f["verdict"], f["why"]) for f in found] == [
        (f["method"], f["verdict"], f["why"]) for f in RESULTS["findings"] if f["framework"] == framework
    ]
