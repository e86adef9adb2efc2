"""`undrift list`, `suites`, `cite` and `doctor`: what there is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from undrift.cli.command import arg, command, path
from undrift.cli.console import say
from undrift.core.errors import BadSetting, UnknownName
from undrift.jobs import shipped
from undrift.jobs.listing import KINDS, entries_of

ACTIONS = ("list", "show", "copy")  # what `undrift suites` does
HEADS = {
    "sweep": "sweeps: undrift sweep NAME",
    "reproduce": "papers' tables and figures: undrift reproduce NAME",
    "example": "examples: undrift suites copy NAME",
}


@command(
    "list",
    "list the algorithms, methods, data sets, models, partitions or trackers",
    arg("kind", "what to list", metavar="|".join(KINDS)),
    arg("--json", "as JSON, with the fields of each algorithm", action="store_true"),
)
def list_command(arguments: argparse.Namespace) -> None:
    entries = entries_of(arguments.kind)
    if arguments.json:
        print(json.dumps(entries, indent=1))
        return
    width = max(len(entry["name"]) for entry in entries)
    for entry in entries:
        needs = f"  (the server needs {entry['server_needs']})" if "server_needs" in entry else ""
        print(f"{entry['name']:{width}}  {entry['about']}{needs}")


@command(
    "suites",
    "list, print or copy the sweeps, papers' tables and examples that come with the package",
    arg("action", "what to do", metavar="|".join(ACTIONS)),
    arg("name", "show, copy: which, such as demo", nargs="?"),
    path("folder", "copy: where to [.]", nargs="?", default=Path(".")),
)
def suites_command(arguments: argparse.Namespace) -> None:
    action, name = arguments.action, arguments.name
    if action not in ACTIONS:
        raise UnknownName("suites action", action, ACTIONS)
    if action == "list":
        list_suites()
    elif name is None:
        raise BadSetting(f"say which: undrift suites {action} NAME; undrift suites list shows all")
    elif action == "copy":
        for file in shipped.copy(name, arguments.folder):
            print(f"written to {file}")
    else:
        show_suite(name)


def list_suites() -> None:
    entries = shipped.list_shipped()
    width = max(len(entry.name) for entry in entries)
    for kind, head in HEADS.items():
        print(head)
        for entry in entries:
            if kind == entry.kind:
                print(f"  {entry.name:{width}}  {entry.about}")


def show_suite(name: str) -> None:
    files = shipped.find(name).files
    for file in files:
        if len(files) > 1:
            print(f"# {file.name}")
        print(file.read_text(encoding="utf-8"))


@command(
    "cite",
    "print the BibTeX entry of an algorithm's or a method's paper",
    arg("name", "such as scaffold, dsp or fedmim+gradma-s"),
)
def cite_command(arguments: argparse.Namespace) -> None:
    from undrift.core.papers import papers_of

    print("\n".join(papers_of(arguments.name)))


@command(
    "doctor", "say what is installed, what this machine has and which data it finds, and test it for a few seconds"
)
def doctor_command(arguments: argparse.Namespace) -> int:
    from undrift.jobs.doctor import examine

    return 0 if examine(say) else 1
