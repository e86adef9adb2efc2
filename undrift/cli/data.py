"""`undrift data`: data sets, and how they are dealt out."""

from __future__ import annotations

import argparse
from pathlib import Path

from undrift.cli.command import arg, command, flag, path
from undrift.core.errors import BadSetting, UnknownName

ACTIONS = ("list", "add", "prepare", "show")


@command(
    "data",
    "list the data sets, add one of your own, prepare one, or show a partition",
    arg("action", "show: which client gets which classes", metavar="|".join(ACTIONS)),
    arg("name", "of a data set [digits]", nargs="?", default="digits"),
    path("file", "add: a file with x_train, y_train, x_test and y_test, or with x, y and split", "FILE.npz", nargs="?"),
    flag("--partition", "dirichlet:0.1", "show: how the samples are dealt out [dirichlet:0.1]"),
    flag("--clients", 100, "show: among how many clients [100]"),
    flag("--seed", 0, "show: seed of the partition [0]"),
    flag("--own-test", 0.0, "show: the share that clients hold out [0]"),
    path("--from", "prepare: the archive that shakespeare is made of", "FILE", dest="source"),
    path("--out", "prepare: where NAME.npz goes; show: a .png or .svg picture", "FILE"),
)
def data_command(arguments: argparse.Namespace) -> None:
    from undrift.data import load as datasets

    root, name = datasets.data_root(), arguments.name
    if arguments.action == "list":
        entries = datasets.available(root)
        width = max(len(known) for known, _ in entries)
        for known, state in entries:
            print(f"{known:{width}}  {state}")
    elif arguments.action == "add":
        if arguments.file is None:
            raise BadSetting("say what to add: undrift data add NAME FILE.npz")
        print(f"written to {datasets.add(name, arguments.file)}; use it with --dataset {name}")
    elif arguments.action == "prepare":
        print(f"written to {datasets.prepare(name, root, arguments.out, arguments.source)}")
    elif arguments.action == "show":
        show_partition(name, arguments.partition, arguments.clients, arguments.seed, arguments.own_test, arguments.out)
    else:
        raise UnknownName("data action", arguments.action, ACTIONS)


def show_partition(name: str, partition: str, clients: int, seed: int, own_test: float, out: Path | None) -> None:
    """Print how the samples are dealt out, and draw a picture of it."""
    from undrift.data.load import class_counts, load_dataset
    from undrift.report.pictures import partition_picture, partition_text

    counts, held_out = class_counts(load_dataset(name), partition, clients, seed, own_test)
    for row in [*partition_text(counts), *(partition_text(held_out)[1:] if own_test else [])]:
        print("  ".join(f"{cell:24}" for cell in row).rstrip())
    title = f"{name}, {partition}, {clients} clients"
    if own_test:
        print("The second row is what clients hold out, to be tested on.")
        title += "; orange: held out by the client"
    out = out or Path(f"{name}-{partition.replace(':', '-')}.png")
    partition_picture(counts, out, title, held_out)
    print(f"written to {out}")
