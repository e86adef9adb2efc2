"""What server and clients must have in common: the version of undrift, the algorithm's file and the settings."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path

from undrift import __version__
from undrift.algorithms.wrapper import innermost
from undrift.deploy.messages import Fact
from undrift.deploy.settings import Plan

PREFIX = "has."  # names of these facts in a node's report begin so
LIBRARY = ("abc", "builtins", "typing")  # modules of Python itself
LONGEST, MOST = 20_000, 5  # characters of a report that are read, and settings that are named
NONE = "none"


def versions_of(plan: Plan) -> dict[str, str]:
    """The version, a digest of the algorithm's file with those that it is built on, and the settings as JSON."""
    files = {
        Path(inspect.getfile(kind)) for kind in type(innermost(plan.alg)).__mro__ if kind.__module__ not in LIBRARY
    }
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files, key=lambda file: file.name)))
    return {
        "undrift": __version__,
        "algorithm": code.hexdigest()[:16],
        "settings": json.dumps(plan.flat(), sort_keys=True),
    }


def report_versions(plan: Plan) -> dict[str, Fact]:
    """The facts of a node's report."""
    return {PREFIX + name: value for name, value in versions_of(plan).items()}


def differences(told: Mapping[str, Fact], ours: Mapping[str, str]) -> list[str]:
    """In what a node differs from the server, in words.

    >>> ours = {"undrift": "0.1.0", "algorithm": "ab", "settings": '{"batch": 32, "set.lr": 0.1}'}
    >>> differences({"has.undrift": "0.9", "has.algorithm": "ab", "has.settings": '{"batch": 32, "set.lr": 0.5}'}, ours)
    ['undrift 0.9 in place of 0.1.0', 'set.lr 0.5 in place of 0.1']
    """
    theirs = {name: str(told.get(PREFIX + name, NONE))[:LONGEST] for name in ours}
    lines = [
        f"{words} {theirs[name][:40]} in place of {ours[name]}"
        for name, words in (("undrift", "undrift"), ("algorithm", "another file of the algorithm: SHA-256"))
        if theirs[name] != ours[name]
    ]
    there, here = read_settings(theirs["settings"]), read_settings(ours["settings"])
    other = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    for name in other[:MOST]:
        lines.append(f"{name[:40]} {there.get(name, NONE)[:40]} in place of {here.get(name, NONE)}")
    return lines + ([f"{len(other) - MOST} more settings that differ"] if len(other) > MOST else [])


def read_settings(text: str) -> dict[str, str]:
    """Settings by name, each as JSON; none where a node has written something else."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {name: json.dumps(value) for name, value in settings.items()} if isinstance(settings, dict) else {}
