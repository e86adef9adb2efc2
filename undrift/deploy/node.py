"""Builds a node's client from its --node-config.

`partition-id=3` or `name="clinic-a"` is its name; `data="/path/to/its.npz"` its samples, if the run's dataset is `own`;
`state-dir="/path"` the folder of its states; `sums=3` lets it take part only where the server sees sums over so many clients;
`allow="mypackage"` an installed package whose code the run may use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from undrift.core.device import pick_device
from undrift.core.errors import BadSetting
from undrift.core.names import parse_value
from undrift.data.load import load_dataset
from undrift.deploy.client import Client
from undrift.deploy.settings import Plan
from undrift.deploy.site_files import site_federation, site_path
from undrift.jobs.run import build_net, deal_out, settings_of, usual_metrics


def name_of(node: Mapping[str, Any]) -> str:
    """The client's name, or the number of its partition."""
    if "name" in node:
        return str(node["name"])
    if "partition-id" not in node:
        raise BadSetting("start the node with --node-config 'partition-id=0', or with 'name=\"clinic-a\"'")
    return str(int(node["partition-id"]))


def check_allowed(run: Mapping[str, Any], node: Mapping[str, Any]) -> None:
    """Refuse a run whose settings name code that this node does not allow, or that shows the server single uploads where
    the node wants sums; nothing is imported for it."""
    if int(node.get("sums", 0)) and not run.get("secure_bound"):
        raise BadSetting(
            f"this node takes part only in sums over {node['sums']} clients, but the run shows the server every upload; "
            "start the run with --secure-bound, or the node without --sums"
        )
    allowed = [part for part in str(node.get("allow", "")).split(",") if part]
    # Fields of an algorithm name models too, and are read as TOML, in which text can be written in many ways.
    texts = {n: run[n] for n in ("algorithm", "model", "dataset") if n in run}
    texts |= {n: parse_value(str(value)) for n, value in run.items() if n.startswith("set.")}
    for setting, text in texts.items():
        for value in str(text).split("+"):  # an algorithm may be two joined
            package = value.partition(":")[0]
            if ":" in value and not any(package == a or package.startswith(f"{a}.") for a in allowed):
                hf = package == "hf"  # a config, or weights, at a path that the server chooses
                named = "reads no model that the server names by a path" if hf else "runs only what undrift has"
                first = f"put {value.partition('#')[0][3:]} where it starts" if hf else "install the package"
                raise BadSetting(
                    f"the run's {setting} is {value}, and this node {named}; to allow it, {first} "
                    f"and start the node with --node-config 'allow=\"{package}\"'"
                )


def states_of(node: Mapping[str, Any]) -> Path:
    """The folder of the node's states."""
    return Path(str(node.get("state-dir") or os.environ.get("UNDRIFT_STATE") or Path.home() / ".undrift" / "clients"))


def build_client(plan: Plan, node: Mapping[str, Any]) -> Client:
    """Build this node's client."""
    name, run, device = name_of(node), plan.run, pick_device(plan.run.device)
    path, structures = site_path(plan, node), plan.structures
    if path is None:
        dataset = load_dataset(run.dataset)
        data, structures = deal_out(run, dataset, device), dataset.structures
    else:
        data = site_federation(plan, name, path, device)
    net = build_net(data, run, plan.alg, structures, run.model)
    settings, root = settings_of(run, data.sizes, device), states_of(node)
    sums, metrics = int(node.get("sums", 0)), usual_metrics(net, structures)
    bound, text = plan.deploy.secure_bound, plan.told
    return Client(name, plan.alg, net, data, settings, device, root, bound, sums, metrics, text)
