"""The settings of runs: a frozen dataclass for each command, with the same names in Python, TOML and flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from undrift.core.errors import BadSetting, closest
from undrift.core.lora import parse_lora
from undrift.core.names import methods_with, names
from undrift.core.pinned import pin
from undrift.core.rates import RateSchedule
from undrift.jobs.plain_values import check_known, convert, lr_among_fields, table_of_fields, words
from undrift.jobs.stop_at import parse_stop

MOST = 2**31 - 1  # the largest whole number
LARGEST = 1e30  # the largest number, also for a scheduled learning rate: float32 must hold it


# The headings under which `--help` lists the flags.
WHAT = "what is trained"
CLIENTS = "the clients and their samples"
STEPS = "steps and the learning rate"
MESSAGES = "messages, and what goes wrong"
PRIVACY = "differential privacy"
RECORD = "scores, the run's folder, and its end"
MACHINE = "how it is computed"


def setting(default: Any, about: str, heading: str = "") -> Any:
    """A field that is a flag too; `about` is its help, under a heading."""
    return field(default=default, metadata={"help": about, "heading": heading})


@dataclass(frozen=True)
class JobConfig:
    """The settings of every command that trains. Each field is a flag."""

    dataset: str = setting(
        "digits", "a name from 'undrift data list', imagefolder:PATH, or package.module:function", WHAT
    )
    model: str = setting("mlp", "a name from 'undrift list models', package.module:function, or hf:CONFIG.json", WHAT)
    rounds: int = setting(
        20, "how long to train (T): a round is a pass over the training samples, or --steps batches", WHAT
    )
    seed: int = setting(0, "seed of all random numbers", WHAT)
    val_fraction: float = setting(0.0, "share of the training samples that is held out for validation", RECORD)
    warmup: float = setting(0.0, "rounds in which the learning rate rises from 0", STEPS)
    lr_decay: float = setting(1.0, "factor of the learning rate after every round", STEPS)
    lr_drops: str = setting("", "rounds after which the learning rate drops, such as 120,160", STEPS)
    lr_drop: float = setting(0.1, "factor of the learning rate at each of --lr-drops", STEPS)
    device: str = setting("auto", "where to compute; auto takes a GPU if there is one", MACHINE)
    dtype: str = setting("float32", "the numbers' type", MACHINE)
    execution: str = setting(
        "auto",
        "run simulated clients or workers stacked (as one), in a pool of threads, or in plain PyTorch to debug",
        MACHINE,
    )
    replay: bool = setting(True, "on a GPU, replay stacked rounds as CUDA graphs, which is much faster", MACHINE)
    compile: str = setting("auto", "compile replayed rounds; auto does so if the run is long enough", MACHINE)
    precision: str = setting(
        "fp32",
        "products on a GPU: fp32, tf32 (10 bits, faster), or bf16 (convolutions with 7 bits, the rest as tf32)",
        MACHINE,
    )
    deterministic: bool = setting(False, "make runs on a GPU repeatable, bit for bit", MACHINE)
    eval_every: int = setting(1, "rounds between tests of the model", RECORD)
    checkpoint_every: int = setting(1, "rounds between checkpoints", RECORD)
    stop_at: str = setting(
        "",
        "when to end early: accuracy=0.9, loss<0.2 (any number of the record) or time=10m (s, m, h), with commas",
        RECORD,
    )
    track: str = setting(
        "",
        "also send what is recorded to tensorboard, wandb, mlflow, trackio, package.module:Class, or several",
        RECORD,
    )
    set: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "a field of the algorithm or method, such as momentum=0.9; once for each",
            "heading": WHAT,
        },
    )

    def __post_init__(self) -> None:
        least = dict(rounds=1, eval_every=1, checkpoint_every=1)
        check_numbers(self, least, not_negative=("warmup",), positive=("lr_decay", "lr_drop"))
        if not 0 <= self.seed < 2**63:
            raise BadSetting(f"seed must be at least 0 and below 2^63, not {self.seed}")
        if not 0.0 <= self.val_fraction < 1.0:
            raise BadSetting(f"val_fraction must lie in [0, 1), not {self.val_fraction}")
        check_choices(self, JOB_CHOICES)
        parse_stop(self.stop_at)
        split_trackers(self.track)
        if not self.schedule.largest(self.rounds) < LARGEST:
            raise BadSetting(
                f"lr_decay and lr_drop make the learning rate too large within {self.rounds} rounds; lower them"
            )

    @property
    def schedule(self) -> RateSchedule:
        """The factor of the learning rate over the rounds."""
        return RateSchedule(self.warmup, self.lr_decay, parse_drops(self.lr_drops), self.lr_drop)

    def as_toml(self) -> dict[str, Any]:
        """The settings as run.toml holds them."""
        given = asdict(self)
        return {name: given[name] for name in fields_of(type(self))}

    def remarks(self) -> list[str]:
        """Warnings about settings that are legal but probably unintended."""
        late = [drop for drop in self.schedule.drops if drop >= self.rounds]
        remarks = (
            [f"the rate does not drop after round {late[0]}, because the run ends before; see lr_drops"] if late else []
        )
        if self.warmup > self.rounds:
            remarks.append(
                f"the full rate is never reached: warmup is {self.warmup:g} rounds, the run has {self.rounds}"
            )
        return remarks

    def advice(self) -> str:
        """What to try if the run diverges."""
        lr = self.as_toml().get("lr", self.set.get("lr"))
        return "try a lower rate" + (f", such as lr={lr / 4:.2g} in place of {lr:g}" if lr else "")


JOB_CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("float32", "float64"),
    "execution": ("auto", "stacked", "pool", "debug"),
    "compile": ("auto", "on", "off"),
    "precision": ("fp32", "tf32", "bf16"),
}


def fields_of(kind: type[JobConfig]) -> dict[str, dataclasses.Field[Any]]:
    """A command's settings by name: first those that only it has."""
    shared = {f.name for f in dataclasses.fields(JobConfig)}
    return {f.name: f for f in sorted(dataclasses.fields(kind), key=lambda f: f.name in shared)}


@dataclass(frozen=True)
class RunConfig(JobConfig):
    """All settings of a simulated run. Each field is a flag of `undrift run`."""

    algorithm: str = setting(
        "fedavg", "a name from 'undrift list algorithms', LOCAL+SERVER, or package.module:Class", WHAT
    )
    lora: str = setting(
        "", "train adapters of the model alone: r=8,alpha=8,dropout=0,targets=q_proj+v_proj,train=classifier", WHAT
    )
    partition: str = setting(
        "dirichlet:0.1", "how the samples are dealt out; 'undrift list partitions' shows all ways", CLIENTS
    )
    clients: int = setting(100, "how many clients there are (N)", CLIENTS)
    cohort: int = setting(10, "how many of them train in a round (S)", CLIENTS)
    sampling: str = setting("fixed", "fixed: S clients a round; bernoulli: each client with probability S/N", CLIENTS)
    steps: int = setting(0, "local steps a round (K) [5, unless --epochs is given]", STEPS)
    epochs: float = setting(0.0, "passes over the local samples a round (E), instead of --steps", STEPS)
    batch: int = setting(64, "samples in a local batch (B)", STEPS)
    batches: str = setting(
        "",
        "persistent: go on through the samples from round to round; fresh: shuffle anew [persistent; fresh with --epochs]",
        STEPS,
    )
    compress: str = setting(
        "", "compress what clients send, with error feedback: rbgs:64, randk:64, topk:64, fp16, int8 or int4", MESSAGES
    )
    aggregate: str = setting(
        "mean",
        "what the server makes of the clients' vectors: mean, median, trimmed:0.1, krum:2, geometric, clip:1 or bound:10",
        MESSAGES,
    )
    attack: str = setting(
        "", "simulate hostile clients: signflip:0.2, scale:0.2:20, gauss:0.2:1 or labelflip:0.2", MESSAGES
    )
    weights: str = setting("uniform", "weigh clients' updates equally, or by their number of samples", MESSAGES)
    privacy_clip: float = setting(0.0, "the largest norm of a client's update (C); 0: no privacy", PRIVACY)
    privacy_noise: float = setting(
        0.0, "sigma, with --privacy-clip: the noise on the sum is N(0, sigma^2 C^2)", PRIVACY
    )
    privacy_delta: float = setting(1e-5, "delta, for the epsilon in the records", PRIVACY)
    privacy_quantile: float = setting(
        0.0, "let C follow this quantile of the updates' norms, from --privacy-clip on; 0: C stays", PRIVACY
    )
    dropout_rate: float = setting(0.0, "probability that an invited client fails to answer", MESSAGES)
    slow: str = setting("", "P,F: with probability P a client makes only a share F of its steps", MESSAGES)
    bandwidth: float = setting(
        0.0, "Mbit/s of each client's link, for the simulated network time; 0: no limit", MESSAGES
    )
    latency: float = setting(0.0, "seconds that each message takes, for the simulated network time", MESSAGES)
    clock: str = setting(
        "",
        "virtual time: lognormal:0.5 draws clients' speeds (lognormal:0.5,0.2 links, too); a trace; a deployed run's folder",
        MESSAGES,
    )
    step_seconds: float = setting(
        1.0, "with --clock lognormal: virtual seconds of the median client's local step", MESSAGES
    )
    over_select: int = setting(
        0, "with --clock: clients invited beyond the cohort; the first --cohort answers count", MESSAGES
    )
    asynchronous: bool = setting(
        False, "the server steps whenever --cohort answers are there; nobody waits for a round", MESSAGES
    )
    concurrent: int = setting(
        0, "with --asynchronous: clients at work at a time; 0: ten times --cohort, or all", MESSAGES
    )
    own_test: float = setting(0.0, "share of each client's samples that it holds out to be tested on", CLIENTS)
    colour: float = setting(0.0, "how much clients' pictures differ in brightness and saturation", CLIENTS)
    chunk: int = setting(0, "clients stacked at a time; 0: as many as fit in memory", MACHINE)
    client_eval_every: int = setting(
        0, "rounds between scores on each client's samples; 0: only in the last round", RECORD
    )
    client_state: str = setting(
        "auto", "where clients' states lie; auto takes the disk if memory is too small", MACHINE
    )
    # A round is a few steps of a few clients, much less than a pass over all samples.
    rounds: int = setting(100, "how long to train (T): in a round a cohort makes --steps or --epochs", WHAT)
    eval_every: int = setting(5, "rounds between tests of the model", RECORD)
    checkpoint_every: int = setting(50, "rounds between checkpoints", RECORD)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps and self.epochs:
            raise BadSetting(f"give steps or epochs, not both (steps={self.steps}, epochs={self.epochs:g})")
        if not self.steps and not self.epochs:
            object.__setattr__(self, "steps", 5)
        if not self.batches:
            object.__setattr__(self, "batches", "persistent" if self.steps else "fresh")
        least = dict(clients=1, cohort=1, batch=1, client_eval_every=0, steps=0, chunk=0, over_select=0, concurrent=0)
        not_negative = ("epochs", "colour", "bandwidth", "latency")
        check_numbers(self, least, not_negative, ("step_seconds",))
        if not 0.0 <= self.dropout_rate < 1.0:
            raise BadSetting(f"dropout_rate must lie in [0, 1), not {self.dropout_rate}")
        parse_slow(self.slow)
        parse_lora(self.lora)
        check_compress(self.compress)
        check_privacy(self)
        check_attacks(self.aggregate, self.attack)
        check_clock(self)
        check_choices(self, CHOICES)
        if self.batches == "persistent" and self.epochs:
            raise BadSetting("persistent batches count steps; use --steps, or --batches fresh with --epochs")
        if self.cohort > self.clients:
            raise BadSetting(
                f"a cohort of {self.cohort} cannot be drawn from {self.clients} clients; lower cohort or raise clients"
            )

    def remarks(self) -> list[str]:
        alg = build_algorithm(self)
        said = [*super().remarks(), *alg.remarks(self.rounds, self.cohort)]
        if self.privacy_clip and self.privacy_delta * self.clients >= 1:
            said.append(
                f"privacy_delta is {self.privacy_delta:g} with {self.clients} clients, so that a promise that gives one of them "
                "away whole would hold; take it well below 1 / clients"
            )
        if alg.weighs_staleness and not self.asynchronous:
            said.append(
                f"{self.algorithm} weighs answers by their staleness, and here none is stale; give --asynchronous"
            )
        return said

    def advice(self) -> str:
        more = [] if self.set.get("clip") else ["shorter steps (clip=10)"]
        more += ["less momentum on the server (beta1)"] if self.set.get("beta1") else []
        return ", or ".join([super().advice(), *more])


def check_numbers(
    settings: object, least: Mapping[str, int], not_negative: Sequence[str] = (), positive: Sequence[str] = ()
) -> None:
    """Raise BadSetting for a whole number outside its limits, and for a number that is negative, zero or too large."""
    for name, lowest in least.items():
        if getattr(settings, name) < lowest:
            raise BadSetting(f"{name} must be at least {lowest}, not {getattr(settings, name)}")
        if getattr(settings, name) > MOST:
            raise BadSetting(f"{name} must be at most {MOST}, not {getattr(settings, name)}")
    for name in (*not_negative, *positive):
        value, zero = getattr(settings, name), name in not_negative
        if not (0.0 <= value < LARGEST and (value or zero)):
            bound = "of at least 0" if zero else "above 0"
            raise BadSetting(f"{name} must be a number {bound} and below {LARGEST:g}, not {value}")


def check_choices(settings: object, choices: Mapping[str, tuple[str, ...]]) -> None:
    """Raise UnknownName for a value that its setting does not allow."""
    for name, allowed in choices.items():
        check_known(f"value of {name}", [str(getattr(settings, name))], allowed)


CHOICES = JOB_CHOICES | {
    "sampling": ("fixed", "bernoulli"),
    "batches": ("persistent", "fresh"),
    "weights": ("uniform", "size"),
    "client_state": ("auto", "memory", "disk"),
}
# A resumed run may change these: how long and how it runs, not what it computes.
RESUMABLE = (
    "rounds", "stop_at", "checkpoint_every", "device", "execution", "chunk", "replay", "compile", "deterministic",
    "track",
)  # fmt: skip
FIELDS = fields_of(RunConfig)
TYPES = get_type_hints(RunConfig)


SKEW = "; for Dirichlet's alpha write the partition dirichlet:VALUE"  # where someone gives an alpha


def from_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """A RunConfig from plain values; unknown names and values of the wrong kind are errors."""
    if "sweep" in settings:
        raise BadSetting("settings with a [sweep] table are of many runs; start them with 'undrift sweep FILE.toml'")
    for name in sorted(settings.keys() - {*TYPES, "lr"}):
        if not closest(name, {*TYPES, "lr"}) and methods_with(name):
            skew = SKEW if name == "alpha" else ""
            raise BadSetting(
                f"{name} is a field of methods, not a setting of the run; put it into set, as in set={{'{name}': VALUE}}{skew}"
            )
    check_known("setting", settings, {*TYPES, "lr"})
    settings = lr_among_fields(settings)
    fields = table_of_fields(settings.get("set", {}))
    checked = convert({n: v for n, v in settings.items() if n != "set"}, TYPES) | {"set": fields}
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if name in checked and not checked[name] and not checked.get(other):
            raise BadSetting(f"{name} must be greater than 0")
    if "model" in checked:
        checked["model"] = pin(checked["model"])
    return RunConfig(**checked)


def check_attacks(aggregate: str, attack: str) -> None:
    from undrift.round.aggregate import parse_rule  # with PyTorch
    from undrift.round.attack import parse_attack

    parse_rule(aggregate)
    parse_attack(attack)


def check_clock(config: RunConfig) -> None:
    """Check that the settings of virtual time go together."""
    from undrift.round.clock import parse_spreads  # with PyTorch

    drawn = parse_spreads(config.clock) is not None or (config.asynchronous and not config.clock)
    if config.step_seconds != 1.0 and not drawn:
        raise BadSetting("step_seconds goes with a clock that is drawn; give --clock lognormal:0.5")
    if config.over_select and (config.asynchronous or not config.clock):
        raise BadSetting(
            "over_select is for rounds that wait, on a virtual clock: give --clock, and not --asynchronous"
        )
    if config.concurrent and not config.asynchronous:
        raise BadSetting("concurrent counts clients at work where nobody waits for a round; give --asynchronous")
    if config.concurrent > config.clients:
        raise BadSetting(f"concurrent must be at most the {config.clients} clients, not {config.concurrent}")


UNRATED = ("fp16", "int8", "int4")  # compressions without a ratio


def check_compress(text: str) -> None:
    """Check --compress, such as "rbgs:64", "fp16" or nothing."""
    name, _, ratio = text.partition(":")
    check_known("value of compress", [name] if text else [], ("rbgs", "randk", "topk", *UNRATED))
    try:
        understood = text in ("", *UNRATED) or (name not in UNRATED and 1.0 <= float(ratio) < float("inf"))
    except ValueError:
        understood = False
    if not understood:
        raise BadSetting(
            f"compress takes rbgs:R, randk:R, topk:R with R of at least 1, fp16, int8 or int4, not {text!r}"
        )


def check_privacy(config: RunConfig) -> None:
    """Check that noise and clipping go together and are numbers under which a promise can be made."""
    clip, noise = config.privacy_clip, config.privacy_noise
    if (clip, noise) != (0.0, 0.0) and not (0 < clip < float("inf") and 0 < noise < float("inf")):
        raise BadSetting(
            f"privacy_clip and privacy_noise must both be above 0, not {clip} and {noise}; leave both out for no privacy"
        )
    if not 0 < config.privacy_delta < 1:
        raise BadSetting(f"privacy_delta must lie between 0 and 1, not {config.privacy_delta}")
    if not 0 <= config.privacy_quantile < 1:
        raise BadSetting(f"privacy_quantile must lie in [0, 1), not {config.privacy_quantile}")
    if config.privacy_quantile and not clip:
        raise BadSetting("privacy_quantile goes with privacy_clip, the first C; give both")


def split_trackers(track: str) -> list[str]:
    """The names in --track.

    >>> split_trackers("tensorboard, mlflow"), split_trackers("")
    (['tensorboard', 'mlflow'], [])
    """
    chosen = words(track)
    check_known("tracker", (name for name in chosen if ":" not in name), names("trackers"))
    return list(dict.fromkeys(chosen))


def parse_slow(text: str) -> tuple[float, float]:
    """Parse --slow: a probability and a share.

    >>> parse_slow("0.3,0.5"), parse_slow("")
    ((0.3, 0.5), (0.0, 1.0))
    """
    if not text:
        return 0.0, 1.0
    try:
        chance, share = (float(part) for part in text.split(","))
    except ValueError:
        raise BadSetting(f"slow takes two numbers, such as 0.3,0.5, not {text!r}") from None
    if not (0.0 <= chance <= 1.0 and 0.0 < share <= 1.0):
        raise BadSetting(f"slow takes a probability in [0, 1] and a share in (0, 1], not {text!r}")
    return chance, share


def parse_drops(text: str) -> tuple[int, ...]:
    """Parse --lr-drops, such as "120,160"."""
    try:
        drops = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        drops = (0,)
    if any(drop < 1 for drop in drops) or len(set(drops)) < len(drops):
        raise BadSetting(f"lr_drops takes different rounds, counted from 1, with commas, such as 120,160, not {text!r}")
    return drops


def build_algorithm(config: RunConfig) -> Any:
    """Build the algorithm that a config names."""
    from undrift.jobs.registry import algorithm_class, make_algorithm  # with PyTorch

    return make_algorithm(algorithm_class(config.algorithm), config.algorithm, config.set, FIELDS)
