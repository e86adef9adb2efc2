"""Client apps that are honest but for one thing: the text of a file of a Flower app, for real processes."""

from __future__ import annotations

from textwrap import indent

APP = """
import time
from pathlib import Path
import numpy as np
from flwr.app import Array
from flwr.clientapp import ClientApp
from undrift.deploy.flower import client_app

app = ClientApp()
honest = client_app()

@app.query()
def query(message, context):
    name = context.node_config["name"]
{query}
    return honest(message, context)

@app.train()
def train(message, context):
    reply, name = honest(message, context), context.node_config["name"]
    arrays, round = reply.content["arrays"], message.content["facts"]["round"]
{train}
    return reply
"""


def altered(query: str = "pass", train: str = "pass") -> str:
    """The app with statements before it says its `name`, and others that change the `arrays` or facts of its `reply`."""
    return APP.format(query=indent(query, "    "), train=indent(train.strip("\n"), "    "))
