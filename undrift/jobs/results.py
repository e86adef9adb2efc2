"""Finished runs as lines of JSON: few bytes each, found again by their settings, merged by copying files into one folder."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from undrift.core.errors import BadData
from undrift.core.files import make_folder, sync, writing
from undrift.jobs.config import RESUMABLE, JobConfig, RunConfig, build_algorithm

SCORE = re.compile(r"(\w*_)?(accuracy|loss|dice|c_index)(_\w+)?")  # the numbers of a record that are kept
CURVE = 100  # points of a curve, at most
Line = dict[str, Any]


def identity_settings(command: str, config: JobConfig) -> dict[str, Any]:
    """The settings that make a run what it is, but for those that are what they are by default.

    So a setting or a field that is added later changes no key.
    """
    usual = asdict(type(config)())
    same = {*RESUMABLE, "set"} - {"rounds"}
    chosen = {n: v for n, v in asdict(config).items() if n not in same and v != usual[n]}
    fields = {}
    if isinstance(config, RunConfig):
        plain = asdict(build_algorithm(replace(config, set={})))
        given = asdict(build_algorithm(config))
        fields = {n: list(v) if isinstance(v, tuple) else v for n, v in sorted(given.items()) if v != plain[n]}
    return {"command": command, **dict(sorted(chosen.items())), "rounds": config.rounds, "set": fields}


def key_of(settings: Mapping[str, Any]) -> str:
    """Sixteen letters that stand for these settings.

    >>> key_of({"rounds": 3, "lr": 0.1}) == key_of({"lr": 0.1, "rounds": 3}) != key_of({"lr": 0.2, "rounds": 3})
    True
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class Results:
    """What has been run: every file *.jsonl of a folder is read, one is added to."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.file = folder, folder / f"{name}.jsonl"
        self.lines: dict[str, Line] = {}
        for file in sorted(folder.glob("*.jsonl")):
            for line in read_lines(file):
                self.lines[line["key"]] = line

    def add(self, lines: Iterable[Line]) -> None:
        """Write lines at the end of the file, and on the disk."""
        new = list(lines)
        with writing(self.file):
            make_folder(self.folder)
            whole = not self.file.exists() or self.file.read_bytes().endswith(b"\n")
            with self.file.open("a", encoding="utf-8") as file:
                file.write("" if whole else "\n")  # after a line that a kill cut short
                file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in new)
            sync(self.file)
        self.lines |= {line["key"]: line for line in new}

    def get(self, key: str) -> Line | None:
        return self.lines.get(key)


def read_lines(file: Path) -> list[Line]:
    """The lines of a file. The last one may have been cut short by a kill; anything else that is wrong is an error."""
    found = []
    texts = file.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text) if text.strip() else None
        except (ValueError, RecursionError):
            if number < len(texts) and not _begins_anew(texts[number]):
                raise BadData(
                    f"{file}, line {number}, is damaged; remove the line, and its run is done again"
                ) from None
            continue
        if line is None:
            continue
        if not isinstance(line, dict) or not isinstance(line.get("key"), str):
            raise BadData(
                f"{file}, line {number}, holds no finished run; only undrift reproduce and tune write such files"
            )
        found.append(line)
    return found


def _begins_anew(text: str) -> bool:
    return text.startswith('{"key"')


def scores_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The best and the last value of every score, and the round of the best; scores of sites only from the last round.

    >>> scores_of([{"round": 1, "accuracy": 0.5, "loss": 2.0}, {"round": 2, "accuracy": 0.4, "loss": None}])["accuracy"]
    {'best': 0.5, 'round': 1, 'last': 0.4}
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(n for record in records for n in record if SCORE.fullmatch(n)):
        known = _values_of(records, name)
        if known:
            values = [value for _, value in known]
            best = min(values) if "loss" in name else max(values)
            found[name] = {"best": _short(best), "round": known[values.index(best)][0], "last": _short(values[-1])}
    sites: Any = next((r["sites"] for r in reversed(records) if isinstance(r.get("sites"), Mapping)), {})
    return found | ({"sites": _shorten(sites)} if sites else {})


def milestones(records: Sequence[Mapping[str, Any]], name: str = "accuracy") -> list[int]:
    """The first round with at least 1, 2, 3 ... per cent.

    >>> milestones([{"round": 1, "accuracy": 0.02}, {"round": 4, "accuracy": 0.01}, {"round": 6, "accuracy": 0.045}])
    [1, 1, 6, 6]
    """
    reached: list[int] = []
    for t, value in _values_of(records, name):
        percent = math.floor(100 * value + 1e-9)
        reached += [t] * (percent - len(reached))
    return reached


def curve_of(records: Sequence[Mapping[str, Any]], name: str = "accuracy") -> list[list[float]]:
    """Rounds and values, thinned; the last one is kept."""
    known = [[t, _short(value)] for t, value in _values_of(records, name)]
    every = -(-len(known) // CURVE) or 1
    return known[len(known) % every - 1 if len(known) % every else every - 1 :: every]


def _values_of(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Rounds and values of a number, where it has one."""
    pairs = ((record["round"], record.get(name)) for record in records)
    return [(t, float(v)) for t, v in pairs if isinstance(v, int | float) and math.isfinite(v)]


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _shorten(tree: Any) -> Any:
    """A tree of numbers with four digits; what JSON cannot hold becomes null."""
    if isinstance(tree, Mapping):
        return {name: _shorten(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_shorten(value) for value in tree]
    if isinstance(tree, float):
        return float(f"{tree:.4g}") if math.isfinite(tree) else None
    return tree
