"""Runs a deployment on the server; it leaves the same folder as a simulation."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from undrift.core.device import pick_device
from undrift.core.errors import BadRunFolder
from undrift.core.files import replacing, writing
from undrift.core.run_files import ARRIVALS, BEST, DEPLOYED, LEDGER, VISITS, Checkpoint
from undrift.core.seals import Place, append_lines, read_lines, read_sealed, write_sealed
from undrift.data.load import load_dataset
from undrift.deploy.asynchronous import Arriving
from undrift.deploy.client import CLOSE
from undrift.deploy.masks import scale
from undrift.deploy.privacy import Ledger
from undrift.deploy.remote import Remote, Stream, Visit
from undrift.deploy.scores import Best
from undrift.deploy.server import Deployment
from undrift.deploy.settings import FIXED, Plan
from undrift.deploy.site_files import server_federation
from undrift.jobs.clocks import concurrent_of
from undrift.jobs.config import RunConfig
from undrift.jobs.course import Result
from undrift.jobs.folder import RunFolder
from undrift.jobs.run import build_simulation, simulate_clients
from undrift.jobs.start import start
from undrift.round.timeline import Arrival
from undrift.simulate.simulation import Simulation


def deploy(
    plan: Plan, post: Stream, meet: Callable[[], int], samples: Mapping[str, int], say: Callable[[str], None]
) -> Result[RunConfig]:
    """Run the rounds; `meet` waits for the clients and counts them, and `post` carries letters to them.

    `samples` are the numbers that clients with files have reported, by name; they grow as clients join.
    """
    config, out = plan.run, Path(plan.deploy.out)

    def show(record: dict[str, Any], rounds: int) -> None:
        score = "" if record["accuracy"] is None else f", accuracy {record['accuracy']:.4f}"
        say(
            f"round {record['round']} of {rounds}: {record['clients'] - record['dropped']} of {record['clients']} clients, "
            f"{record['wire_down']} bytes down, {record['wire_up']} up, {record['seconds']:.1f} s{score}"
        )

    def build(given: dict[str, Any]) -> tuple[RunConfig, contextlib.AbstractContextManager[Deployment]]:
        device = pick_device(config.device)
        if plan.site_files:
            federation = server_federation(plan, device)
            simulation = simulate_clients(federation, config, plan.alg, plan.structures, config.model, device)
        else:
            simulation = build_simulation(config, plan.alg, load_dataset(config.dataset), config.model, device)
        return config, serve(simulation)

    @contextlib.contextmanager
    def serve(simulation: Simulation) -> Iterator[Deployment]:
        """Open the deployment; at its end, send the clients their last replies."""
        token, last = run_token(plan), RunFolder(out).latest()
        ledger = Ledger(out / LEDGER, plan.deploy.resume) if plan.private else None
        visits = Visits(out / VISITS, last)
        say(f"{meet()} of {config.clients} clients are there; run {token}")
        least, bound = plan.deploy.min_replies, plan.deploy.secure_bound
        remote = Remote(post, plan.names, token, least, say, plan.private, bound, plan.told)
        if bound:
            step = 1 / scale(bound, config.cohort)
            say(f"updates travel under masks, as multiples of {step:.2g}; a smaller secure_bound makes that finer")
        reported = samples if plan.site_files else None
        best = Best(next(iter(simulation.score_keeper.metrics), "loss"), plan.deploy.patience) if plan.scored else None

        def keep_best(model: dict[str, Tensor], best: Best) -> None:
            with writing(out / BEST), replacing(out / BEST) as temporary:
                save_file(model, temporary, {"round": str(best.round), best.metric: str(abs(best.score))})

        arriving, stack = None, contextlib.ExitStack()
        if config.asynchronous:
            arrivals = Arrivals(out / ARRIVALS, last)
            stack.enter_context(contextlib.closing(arrivals.file))
            arriving = Arriving(remote, post, concurrent_of(config), plan.deploy.min_replies, arrivals.keep)
        deployment = Deployment(
            simulation, remote, visits.keep, reported, ledger, plan.deploy.weight_cap, best, keep_best, arriving
        )
        with stack, contextlib.closing(visits.file):
            yield deployment
            deployment.close(visits.closed_rounds())

    for remark in config.remarks():
        say(f"note: {remark}")
    result = start(config, {}, build, out, plan.deploy.resume, show)
    end = "diverged" if result.stopped == "diverged" else f"stopped by {result.stopped}"
    say(f"{len(result.records)} rounds; {end}; written to {out}")
    return result


class Visits:
    """clients.jsonl: who answered what. Of a resumed run, what was written up to its checkpoint `last`, and closings."""

    def __init__(self, file: Path, last: Checkpoint | None) -> None:
        place, reached = (last.lines(VISITS), last.round) if last else (None, 0)
        kept = list(read_lines(file, "", place, further=False))
        if place is not None:
            with contextlib.suppress(BadRunFolder):  # a power failure may leave anything after the checkpoint
                for visit in itertools.islice(read_lines(file, "", place), len(kept), None):
                    kept += [visit] if visit["round"] <= reached else []
        self.path, self.kept = file, kept
        with writing(file):
            with replacing(file) as temporary, temporary.open("wb", buffering=0) as new:
                self.end = append_lines(new, Place(0, ""), *kept)
            self.file = file.open("ab", buffering=0)  # stays open: another run may take the folder, but not this file

    def keep(self, new: list[Visit]) -> None:
        """Write down further visits."""
        visits = [visit._asdict() for visit in new]
        with writing(self.path):
            self.end = append_lines(self.file, self.end, *visits)
            os.fsync(self.file.fileno())
        self.kept += visits

    def closed_rounds(self) -> set[tuple[str, int]]:
        """The names and rounds of those who got the reply to their last round."""
        return {(v["client"], v["round"]) for v in self.kept if v["exchange"] == CLOSE and v["outcome"] == "answered"}


class Arrivals:
    """arrivals.jsonl: the answers that were used, in the order in which they came; of a resumed run, up to its checkpoint."""

    def __init__(self, file: Path, last: Checkpoint | None) -> None:
        place = last.lines(ARRIVALS) if last else None
        kept = list(read_lines(file, "", place, further=False))
        self.path = file
        with writing(file):
            with replacing(file) as temporary, temporary.open("wb", buffering=0) as new:
                self.end = append_lines(new, Place(0, ""), *kept)
            self.file = file.open("ab", buffering=0)

    def keep(self, new: list[Arrival]) -> None:
        with writing(self.path):
            self.end = append_lines(self.file, self.end, *(arrival._asdict() for arrival in new))
            os.fsync(self.file.fileno())


def run_token(plan: Plan) -> str:
    """The token of this run in letters and clients' states; a resumed run keeps it, and the settings that decide numbers."""
    out = Path(plan.deploy.out)
    file, now = out / DEPLOYED, {"names": plan.names} | {name: getattr(plan.deploy, name) for name in FIXED}
    if plan.deploy.resume:
        if not file.exists():
            raise BadRunFolder(f"{out} holds no deployed run (no {DEPLOYED}); choose another --out")
        kept = read_sealed(file)
        for name, value in now.items():
            if kept.get(name, value) != value:
                raise BadRunFolder(
                    f"{out} holds another run: its {name} is {kept[name]}, not {value}; give the same, or another --out"
                )
        return str(kept["token"])
    token = secrets.token_hex(8)
    with writing(file):
        write_sealed(file, {"token": token} | now)
    return token
