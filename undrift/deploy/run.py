"""A deployed run on the server, from settings to records and a trained model; the folder is that of a simulation."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from undrift.core.arithmetic import arithmetic, pick_device
from undrift.core.errors import BadRunFolder
from undrift.data.load import load_dataset
from undrift.deploy.client import CLOSE
from undrift.deploy.privacy import check_private, epsilon, made_private
from undrift.deploy.server import Deployment, Post, Remote, Visit
from undrift.deploy.settings import Plan
from undrift.deploy.site_files import server_federation
from undrift.jobs.folder import RunFolder
from undrift.jobs.run import Course, Result, check_same_run, drive, simulated, simulated_on


class Roster(NamedTuple):
    """The federation's clients in the order of their ids, and who of them is there."""

    names: list[str]
    present: list[str]
    samples: Mapping[str, int] = {}  # that those with files of their own have said they have; grows as they come


def deploy(
    plan: Plan, post: Post, meet: Callable[[list[str]], Roster], out: Path, say: Callable[[str], None]
) -> Result:
    """Run the rounds with clients that `post` reaches; `meet` waits for them."""
    folder, resume, run = RunFolder(out), plan.deploy.resume, plan.run
    if resume:
        stored = folder.settings()
        stored.pop("made", None)
        check_same_run(folder, stored, {n: v for n, v in asdict(run).items() if n != "execution"})
    private = plan.deploy.dp_clip > 0
    alg = made_private(plan) if private else plan.alg
    device = pick_device(run.device)
    if plan.own:
        simulation = simulated_on(server_federation(plan, device), run, alg, plan.structures, run.model, device)
    else:
        simulation = simulated(run, alg, load_dataset(run.dataset), run.model, device)
    if private:
        check_private(plan, simulation.net)
    folder.make(resume)
    with folder.locked(), arithmetic(run.precision, run.deterministic):
        token = run_token(out, resume)
        roster = meet(plan.names)
        say(f"{len(roster.present)} of {run.clients} clients are there; run {token}")
        remote = Remote(post, roster.names, token, plan.deploy.min_replies, say)
        if private:
            remote.absent, remote.least = 0.0, 0
        visits = out / "clients.jsonl"

        def spent(rounds: int) -> dict[str, float]:
            rate, deploy = run.cohort / run.clients, plan.deploy
            return {"epsilon": epsilon(rate, deploy.dp_noise, rounds, deploy.dp_delta)} if private else {}

        def keep(made: list[Visit]) -> None:
            with visits.open("a") as file:
                file.writelines(json.dumps(visit._asdict()) + "\n" for visit in made)

        def show(record: dict[str, Any], rounds: int) -> None:
            scored = "" if record["accuracy"] is None else f", accuracy {record['accuracy']:.4f}"
            say(
                f"round {record['round']} of {rounds}: {record['clients'] - record['dropped']} of {record['clients']} clients, "
                f"{record['wire_down']} bytes down, {record['wire_up']} up, {record['seconds']:.1f} s{scored}"
            )

        deployment = Deployment(simulation, remote, keep, spent, roster.samples if plan.own else None)
        course: Course[Any] = Course(deployment, run, folder, resume, show)  # type: ignore[type-var]
        cut_back(visits, simulation.t)
        result = drive(course)
        deployment.close(delivered(visits))
    say(f"{len(result.records)} rounds; stopped by {result.stopped}; written to {out}")
    return result


def run_token(out: Path, resume: bool) -> str:
    """The name that ties letters and clients' states to this run; a resumed run keeps it."""
    file = out / "deploy.json"
    if resume:
        try:
            return str(json.loads(file.read_text())["token"])
        except (OSError, ValueError, KeyError) as error:
            raise BadRunFolder(f"{out} holds no deployed run ({file.name}: {error}); choose another --out") from error
    token = secrets.token_hex(8)
    file.write_text(json.dumps({"token": token}))
    return token


def delivered(visits: Path) -> set[tuple[str, int]]:
    """Who has been sent the reply to its last round, and which that was, as clients.jsonl says."""
    made = [json.loads(line) for line in visits.read_text().splitlines()] if visits.exists() else []
    return {(v["client"], v["round"]) for v in made if v["exchange"] == CLOSE and v["outcome"] == "answered"}


def cut_back(visits: Path, t: int) -> None:
    """Leave in clients.jsonl only what belongs to rounds that are done."""
    if not visits.exists():
        return
    kept = []
    for line in visits.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last line, half written when the server was killed
            if json.loads(line)["round"] <= t:
                kept.append(line + "\n")
    visits.write_text("".join(kept))
