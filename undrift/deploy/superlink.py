"""Flower's SuperLink, with more patience for its database.

On a busy machine a process that writes may have to wait for another. Flower gives up after 5 seconds ("database is locked"):
then the process ends that starts the run's app, and the run with it.
"""

from __future__ import annotations

import sys
from typing import Any

from flwr.supercore import sql_mixin
from flwr.superlink.cli import flower_superlink

COMMAND = [sys.executable, "-P", "-m", "undrift.deploy.superlink"]
SETTING, PATIENCE = "busy_timeout", "120000"  # milliseconds


def main() -> None:
    """Flower's `flower-superlink`."""
    database: Any = sql_mixin
    settings = dict(database.SQLITE_PRAGMAS)
    if SETTING not in settings:
        sys.exit(f"this Flower sets up its database in another way, without {SETTING}")
    database.SQLITE_PRAGMAS = tuple((settings | {SETTING: PATIENCE}).items())
    flower_superlink()


if __name__ == "__main__":
    main()
