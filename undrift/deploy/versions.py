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

PREFIX = "has."  # of these facts in a node's report
LIBRARY = ("abc", "builtins", "typing")  # modules of Python itself
WORDS = {
    "undrift": "undrift {theirs} in place of {ours}",
    "algorithm": "another file of the algorithm (SHA-256 {theirs} in place of {ours})",
    "settings": "other settings, or other defaults (SHA-256 {theirs} in place of {ours})",
}


def versions_of(plan: Plan) -> dict[str, str]:
    """The version, and digests of the algorithm's file, with those that it is built on, and of the settings."""
    files = {
        Path(inspect.getfile(kind)) for kind in type(innermost(plan.alg)).__mro__ if kind.__module__ not in LIBRARY
    }
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files, key=lambda file: file.name)))
    settings = json.dumps(plan.flat(), sort_keys=True)
    return {
        "undrift": __version__,
        "algorithm": code.hexdigest()[:16],
        "settings": hashlib.sha256(settings.encode()).hexdigest()[:16],
    }


def report_versions(plan: Plan) -> dict[str, Fact]:
    """The facts of a node's report."""
    return {PREFIX + name: value for name, value in versions_of(plan).items()}


def differences(told: Mapping[str, Fact], ours: Mapping[str, str]) -> list[str]:
    """In what a node differs from the server, in words.

    >>> differences({"has.undrift": "0.9"}, {"undrift": "0.1.0"})
    ['undrift 0.9 in place of 0.1.0']
    """
    theirs = {name: str(told.get(PREFIX + name, "unknown"))[:40] for name in ours}
    return [WORDS[name].format(theirs=theirs[name], ours=ours[name]) for name in ours if theirs[name] != ours[name]]
