"""Runs a deployment on the server; it leaves the same folder as a simulation."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from undrift.core.device import pick_device
from undrift.core.errors import BadRunFolder
from undrift.data.load import load_dataset
from undrift.deploy.client import CLOSE
from undrift.deploy.privacy import check_private, epsilon, make_private
from undrift.deploy.server import Deployment, Post, Remote, Visit
from undrift.deploy.settings import Plan
from undrift.deploy.site_files import server_federation
from undrift.jobs.config import RunConfig
from undrift.jobs.course import Result
from undrift.jobs.folder import RunFolder
from undrift.jobs.run import build_simulation, simulate_clients
from undrift.jobs.start import start
from undrift.simulate.simulation import Simulation


def deploy(
    plan: Plan, post: Post, meet: Callable[[], int], samples: Mapping[str, int], say: Callable[[str], None]
) -> Result[RunConfig]:
    """Run the rounds; `meet` waits for the clients and counts them, and `post` carries letters to them.

    `samples` are the numbers that clients with files have reported, by name; they grow as clients join.
    """
    config, out, private = plan.run, Path(plan.deploy.out), plan.deploy.privacy_clip > 0

    def show(record: dict[str, Any], rounds: int) -> None:
        score = "" if record["accuracy"] is None else f", accuracy {record['accuracy']:.4f}"
        say(
            f"round {record['round']} of {rounds}: {record['clients'] - record['dropped']} of {record['clients']} clients, "
            f"{record['wire_down']} bytes down, {record['wire_up']} up, {record['seconds']:.1f} s{score}"
        )

    def build(given: dict[str, Any]) -> tuple[RunConfig, contextlib.AbstractContextManager[Deployment]]:
        alg, device = make_private(plan) if private else plan.alg, pick_device(config.device)
        if plan.site_files:
            federation = server_federation(plan, device)
            simulation = simulate_clients(federation, config, alg, plan.structures, config.model, device)
        else:
            simulation = build_simulation(config, alg, load_dataset(config.dataset), config.model, device)
        if private:
            check_private(plan, simulation.net)
        return config, serve(simulation)

    @contextlib.contextmanager
    def serve(simulation: Simulation) -> Iterator[Deployment]:
        """Open the deployment; at its end, send the clients their last replies."""
        token, visits = run_token(out, plan.deploy.resume), out / "clients.jsonl"
        kept, reached = read_visits(visits), RunFolder(out).reached()
        visits.write_text("".join(json.dumps(v) + "\n" for v in kept if v["round"] <= reached))
        say(f"{meet()} of {config.clients} clients are there; run {token}")
        remote = Remote(post, plan.names, token, plan.deploy.min_replies, say)
        if private:
            remote.absent, remote.least = 0.0, 0

        def spend(rounds: int) -> dict[str, float]:
            rate, deploy = config.cohort / config.clients, plan.deploy
            return {"epsilon": epsilon(rate, deploy.privacy_noise, rounds, deploy.privacy_delta)} if private else {}

        def keep(new: list[Visit]) -> None:
            with visits.open("a") as file:
                file.writelines(json.dumps(visit._asdict()) + "\n" for visit in new)

        deployment = Deployment(simulation, remote, keep, spend, samples if plan.site_files else None)
        yield deployment
        closed = [v for v in read_visits(visits) if v["exchange"] == CLOSE and v["outcome"] == "answered"]
        deployment.close({(v["client"], v["round"]) for v in closed})

    result = start(config, {}, build, out, plan.deploy.resume, show)
    say(f"{len(result.records)} rounds; stopped by {result.stopped}; written to {out}")
    return result


def run_token(out: Path, resume: bool) -> str:
    """The token of this run in letters and clients' states; a resumed run keeps it."""
    file = out / "deploy.json"
    if resume:
        try:
            return str(json.loads(file.read_text())["token"])
        except (OSError, ValueError, KeyError) as error:
            raise BadRunFolder(f"{out} holds no deployed run ({file.name}: {error}); choose another --out") from error
    token = secrets.token_hex(8)
    file.write_text(json.dumps({"token": token}))
    return token


def read_visits(file: Path) -> list[dict[str, Any]]:
    """Read clients.jsonl."""
    visits = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):  # a kill may leave the last line half written
            visits.append(json.loads(line))
    return visits
