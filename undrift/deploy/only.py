"""What a node runs for a message: the client app of the undrift that is installed here, whatever app the server has sent.

Flower sends the app of a run to the nodes, and a SuperNode starts `flwr-clientapp`, which unpacks and imports it. On the PATH
of `undrift deploy node` stands another `flwr-clientapp`: Flower's own, but it neither unpacks nor imports what was sent.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path

from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
from flwr.supernode.cli import flwr_clientapp

from undrift.core.files import make_private
from undrift.deploy.flower import client_app

NOTHING = "#!/bin/sh\nexit 1\n"
LOADER = "flwr.supernode.runtime.run_clientapp"  # the module that unpacks and imports an app, by these functions
FUNCTIONS = {
    "install_from_fab": lambda *given, **named: None,
    "get_project_dir": lambda *given, **named: Path(),
    "get_load_client_app_fn": lambda **named: lambda *given: client_app(),
}


def write_programs(folder: Path) -> None:
    """Write the programs that a SuperNode may start; all but the client's do nothing."""
    make_private(folder)
    for task, command in TASK_TYPE_TO_COMMAND.items():
        own = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m undrift.deploy.only "$@"\n'
        (folder / command).write_text(own if task is TaskType.CLIENT_APP else NOTHING)
        (folder / command).chmod(0o700)


def main() -> None:
    """Flower's `flwr-clientapp`, with undrift's client app in place of the one that was sent."""
    loader = importlib.import_module(LOADER)
    for name, function in FUNCTIONS.items():
        if not callable(getattr(loader, name, None)):
            sys.exit(f"this Flower loads apps in another way, without {name}: undrift cannot keep the server's app out")
        setattr(loader, name, function)
    flwr_clientapp()


if __name__ == "__main__":
    main()
