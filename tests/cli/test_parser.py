"""Help, lists and mistakes are answered at once."""

from __future__ import annotations

import subprocess
import sys

from undrift.cli.parser import COMMANDS, command_parsers
from undrift.jobs.listing import KINDS

QUICK = """
import sys
from undrift import cli

for command in sys.argv[1:]:
    try:
        code = cli.main(command.split())
    except SystemExit as end:  # argparse's own
        code = end.code
    print(">", command, code, sorted({"torch", "numpy", "rich"} & {*sys.modules}))
"""


def test_help_lists_and_citations_import_neither_pytorch_nor_numpy() -> None:
    helps = [f"{name} --help" for each in COMMANDS for name in (each.name, *each.aliases)]
    lists = [f"list {kind}{json}" for kind in KINDS for json in ("", " --json")]
    commands = ["--help", "--version", *helps, *lists, "cite gradma-s", "cite def+gradma", "list models"]
    wrong = ["cite gradme", "list algorithm", "run --algoritm fedavg", "ruin"]
    done = subprocess.run([sys.executable, "-c", QUICK, *commands, *wrong], capture_output=True, text=True, check=True)
    said = [line for line in done.stdout.splitlines() if line.startswith(">")]
    assert said == [f"> {command} {2 if command in wrong else 0} []" for command in (*commands, *wrong)]
    assert "did you mean 'gradma'?" in done.stderr and "did you mean '--algorithm'?" in done.stderr


def test_a_short_name_is_the_same_command() -> None:
    assert command_parsers()["dp"] is command_parsers()["dataparallel"]
