"""The settings of a deployment: those of a run, and how the server deals with remote clients.

A Flower app holds them as plain values in [tool.flwr.app.config] of its pyproject.toml: the algorithm's fields as
"set.lr", a list of numbers as text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from undrift.core.errors import BadSetting
from undrift.core.names import parse_value
from undrift.jobs.config import FIELDS, RunConfig, build_algorithm, from_mapping, setting
from undrift.jobs.plain_values import convert, words

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")  # the name of a client or a run, and of its folder
OWN = "own"  # the dataset, and the partition, of a run whose clients each read a file
# Real clients are slow, and fail, by themselves.
SIMULATED = ("dropout_rate", "slow", "bandwidth", "latency", "attack", "clock", "step_seconds", "over_select")
HERE_ONLY = (*SIMULATED, "chunk", "client_state")  # have no flag
REFUSED = "undrift: "  # begins the line of the server's log that says why a run ended
UNUSED = (*HERE_ONLY, "execution", "replay", "compile", "checkpoint_every")
FIXED = ("secure_bound", "shape", "classes", "structures", "weight_cap", "most_samples")  # a resumed run keeps them
RENAMED = {"dp_clip": "privacy_clip", "dp_noise": "privacy_noise", "dp_delta": "privacy_delta"}


@dataclass(frozen=True)
class DeployConfig:
    """How the server deals with its clients. Each field is a flag of `undrift deploy`."""

    out: str = setting("runs/deployed", "the run's folder, on the server")
    resume: bool = setting(False, "go on from the folder's last checkpoint")
    timeout: float = setting(600.0, "seconds that clients have to answer")
    min_replies: int = setting(1, "fewest answers with which a round changes the model")
    wait: float = setting(600.0, "seconds to wait for all clients before the first round")
    join: float = setting(
        120.0, "seconds that a new node has to say what it is; then it is asked again, with twice the time"
    )
    names: str = setting("", "the clients' names, separated by commas; sorted, they are clients 0, 1, ...")
    shape: str = setting("", "with --dataset own: the shape of one input as the model sees it, such as 1,28,28")
    classes: int = setting(0, "with --dataset own: the number of class labels")
    structures: str = setting("", "with --dataset own, instead of classes: what masks show, such as disc,cup")
    test: str = setting("", "with --dataset own: an .npz on the server with samples to test the model on")
    most_samples: int = setting(10_000_000, "with --dataset own: the most training samples that a client may report")
    weight_cap: float = setting(
        0.5, "with --dataset own, --weights size: the largest share of a round's weight; 1: any"
    )

    secure_bound: float = setting(
        0.0,
        "hide single updates from the server, which sees their sum: the largest entry of an update, such as 16; 0: off",
    )

    patience: int = setting(
        0, "with --own-test: rounds without a better score on clients' own samples, after which the run ends; 0: never"
    )

    def __post_init__(self) -> None:
        if self.patience < 0:
            raise BadSetting(f"patience must be at least 0, not {self.patience}")
        if self.secure_bound and not 1e-6 <= self.secure_bound <= 1e6:
            raise BadSetting(f"secure_bound must be 0, or from 1e-6 to 1e6, not {self.secure_bound}; 16 is usual")
        if not (self.most_samples >= 1 and 0 < self.weight_cap <= 1):
            raise BadSetting("most_samples must be at least 1, and weight_cap above 0 and at most 1")
        if not (self.timeout > 0 and self.wait > 0 and self.join > 0 and self.min_replies >= 1):
            raise BadSetting("timeout, wait, join and min_replies must be greater than 0")


DEPLOY_FIELDS = {f.name: f for f in dataclasses.fields(DeployConfig)}
TYPES = get_type_hints(RunConfig) | get_type_hints(DeployConfig)
FLAGS = {
    name: f for name, f in FIELDS.items() if name not in HERE_ONLY
} | DEPLOY_FIELDS  # the flags of `undrift deploy`
FLAGS["checkpoint_every"] = setting(1, "always 1: clients keep only the states before and after their last round")


def check_flags(settings: Mapping[str, Any]) -> None:
    """Refuse flags that a real federation cannot obey; in a file they are ignored, so that a simulation's can be used."""
    if (how := settings.get("execution", "auto")) != "auto":
        raise BadSetting(f"real clients are neither stacked nor pooled; leave --execution at auto, not {how}")
    if settings.get("compile") == "on":
        raise BadSetting("real clients run as they are and cannot be compiled; leave --compile at auto, or off")
    if settings.get("checkpoint_every", 1) != 1:
        raise BadSetting("a deployed run is saved after every round; leave --checkpoint-every out")


def split_names(names: str) -> list[str]:
    """Split and sort names: "b, a" gives ["a", "b"]."""
    return sorted(words(names))


@dataclass(frozen=True)
class Plan:
    """A deployment: its settings, checked, and its algorithm."""

    run: RunConfig
    alg: Any
    deploy: DeployConfig
    told: str = field(default="", compare=False)  # the plain values that it was made of, as JSON

    @property
    def names(self) -> list[str]:
        """The clients' names in the order of their ids."""
        return split_names(self.deploy.names) or [str(id) for id in range(self.run.clients)]

    @property
    def private(self) -> bool:
        """Whether clients send their update and nothing else about their samples."""
        return self.run.privacy_clip > 0

    @property
    def scored(self) -> bool:
        """Whether clients score models on samples that they hold out, and say how they do."""
        return bool(self.run.own_test) and not self.private and not self.deploy.secure_bound

    @property
    def site_files(self) -> bool:
        """Whether each client reads its samples from a file."""
        return self.run.dataset == OWN

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input, for clients with files."""
        parts = [part.strip() for part in self.deploy.shape.split(",")]
        shape = tuple(int(part) for part in parts if part.isdecimal())
        if len(shape) < len(parts) or min(shape) < 1:
            raise BadSetting(
                f"with --dataset own the server must know the shape of one input; give --shape 1,28,28 for grey pictures or "
                f"--shape 5 for five numbers, not {self.deploy.shape!r}"
            )
        return shape

    @property
    def structures(self) -> tuple[str, ...]:
        """The structures that masks show, from the outside in; empty for class labels."""
        return words(self.deploy.structures)

    @property
    def classes(self) -> int:
        """The number of outputs of the model, for clients with files."""
        return self.deploy.classes or len(self.structures)

    def check_site_files(self, given: Mapping[str, Any]) -> None:
        """Refuse settings that do not go with clients' files, or that need them."""
        if not self.site_files:
            for name in ("shape", "classes", "structures", "test"):
                if getattr(self.deploy, name):
                    raise BadSetting(f"{name} is for --dataset own; {self.run.dataset} says it itself")
            return
        if not self.shape or (self.deploy.classes < 2) == (not self.structures):
            choices = "--classes 10, or --structures disc,cup where the targets are masks"
            raise BadSetting(f"with --dataset own give {choices}")
        if given.get("partition", OWN) != OWN:
            raise BadSetting("with --dataset own nothing is dealt out; leave partition away")
        if self.run.val_fraction:
            raise BadSetting("with --dataset own the server has no samples to hold out; leave val_fraction away")
        if "accuracy" in self.run.stop_at and not self.deploy.test:
            raise BadSetting("to stop at an accuracy the server needs samples of its own; give --test FILE.npz")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Plan:
        """A plan from settings by name; the algorithm's fields are under `set`."""
        for old in given.keys() & RENAMED:
            raise BadSetting(f"{old} is called {RENAMED[old]} now")
        deployed = convert({n: v for n, v in given.items() if n in DEPLOY_FIELDS}, TYPES)
        simulated = {n: v for n, v in given.items() if n not in DEPLOY_FIELDS}
        chosen = from_mapping(({"partition": OWN} if simulated.get("dataset") == OWN else {}) | simulated)
        names = split_names(str(deployed.get("names", "")))
        if bad := [name for name in names if not NAME.fullmatch(name) or names.count(name) > 1]:
            raise BadSetting(
                f"{bad[0]!r} cannot be a client's name, or two have it; use letters, digits, '.', '_', '-'"
            )
        if names and len(names) != chosen.clients:
            raise BadSetting(f"there are {len(names)} names for {chosen.clients} clients; give --clients {len(names)}")
        for name in SIMULATED:
            if getattr(chosen, name) != FIELDS[name].default:
                raise BadSetting(f"{name} is for simulations; real clients and links are as they are")
        alg = build_algorithm(chosen)
        if alg.pools:
            raise BadSetting(
                f"{chosen.algorithm} puts all samples into one hand, which a federation is there to avoid; simulate it"
            )
        # Clients keep only the states before and after their last round.
        chosen = dataclasses.replace(chosen, set=asdict(alg), checkpoint_every=1)
        deploy = DeployConfig(**deployed)
        if deploy.min_replies > chosen.cohort:
            raise BadSetting(f"min_replies is {deploy.min_replies}, but only {chosen.cohort} clients are asked a round")
        if chosen.privacy_clip and deploy.min_replies > 1:
            raise BadSetting("privacy_clip: leave min_replies at 1: a round must not depend on how many answer")
        for name in ("own_test", "secure_bound"):
            if chosen.asynchronous and getattr(deploy if name in DEPLOY_FIELDS else chosen, name):
                raise BadSetting(f"asynchronous: {name} needs clients that are there together; leave it out")
        plan = cls(chosen, alg, deploy)
        if deploy.patience and not plan.scored:
            raise BadSetting(
                "patience needs scores of clients: give --own-test 0.2, and neither privacy nor secure_bound"
            )
        plan.check_site_files(given)
        return plan

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> Plan:
        """A plan from the plain values of a Flower app."""
        given = {n: v for n, v in flat.items() if not n.startswith("set.")}
        fields = {n[4:]: parse_value(v) if isinstance(v, str) else v for n, v in flat.items() if n.startswith("set.")}
        told = json.dumps(dict(flat), sort_keys=True)
        return dataclasses.replace(cls.of(given | {"set": fields}), told=told)

    def flat(self) -> dict[str, bool | int | float | str]:
        """The plain values of a Flower app."""
        unset = [name for name in ("steps", "epochs") if not getattr(self.run, name)]
        run = {n: v for n, v in asdict(self.run).items() if n not in (*UNUSED, *unset, "set")}
        fields = {f"set.{n}": str(list(v)) if isinstance(v, tuple | list) else v for n, v in self.run.set.items()}
        return run | asdict(self.deploy) | fields
