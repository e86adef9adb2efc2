"""Clients with files: a node reads its samples from a file, and reports their number and form to the server.

The server's federation holds no training samples, and a node's holds those of one client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from undrift.core.errors import BadData, BadSetting, UnknownName
from undrift.data._user_file import read_user_file
from undrift.data.augment import Transform
from undrift.data.federation import Federation, HeldOut, Split, as_split, hold_out, not_finite
from undrift.data.from_user import Arrays
from undrift.data.partition import Holdings, client_order
from undrift.deploy.messages import Letter
from undrift.deploy.settings import Plan


class Report(NamedTuple):
    """A client's report on its samples."""

    samples: int  # number of training samples
    shape: str  # shape of one input as the model sees it, such as 1,28,28
    classes: int  # highest label + 1; for masks, the highest structure

    @classmethod
    def of(cls, letter: Letter) -> Report:
        return cls(letter.fact("samples", int), letter.fact("shape", str), letter.fact("classes", int))


def check_fits(report: Report, plan: Plan) -> None:
    """Raise BadData unless the run's model can learn from these samples."""
    shape = ",".join(str(n) for n in plan.shape)
    if report.samples < 1:
        raise BadData("it has no training samples")
    if report.samples > plan.deploy.most_samples:
        raise BadData(f"it has {report.samples} training samples, more than most_samples={plan.deploy.most_samples}")
    if report.shape != shape:
        raise BadData(f"its inputs have the shape {report.shape[:60]}, but the run's model takes {shape}")
    if report.classes > plan.classes:
        raise BadData(f"its targets go up to {report.classes} classes, but the run's model has {plan.classes}")


def site_path(plan: Plan, node: Mapping[str, Any]) -> Path | None:
    """The node's file; None if the clients of the run share a data set."""
    path = str(node.get("data", ""))
    if path and not plan.site_files:
        raise BadSetting(
            f"this node has data={path!r}, but the run's dataset is {plan.run.dataset}, of which each client takes a part; "
            "start the run with --dataset own, or the node without data"
        )
    if plan.site_files and not path:
        raise BadSetting('each client of this run has a file of its own; start the node with data="/path/to/its.npz"')
    return Path(path) if path else None


def read_report(plan: Plan, path: Path) -> Report:
    """Report on the samples in a node's file; in a private run only that they fit, which the node checks itself."""
    report = describe(plan, read_user_file(path, bool(plan.structures)))
    if plan.private:
        check_fits(report, plan)
        report = report._replace(samples=1, classes=plan.classes)
    return report


def describe(plan: Plan, arrays: Arrays) -> Report:
    x, y = arrays
    if not_finite(x).any():
        raise BadData("some of its samples have NaN or infinity")
    one = as_split(x[:1], y[:1], torch.device("cpu")).take(torch.zeros(1, dtype=torch.int64))
    highest = int(y.max()) + (0 if plan.structures else 1)
    return Report(len(training_rows(plan, len(y), 0)), ",".join(str(n) for n in one.shape[1:]), highest)


def training_rows(plan: Plan, samples: int, id: int) -> NDArray[np.int64]:
    """The rows that client `id` trains on; the share `own_test` is held out."""
    return divide(plan, samples, id)[0].members


def held_rows(plan: Plan, samples: int, id: int) -> NDArray[np.int64]:
    """The rows that it holds out."""
    return divide(plan, samples, id)[1].members


def divide(plan: Plan, samples: int, id: int) -> tuple[Holdings, Holdings]:
    order = Holdings(client_order(samples, plan.run.seed, id), np.array([samples]))
    return hold_out(order, plan.run.own_test)


def read_fitting(plan: Plan, path: Path, part: str = "train") -> Arrays:
    """Read a file whose samples the run's model can learn from."""
    arrays = read_user_file(path, bool(plan.structures), part)
    try:
        check_fits(describe(plan, arrays), plan)
    except BadData as error:
        raise BadData(f"{path} does not fit: {error}") from error
    return arrays


def site_federation(plan: Plan, name: str, path: Path, device: torch.device) -> Federation:
    """The federation as this client sees it: no other client has samples."""
    if name not in plan.names:
        raise UnknownName("client", name, plan.names)
    id, (x, y) = plan.names.index(name), read_fitting(plan, path)
    rows = training_rows(plan, len(y), id)
    members = torch.from_numpy(rows).to(device)
    federation = federation_of(plan, as_split(x, y, device), no_samples(plan, device), members)
    sizes = np.zeros(plan.run.clients, np.int64)
    sizes[id] = len(rows)
    held = torch.from_numpy(held_rows(plan, len(y), id)).to(device)
    own = {"test": HeldOut(federation.train, held, torch.full_like(held, id))} if len(held) else {}
    return replace(federation, sizes=sizes, held_out=own)


def server_federation(plan: Plan, device: torch.device) -> Federation:
    """The federation as the server sees it: it may have a test set, and learns the clients' sizes later."""
    empty, file = no_samples(plan, device), plan.deploy.test
    test = as_split(*read_fitting(plan, Path(file), "test"), device) if file else empty
    return federation_of(plan, empty, test, torch.zeros(1, dtype=torch.int64, device=device))


def federation_of(plan: Plan, train: Split, test: Split, members: torch.Tensor) -> Federation:
    run, clients = plan.run, plan.run.clients
    return Federation(
        train, test, np.zeros(0, np.int64), members, np.zeros(clients, np.int64), np.ones(clients, np.int64),
        Transform(colour=run.colour, seed=run.seed), plan.classes, plan.shape, masks=bool(plan.structures),
    )  # fmt: skip


def no_samples(plan: Plan, device: torch.device) -> Split:
    return as_split(np.zeros((0, *plan.shape), np.float32), np.zeros(0, np.int64), device)
