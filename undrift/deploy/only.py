"""What a node runs for a message: the client app of the undrift that is installed here, whatever app the server has sent.

Flower sends the app of a run to the nodes, and a SuperNode starts `flwr-clientapp`, which unpacks and imports it. On the PATH
of `undrift deploy node` stands another `flwr-clientapp` (`fork.py`): Flower's own, but it neither unpacks nor imports what was
sent.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from flwr.supernode.cli import flwr_clientapp

from undrift.deploy.flower import client_app

LOADER = "flwr.supernode.runtime.run_clientapp"  # the module that unpacks and imports an app, by these functions
FUNCTIONS = {
    "install_from_fab": lambda *given, **named: None,
    "get_project_dir": lambda *given, **named: Path(),
    "get_load_client_app_fn": lambda **named: lambda *given: client_app(),
}


def main() -> None:
    """Flower's `flwr-clientapp`, with undrift's client app in place of the one that was sent."""
    loader = importlib.import_module(LOADER)
    for name, function in FUNCTIONS.items():
        if not callable(getattr(loader, name, None)):
            sys.exit(f"this Flower loads apps in another way, without {name}: undrift cannot keep the server's app out")
        setattr(loader, name, function)
    flwr_clientapp()
