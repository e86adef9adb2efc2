"""`undrift deploy init | local | keys`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from undrift.core.errors import BadSetting, UnknownName
from undrift.deploy.settings import Plan, split_names
from undrift.jobs.config import RunConfig, as_type

ACTIONS = ("init", "local", "keys")


def deploy(
    action: str, place: Path | None, settings: Mapping[str, Any], host: str, insecure: bool, data: Path | None = None
) -> None:
    """Carry out one of the actions."""
    if action not in ACTIONS:
        raise UnknownName("deploy action", action, ACTIONS)
    clients = as_type("clients", settings.get("clients", len(split_names(str(settings.get("names", "")))) or 4), int)
    cohort = settings.get("cohort", min(clients, RunConfig.cohort))
    plan = Plan.of({"clients": clients, "cohort": cohort} | dict(settings))
    if importlib.util.find_spec("flwr") is None:
        raise BadSetting("deploy needs Flower; pip install 'undrift[flower]'")
    if action == "local":
        local(plan, place, insecure, data)
        return
    if place is None:
        raise BadSetting(f"undrift deploy {action} needs a folder: undrift deploy {action} DIR")
    if action == "init":
        from undrift.deploy.app import write_app

        write_app(place, plan, host)
        print(f"written to {place}; read {place / 'README.md'}")
    else:
        from undrift.deploy.keys import write_keys

        write_keys(place, host, clients)
        print(f"certificates for {host} and keys of {clients} clients written to {place}")


def local(plan: Plan, home: Path | None, insecure: bool, data: Path | None) -> None:
    from undrift.deploy.local import run_local

    if insecure:
        warning = "--insecure: nothing is encrypted and any node may join; use it on your own machine only"
        print(f"undrift: {warning}", file=sys.stderr)
    run_local(plan, not insecure, home, print, data)
