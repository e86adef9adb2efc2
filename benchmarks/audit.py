"""Which frameworks' methods compute what undrift's do: the same start, cohorts, batches and steps, in float64.

    make rivals                                      # installs the frameworks, each in an environment of its own
    python benchmarks/audit.py --json benchmarks/results/audit.json

Each framework runs its own code for a few rounds on the problem of `audited/problem.py`. A method is "equal" where everything
compared is the same to 1e-6 after every round. Otherwise the first round and quantity that differ are printed, and it is tried
whether another form of the method, written in the papers' letters, explains the difference to 1e-6. "wrong" stands only where
no form that the paper or its authors' code has does; docs/audit.md shows each of these in a few lines.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).parent
ROOMS = HERE.parent / ".rivals"
FRAMEWORKS = {
    "Flower": "flower",
    "fluke": "fluke",
    "pfl": "pfl",
    "NVFlare": "nvflare",
    "APPFL": "appfl",
    "FedLab": "fedlab",
}
EQUAL = 1e-6


class Finding(NamedTuple):
    """What came out for one method."""

    framework: str
    version: str
    method: str
    verdict: str  # equal to 1e-6, another variant, wrong, does not run, or not explained
    why: str = ""
    round: int = 0  # the first that differs, from 1 on; 0: none
    quantity: str = ""  # which differs first
    size: float = 0.0  # of the first difference, of what the quantity has moved since the start
    line: str = ""  # of their code
    note: str = ""


def compare(theirs, mine) -> tuple[int, str, float]:  # type: ignore[no-untyped-def]
    """The first round and quantity in which two paths differ, and by how much of what it has moved; round 0: nowhere."""
    for t in range(len(next(iter(mine.values())))):
        for name, path in mine.items():
            moved = (path[-1] - path[0]).norm()
            gap = float((theirs[name][t].double() - path[t]).norm() / moved)
            if not gap <= EQUAL:
                return t + 1, name, gap
    return 0, "", 0.0


def judge(framework: str, version: str, row) -> Finding:  # type: ignore[no-untyped-def]
    about = {"line": row.line, "note": row.note}
    mine = row.ours()
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)  # some make new tensors of the default type
        theirs = row.theirs()
    except Exception as error:
        if not row.fails:
            error.add_note(f"in {row.method} of {framework}")
            raise
        return Finding(framework, version, row.method, "does not run", f"{type(error).__name__}: {error}", **about)
    finally:
        torch.set_default_dtype(default)
    at, name, size = compare(theirs, mine)
    if not at:
        return Finding(framework, version, row.method, "equal to 1e-6", note=row.note)
    found = {"round": at, "quantity": name, "size": float(f"{size:.3g}")} | about
    for verdict, tried in (("another variant", row.variants), ("wrong", row.faults)):
        for text, path in tried.items():
            if not compare(theirs, {n: p for n, p in path().items() if n in mine})[0]:
                return Finding(framework, version, row.method, verdict, text, **found)
    return Finding(framework, version, row.method, "not explained", **found)


def look(framework: str) -> list[Finding]:
    """The findings about a framework that can be imported here."""
    warnings.simplefilter("ignore")
    module = importlib.import_module(f"audited.{FRAMEWORKS[framework]}")
    version = importlib.metadata.version(module.PACKAGE)
    found = []
    for row in module.rows():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            finding = judge(framework, version, row)
        print(told(finding), flush=True)
        found.append(finding)
    return found


def told(finding: Finding) -> str:
    where = f"; first in round {finding.round}, {finding.quantity}, by {finding.size:.2g}" if finding.round else ""
    why = f": {finding.why}" if finding.why else ""
    return f"{finding.framework} {finding.version}  {finding.method:28} {finding.verdict}{why}{where}"


def table(findings: list[Finding]) -> str:
    """The findings as docs/audit.md has them."""
    lines = ["| framework | method | verdict | first difference |", "| --- | --- | --- | --- |"]
    for f in findings:
        why = f": {f.why}" if f.why else f" ({f.note})" if f.note and f.verdict.startswith("equal") else ""
        verdict = f"**{f.verdict}**" if f.verdict in ("wrong", "does not run") else f.verdict
        where = f"round {f.round}, {f.quantity}, {f.size:.2g}" if f.round else ""
        lines.append(f"| {f.framework} | {f.method} | {verdict}{why} | {where} |")
    return "\n".join(lines)


def python_of(framework: str) -> str:
    """The Python that has a framework."""
    room = ROOMS / framework.lower() / "bin" / "python"
    return str(room) if room.exists() else sys.executable


def ask(framework: str) -> list[Finding] | None:
    """The findings about a framework, from the Python that has it; None where it is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        paths = os.pathsep.join([str(HERE), str(HERE.parent)])
        run = subprocess.run(
            [python_of(framework), str(HERE / "audit.py"), "--only", framework, "--json", str(out)],
            env=os.environ | {"PYTHONPATH": paths}, cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not out.exists():
            print(f"{framework}: {(run.stderr.strip().splitlines() or ['nothing came back'])[-1]}")
            return None
        return [Finding(**finding) for finding in json.loads(out.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FRAMEWORKS, help="one framework, with this Python")
    parser.add_argument("--json", type=Path, help="write the findings to this file")
    parser.add_argument("--table", type=Path, help="print the table of findings in this file, and run nothing")
    asked = parser.parse_args()
    if asked.table:
        print(table([Finding(**f) for f in json.loads(asked.table.read_text())["findings"]]))
        return
    if asked.only:
        found = look(asked.only)
        if asked.json:
            asked.json.write_text(json.dumps([f._asdict() for f in found]))
            return
        return
    findings: list[Finding] = []
    for framework in FRAMEWORKS:
        found = ask(framework) or []
        print(*map(told, found), sep="\n", flush=True)
        findings += found
    if asked.json:
        command = "python benchmarks/audit.py --json benchmarks/results/audit.json"
        about = {"command": command, "date": str(datetime.date.today()), "torch": torch.__version__}
        asked.json.write_text(json.dumps(about | {"findings": [f._asdict() for f in findings]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
