"""`undrift figures` and `predict`: what is done with the models of a personal run."""

from __future__ import annotations

import argparse
import importlib.util

from undrift.cli.command import arg, command, path
from undrift.core.errors import BadSetting


@command(
    "figures",
    "draw pictures of personal models for the report: the selector's map, loss surfaces, outlines",
    path("folders", "finished runs of a personal method", nargs="+"),
)
def figures_command(arguments: argparse.Namespace) -> None:
    from undrift.personal.figures import look

    for folder in arguments.folders:
        print(f"written to {look(folder)}; undrift report shows it", flush=True)
    if importlib.util.find_spec("sklearn") is None:
        print("the map of the selector's features is left out: it needs scikit-learn; pip install 'undrift[figures]'")


@command(
    "predict",
    "label or segment a folder of pictures with the models of a personal run",
    path("--super", "the folder of a finished personal run", required=True),
    path("--in", "the pictures", "FOLDER", dest="pictures"),
    path("--out", "for masks, overlays and predictions.csv", "FOLDER"),
    arg("--gamma", "the selector's threshold, in place of the stored one", type=float, metavar="GAMMA"),
    arg("--site", "use this site's model for all: its name or number, 0 for the server's", metavar="SITE"),
    arg("--tune-gamma", "first tune it on the run's validation samples, and store it", action="store_true"),
)
def predict_command(arguments: argparse.Namespace) -> None:
    from undrift.personal.supermodel import SuperModel, predict_folder, tune

    if arguments.tune_gamma:
        print(tune(arguments.super))
        if arguments.pictures is None and arguments.out is None:
            return
    if arguments.pictures is None or arguments.out is None:
        raise BadSetting("predict needs --in FOLDER with pictures and --out FOLDER for what is made of them")
    model = SuperModel.load(arguments.super)
    site = None if arguments.site is None else model.number_of(arguments.site)
    count = predict_folder(model, arguments.pictures, arguments.out, arguments.gamma, site)
    print(f"{count} pictures; written to {arguments.out}")
