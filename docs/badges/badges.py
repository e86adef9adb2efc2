"""Draw the badges of the README from what is in this checkout; `make coverage` calls it after it has measured."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOTAL = ROOT / "build" / "coverage" / "total.json"
BADGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{name}: {value}">
<rect width="{width}" height="20" rx="3" fill="#444"/>
<path fill="{colour}" d="M{left} 0h{right}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3H{left}z"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="6" y="14" textLength="{name_length}">{name}</text>
<text x="{value_at}" y="14" textLength="{value_length}">{value}</text>
</g></svg>
"""


def badge(name: str, value: str, colour: str = "#0b6e4f") -> str:
    """A picture of a name and a value."""
    left, right = 7 * len(name) + 12, 7 * len(value) + 12
    lengths = {"name_length": 7 * len(name), "value_length": 7 * len(value)}
    places = {"width": left + right, "left": left, "right": right - 3, "value_at": left + 6}
    return BADGE.format(name=name, value=value, colour=colour, **places, **lengths)


def badges(covered: str) -> dict[str, str]:
    """The badges by file name; `covered` is the share of lines that the tests run, if it is known."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    kinds = [kind for kind in project["classifiers"] if re.search(r"Python :: 3\.\d", kind)]
    return {
        "python.svg": badge("python", " | ".join(kind.rpartition(" ")[2] for kind in kinds)),
        "licence.svg": badge("licence", project["license"]),
        "types.svg": badge("types", "mypy strict"),
        "coverage.svg": badge("coverage", covered) if covered else badge("coverage", "not measured", "#8a5a00"),
    }


def measured() -> str:
    """The share that `make coverage` found, or that of the badge that is there."""
    if TOTAL.exists():
        return f"{int(json.loads(TOTAL.read_text())['totals']['percent_covered'])}%"
    old = HERE / "coverage.svg"
    found = re.search(r'aria-label="coverage: (\d+%)"', old.read_text()) if old.exists() else None
    return found[1] if found else ""


if __name__ == "__main__":
    for name, picture in badges(measured()).items():
        (HERE / name).write_text(picture)
