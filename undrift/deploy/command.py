"""`undrift deploy init | local | keys | identity | admit | revoke | server | node | status | page | trace`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undrift.core.errors import BadSetting, UnknownName
from undrift.deploy.settings import Plan, split_names
from undrift.jobs.config import RunConfig
from undrift.jobs.plain_values import as_type

ACTIONS = ("init", "local", "keys", "identity", "admit", "revoke", "server", "node", "status", "page", "trace")


@dataclass(frozen=True)
class Options:
    """The flags of `undrift deploy` that are no settings of a run."""

    host: str
    insecure: bool
    data: Path | None
    name: str
    key: Path | None
    listen: str
    server: str
    allow: str
    sums: int
    port: int
    renew: bool
    force: bool
    to: Path | None


def deploy(action: str, place: Path | None, settings: Mapping[str, Any], options: Options) -> None:
    """Carry out one of the actions."""
    if action not in ACTIONS:
        raise UnknownName("deploy action", action, ACTIONS)
    if action == "trace":
        print(write_clock(place, options.to))
        return
    if importlib.util.find_spec("flwr") is None:
        raise BadSetting("deploy needs Flower; pip install 'undrift[flower]'")
    if action in ("init", "local"):
        clients = as_type(
            "clients", settings.get("clients", len(split_names(str(settings.get("names", "")))) or 4), int
        )
        cohort = settings.get("cohort", min(clients, RunConfig.cohort))
        plan = Plan.of({"clients": clients, "cohort": cohort} | dict(settings))
        if action == "local":
            local(plan, place, options.insecure, options.data)
            return
    if place is None:
        raise BadSetting(f"undrift deploy {action} needs a folder: undrift deploy {action} DIR")
    if action == "init":
        from undrift.deploy.app import write_app

        write_app(place, plan, options.host)
        print(f"written to {place}; read {place / 'README.md'}")
    elif action == "status":
        from undrift.deploy.status import as_text, read_status

        print(as_text(read_status(place)))
    elif action in ("server", "node", "page"):
        run_process(action, place, options)
    else:
        print(change_keys(action, place, options))


def write_clock(run: Path | None, file: Path | None) -> str:
    """Write what clients of a deployed run took as a trace for `undrift run --clock`, and say so."""
    from undrift.jobs.clocks import write_measured

    if run is None or file is None:
        raise BadSetting("give the run's folder and a file: undrift deploy trace runs/deployed --to phones.csv")
    return f"{write_measured(run, file)} answers are written to {file}; give it to undrift run --clock"


def local(plan: Plan, home: Path | None, insecure: bool, data: Path | None) -> None:
    from undrift.deploy.local import run_local

    if insecure:
        warning = "--insecure: nothing is encrypted and any node may join; use it on your own machine only"
        print(f"undrift: {warning}", file=sys.stderr)
    run_local(plan, not insecure, home, print, data)


def change_keys(action: str, place: Path, options: Options) -> str:
    """Make, renew, admit or revoke a key, and return what was done."""
    from undrift.deploy.clients import admit, revoke
    from undrift.deploy.keys import renew, write_identity, write_keys

    if action == "keys" and options.renew:
        return f"{place}: a new certificate for {renew(place)}; a running server takes it up by itself"
    if action == "keys":
        write_keys(place, options.host, options.force)
        return f"{place}: an authority and a certificate for {options.host}; clients need ca.crt"
    if action == "admit":
        if options.key is None:
            raise BadSetting("give the client's public key: undrift deploy admit DIR --key client.pub")
        name, mark = admit(place, options.key, options.name)
        return f"{name} is admitted with the key {mark}; compare it with the client's over another channel"
    if not options.name:
        raise BadSetting(f"give the client's name: undrift deploy {action} DIR --name NAME")
    if action == "identity":
        mark = write_identity(place, options.name, options.force)
        return f"{place}: the key {mark} of {options.name}; send client.pub to the operator, and keep client.key here"
    return f"the key {revoke(place, options.name)} of {options.name} is revoked; a running server drops it by itself"


def run_process(action: str, place: Path, options: Options) -> None:
    """Serve, or take part, until a signal comes."""
    from undrift.deploy.join import join
    from undrift.deploy.link import serve
    from undrift.deploy.log import say
    from undrift.deploy.status import serve_page

    if action == "page":
        serve_page(place, options.port, say)
    elif action == "server":
        serve(place, options.listen, say)
    elif not options.server:
        raise BadSetting("give the server's address: undrift deploy node DIR --server federation.example.org:8000")
    else:
        join(place, options.server, options.data, options.allow, options.sums, say)
