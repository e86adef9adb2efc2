"""Errors that the command line prints as one line: what was wrong, what was expected and what to try."""

from __future__ import annotations

import contextlib
import difflib
import re
import warnings
from collections.abc import Iterable, Iterator


class UndriftError(Exception):
    """An error that the user can correct."""

    ends_with_log = False  # whether the message goes on after its first line


# What people write elsewhere: another name for what there is, or a sentence where it is not offered.
MEANT = {
    "gpu": "cuda", "acc": "accuracy", "nvidia": "cuda", "noniid": "dirichlet", "heterogeneous": "dirichlet", "homogeneous": "iid",
    "uniform": "iid", "double": "float64", "fp64": "float64", "float": "float32", "fp32": "float32", "single": "float32",
    "natural": "sites", "learningrate": "lr", "localepochs": "epochs", "localsteps": "steps", "batchsize": "batch",
    "numrounds": "rounds", "numclients": "clients", "clientsperround": "cohort", "participation": "cohort", "fraction": "cohort",
    "fractionfit": "cohort", "samplerate": "cohort", "bs": "batch", "data": "dataset", "cnn": "small-cnn",
    "labelskew": "dirichlet", "dir": "dirichlet",
    "output": "out", "outdir": "out", "outputdir": "out", "save": "out", "savedir": "out", "logdir": "out",
    "log": "track", "logger": "track", "tracker": "track", "stages": "blocks", "train": "run", "simulate": "run",
    "start": "server", "fit": "run", "strategy": "algorithm", "strategies": "algorithms", "algorithm": "method",
    "method": "algorithm", "pathological": "shards", "niid": "dirichlet", "fedopt": "fedadam", "tb": "tensorboard",
    "accelerator": "device", "maxepochs": "rounds", "numtrainepochs": "rounds", "numserverrounds": "rounds",
    "communicationrounds": "rounds", "commrounds": "rounds", "numepochs": "epochs", "nepochs": "epochs",
    "clientfraction": "cohort", "minfitclients": "cohort", "numsupernodes": "clients", "nclients": "clients",
    "perdevicetrainbatchsize": "batch", "randomstate": "seed", "randomseed": "seed", "manualseed": "seed",
    "reportto": "track", "evalsteps": "evalevery", "savesteps": "checkpointevery", "earlystopping": "stopat",
    "fp16": "precision", "bf16": "precision", "amp": "precision", "targetaccuracy": "stopat", "seedeverything": "seed",
    "client": "node", "dashboard": "watch", "ui": "watch", "plot": "report", "compare": "report", "info": "doctor",
    "download": "data", "numstages": "blocks", "microbatches": "micro", "worldsize": "workers",
    "noisemultiplier": "privacynoise",
}  # fmt: skip
HALF = ("float16", "fp16", "half", "bfloat16", "bf16", "amp")
MANY = 40  # names, from which on a list of them is no help
# Where all names of a kind are shown.
SHOWN = {"algorithm": "list algorithms", "dataset": "list datasets", "model": "list models", "setting": "run --help"}
OPPOSITE = ("non", "no", "un", "in", "dis", "not", "without")  # "noniid" is not "iid"
OTHER_DATA = ("emnist", "femnist", "kmnist", "qmnist", "medmnist")  # none of these is "mnist"


class UnknownName(UndriftError):
    """A name that is not registered."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        best = closest(name, names)
        hint = f"did you mean {best!r}?" if best else f"known: {', '.join(names)}"
        if not best and len(names) > MANY:
            hint = f"none of the {len(names)} names is close to it"
            hint += f"; 'undrift {SHOWN[kind]}' shows them" if kind in SHOWN else ""
        if plain(name) in HALF and "float32" in names:
            hint = "half precision is not offered; use float32, with --precision tf32 or bf16 for speed on a GPU"
        super().__init__(f"unknown {kind} {name!r}; {hint}")

    def __reduce__(self) -> tuple[type[UndriftError], tuple[str]]:
        return UndriftError, (str(self),)  # across processes the message is enough


def plain(name: str) -> str:
    """A name without case and punctuation."""
    return "".join(c for c in name.lower() if c.isalnum())


def closest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, or "".

    >>> closest("fedavgg", ["fedavg", "fedprox"]), closest("nu", ["lr", "mu"]), closest("--device", ["--dataset"])
    ('fedavg', 'mu', '')
    >>> closest("gpu", ["cpu", "cuda"]), closest("noniid", ["iid", "dirichlet"]), closest("--algo", ["--algorithm", "--lr"])
    ('cuda', 'dirichlet', '--algorithm')
    """
    spelled = {plain(each): each for each in known}
    given = plain(name)
    if plain(MEANT.get(given, given)) in spelled:
        return spelled[plain(MEANT.get(given, given))]
    for each in difflib.get_close_matches(given, spelled, n=3, cutoff=0.72):
        opposite = any(given in (word + each, word + plain(spelled[each])) or each == word + given for word in OPPOSITE)
        if not opposite and given not in OTHER_DATA and not other_number(given, each):
            return spelled[each]
    short = [e for e in spelled if len(e) == len(given) <= 3]  # one letter is another, or two have changed places
    begun = [e for e in spelled if len(given) > 2 and e.startswith(given)]
    if len(begun) == 1:
        return spelled[begun[0]]
    near = [e for e in short if sum(a != b for a, b in zip(e, given, strict=True)) == 1 or sorted(e) == sorted(given)]
    return spelled[near[0]] if len(near) == 1 and len(given) > 1 else ""


def other_number(a: str, b: str) -> bool:
    """Whether two names have different numbers, so that neither is a typo of the other.

    >>> other_number("resnet34", "resnet18"), other_number("lenet", "lenet5")
    (True, False)
    """
    found, other = (re.findall(r"\d+", name) for name in (a, b))
    return bool(found and other and found != other)


@contextlib.contextmanager
def one_line_warnings(whose: str = "") -> Iterator[None]:
    """Print warnings like errors: in one line, without the place in the code, and with the run that they are about."""
    about = f"{whose}: " if whose else ""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda text, *more, **named: f"undrift: warning: {about}{' '.join(str(text).split())}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


class BadSetting(UndriftError):
    """A setting whose value is not allowed, alone or together with another setting."""


class MissingData(UndriftError):
    """A data set whose files are missing."""


class BadData(UndriftError):
    """Files or arrays with invalid content."""


class BadRunFolder(UndriftError):
    """A run folder that holds another run or a damaged one."""


class CannotWrite(UndriftError):
    """A run's folder that can no longer be written: full, read-only, removed or taken by another run."""


class OtherRankFailed(UndriftError):
    """Another process of the same run reported an error."""


class LostRank(UndriftError):
    """Another process of the same run stopped answering."""


class ClientFailed(UndriftError):
    """An exception of an algorithm, a model or a loss, with the stage and, if known, the client."""

    def __init__(self, stage: str, error: Exception, client: int | None = None) -> None:
        self.stage, self.error, self.client = stage, error, client
        who = "a client" if client is None else f"client {client}"
        super().__init__(f"{who}, {stage}: {type(error).__name__}: {error}")

    def of(self, client: int) -> ClientFailed:
        """The same error with the client's number."""
        return ClientFailed(self.stage, self.error, client)

    def __reduce__(self) -> tuple[type[UndriftError], tuple[str]]:
        return UndriftError, (str(self),)
