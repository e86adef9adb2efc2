"""`undrift deploy`: real clients."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from undrift.cli.command import arg, command, flag, path
from undrift.cli.flags import RATE, setting_flags
from undrift.cli.settings import read_settings
from undrift.deploy import settings as deployment
from undrift.deploy.command import ACTIONS, Options, deploy
from undrift.jobs.config import CHOICES
from undrift.jobs.plain_values import convert

ACTION = (
    "init: write the app of a federation; local: try it out, all on this machine; keys, identity, admit, revoke: the server's "
    "keys and the clients'; server, node: serve, take part; status, page, trace: how a run goes, when answers came"
)
PLACE = (
    "the folder: init: a new one; local: for the logs; identity, node: the client's; status, page, trace: the run's; "
    "else the server's"
)
NAME = "identity, revoke: the client's name; admit: a name other than the one in the key's file"


@command(
    "deploy",
    "train real clients over Flower: make keys, serve, take part, or run everything on this machine",
    arg("action", ACTION, metavar="|".join(ACTIONS)),
    path("place", PLACE, nargs="?"),
    path("--config", "settings; flags override them", "FILE.toml"),
    flag("--host", "127.0.0.1", "init, keys: the server's address [127.0.0.1]", "HOST"),
    arg("--insecure", "local: without TLS and node authentication", action="store_true"),
    path("--data", "node: its file; local: a folder with NAME.npz for each client; both with --dataset own", "PATH"),
    flag("--name", "", NAME, "NAME"),
    path("--key", "admit: the client's public key", "FILE"),
    flag("--listen", "0.0.0.0:8000", "server: where clients may reach it [0.0.0.0:8000]", "LISTEN"),
    flag("--server", "", "node: the server's address", "HOST:PORT"),
    flag("--allow", "", "node: installed packages whose code a run may name", "PACKAGE"),
    flag("--sums", 0, "node: take part only where the server sees sums over N clients"),
    path("--to", "trace: where to write how long the clients' answers took", "FILE"),
    flag("--port", 8765, "page: the port on this machine [8765]", "PORT"),
    arg("--renew", "keys: make a new certificate of the same authority", action="store_true"),
    arg("--force", "keys, identity: replace what is there", action="store_true"),
    *setting_flags(deployment.FLAGS, deployment.TYPES, CHOICES, "the server and its clients"),
    RATE,
)
def deploy_command(arguments: argparse.Namespace) -> None:
    config, settings = read_settings(arguments, deployment.FLAGS)
    deployment.check_flags(settings)
    out = convert({"out": (config | settings).get("out", deployment.DeployConfig.out)}, deployment.TYPES)["out"]
    arguments.out = Path(out)
    options = Options(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)})
    deploy(arguments.action, arguments.place, config | settings, options)
