"""Nonsense for the command line, its files and its readers: what comes of it must be a result or one line, never a traceback.

`arguments`, `toml_files` and `data_files` are Hypothesis strategies of cases. `trouble` runs a case and says what went wrong.
Cases run in this process. Nothing trains for more than one round, no sweep or federation starts, and there is no network.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import os
import pickle
import resource
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors import SafetensorError

import undrift
import undrift.data._sources
import undrift.dataparallel.command
import undrift.deploy.command
import undrift.deploy.settings
import undrift.jobs.batch
import undrift.jobs.course
import undrift.jobs.sweep
import undrift.pipeline.pipe_config
from undrift import cli
from undrift.cli.parser import COMMANDS as ALL
from undrift.core.errors import UndriftError
from undrift.core.names import names
from undrift.data.federation import federate
from undrift.data.load import load_dataset
from undrift.data.partition import PARTITIONS
from undrift.deploy.site_files import site_federation
from undrift.jobs import config
from undrift.jobs.folder import SUPER

CPU = torch.device("cpu")
MOST_MEMORY = 6 << 30  # bytes that all cases together may take
Case = Callable[[Path], None]  # works in a folder of its own


class Enough(Exception):
    """A run that got as far as its first round."""


def play_one_round(course: Any, beside: Any = ()) -> Iterator[Any]:
    if course.ahead()[0]:
        yield course.take(course.run.rounds(1, True))
        raise Enough


def sweep_nothing(*given: Any) -> dict[str, str]:
    raise Enough


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let a case that asks for very much memory fail, where it would otherwise end all of the machine's processes."""
    before, pages = resource.getrlimit(resource.RLIMIT_AS), int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def kept_short() -> Iterator[None]:
    """Let nothing run long, and nothing look for a network or a data set."""
    with contextlib.ExitStack() as stack:
        for place, name, stub in (
            (undrift.jobs.course, "stretches", play_one_round),
            (undrift.jobs.sweep, "run_all", sweep_nothing),
            (undrift.jobs.batch, "measure", sweep_nothing),
            (undrift.jobs.batch.Batch, "do", sweep_nothing),
            (undrift.deploy.command, "local", sweep_nothing),
            (undrift.deploy.command, "run_process", sweep_nothing),
            (undrift.data._sources, "hugging_face_loader", lambda name: None),
        ):
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, stub)
        stack.enter_context(limited_memory())
        before = os.environ | {}
        stack.callback(lambda: (os.environ.clear(), os.environ.update(before)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        os.environ.pop("UNDRIFT_DATA", None)
        os.environ["HF_HUB_OFFLINE"] = "1"
        yield


def trouble(case: Case, folder: Path) -> str:
    """What is wrong with what came of a case; empty if nothing is."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        case(folder)
    except (UndriftError, OSError, SafetensorError, Enough, SystemExit):
        return ""
    except BaseException as error:
        last = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}undrift{os.sep}" in f.filename][-1:]
        where = f"{Path(last[0].filename).name}:{last[0].lineno}" if last else "?"
        return f"{where} {type(error).__name__}: {str(error)[:200]}"
    finally:
        os.chdir(here)
    return ""


class Untidy(Exception):
    """A message that is not one line."""


def command(*words: str) -> None:
    """Run the command line; a refusal must be one line."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(words)
    text = said.getvalue()
    if code == 2 and not (text.startswith("undrift: ") and text.count("\n") == 1 and text[:-1].isprintable()):
        raise Untidy(repr(text))


# ---- values ----

NUMBERS = [
    *("0", "1", "2", "3", "7", "-1", "-0", "0.5", "1.0", "1.5", "1e-320", "1e18", "1e300", "1e308", "-1e308", "nan", "inf"),
    *("-inf", "3000000000", "9223372036854775807", "9223372036854775808", "18446744073709551616", "1e400", "0x10", "1_0", ".5"),
    *("5.", "٣", "½", "1e", "0b1", "+3", "1,2", "1:2", "true", "false", "[]", "{}", "9" * 30, "9" * 5000, "1" + "0" * 400),
]  # fmt: skip
TEXTS = [
    *("", " ", "\0", "a\nb", "a\0b", "\r", "\x1b[31m", "[/red]", "x[/red]", "[bold", "{x}", "%s", "{0}", "..", ".", "/", "a/b"),
    *("~", "~nobody", "=1+1", "@x", "+", "-", "--", ":", "::", "a:b", ":x", "x:", "+fedavg", "fedavg+", "fedavg+fedavg"),
    *("fedavg+fedavg+fedavg", "moon+scaffold", "undrift:__version__", "undrift.cli:main", "torch.nn:Linear", "math:pi"),
    *("x" * 300, "x" * 5000, "é", "\u202e", "\ud800", "𝔘", "NUL", "con", "(", ")", "(()", "mlp(", "mlp()", "mlp(x)", "mlp(x=1)"),
    *("mlp(hidden=0)", "mlp(hidden=-1)", "mlp(hidden=1e9)", "logreg", "mlp", "unet", "unet(depth=99)", "digits", "mnist"),
    *("synthetic-sites", "synthetic-sites(sites=0)", "synthetic-sites(without=1)", "digits(without=1)", "imagefolder:"),
    *("imagefolder:\0", "imagefolder:.", "iid", "iid:1", "dirichlet", "dirichlet:0", "dirichlet:1e-300", "dirichlet:1e300"),
    *("shards:0", "shards:1e300", "resample:1e300", "resample:3", "similarity:200%", "similarity:nan", "sites", "own"),
    *("topk:4", "topk:", "topk:nan", "topk:1e300", "rbgs:1e18", "fp16", "fp16:2", "0.3,0.5", "nan,nan", ",", "1,1,0;4,2,0"),
    *(";", "1;1", "-1;0", "1,1;9,9", "accuracy=0.9", "time=1e308h", "time=nan", "time=", "accuracy=", "=", "==", "a=b"),
    *("lr=1e30", "lr=1e-45", "lr=[1]", "lr={}", "lr=true", "lr='x'", "lr=1979-05-27", "lr=" + "[" * 3000, "x=1", "mu=1e29"),
]  # fmt: skip
texts = st.sampled_from(TEXTS) | st.text(max_size=12) | st.sampled_from(NUMBERS)
values = (
    st.sampled_from(NUMBERS)
    | texts
    | st.integers(-3, 9).map(str)
    | st.floats(allow_nan=True).map(repr)
    | st.sampled_from(names("algorithms"))
    | st.sampled_from([*PARTITIONS])
)

# ---- arguments ----

SMALL = {
    "run": "--clients 4 --cohort 2 --rounds 1 --model logreg --batch 4",
    "dataparallel": "--workers 2 --rounds 1 --steps 1 --model logreg",
    "dp": "--workers 2 --rounds 1 --steps 1 --model logreg",
    "pipe": "--rounds 1 --steps 1 --blocks 2 --model mlp --batch 4",
    "sweep": "s.toml --out o",
    "tune": "s.toml --out o",
}
SWEEP = b'model = "logreg"\nrounds = 1\n[grid]\nlr = [0.1, 0.05]\n[sweep]\nseeds = [0]\n'
COMMANDS = [*["run"] * 5, "dp", *["pipe"] * 2, *["deploy"] * 2, "sweep", *["tune"] * 2, *["reproduce"] * 2]
COMMANDS += ["data", "list", "cite", "report", "predict", "ls", "verify", "figures"]


# A whole number just below the limit would be a legal run that takes years.
WHOLE = ["0", "1", "2", "3", "7", "40", "-1", "2147483648", "9223372036854775808", "9" * 30]
REAL = ["0", "0.5", "0.999", "1", "1.5", "3", "-1", "1e-320", "1e-9", "1e18", "1e29", "1e300", "1e308", "inf", "nan"]


def flags_of(name: str) -> dict[str, Any]:
    """The flags of a command, and the type of each."""
    (command,) = (each for each in ALL if name in (each.name, *each.aliases))
    return {flag: options.get("type") for flag, options, _ in command.arguments if flag.startswith("-")}


@st.composite
def arguments(draw: st.DrawFn) -> Case:
    """A command with some of its flags, most of them with a value that is not meant for them."""
    name = draw(st.sampled_from(COMMANDS))
    words = [name, *SMALL.get(name, "").split()]
    if name in ("deploy", "data"):
        actions = [*undrift.deploy.command.ACTIONS, "list", "show", "prepare"]
        words.append(draw(st.sampled_from(actions) | texts))
    if name == "reproduce" and draw(st.booleans()):
        words.append("gradma-table1")
    elif name in ("list", "cite", "report", "reproduce", "ls", "verify", "figures") or draw(st.integers(0, 9)) == 0:
        words.append(draw(texts))
    known = flags_of(name)
    for _ in range(draw(st.integers(0, 3))):
        flag = draw(st.sampled_from(sorted(known))) if known and draw(st.integers(0, 19)) else draw(texts)
        fitting = {int: WHOLE, float: REAL}.get(known.get(flag))
        value = draw(st.sampled_from(fitting)) if fitting and draw(st.integers(0, 3)) else draw(values)
        if flag == "--set" and draw(st.booleans()):
            value = f"{draw(st.sampled_from(['lr', 'momentum', 'clip', 'optimizer', 'mu', 'slots', 'blocks']))}={value}"
        words += [f"{flag}={value}"] if draw(st.booleans()) else [flag, value]

    def case(folder: Path) -> None:
        if name in ("sweep", "tune"):
            (folder / "s.toml").write_bytes(SWEEP)
        command(*words)

    return case


# ---- TOML files ----

toml_values: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([n for n in TEXTS if "\ud800" not in n])
    | st.sampled_from(
        [0, 1, 2, 3, 5, -1, True, False, 0.5, -0.5, 1e18, 1e300, float("nan"), float("inf"), 10**18, 10**30]
    )
    | st.floats()
    | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["lr", "mu", "x", ""]), inner, max_size=2)
    ),
    max_leaves=4,
)
OTHER_NAMES = ("set", "sweep", "made", "command", "algorithm", "method", "x", "", "algorithms", "seeds", "grid")
FIELDS = {
    "run": config.FIELDS,
    "dp": undrift.dataparallel.command.FIELDS,
    "pipe": undrift.pipeline.pipe_config.FIELDS,
    "sweep": config.FIELDS,
    "tune": config.FIELDS,
    "deploy": undrift.deploy.settings.FLAGS,
    "report": config.FIELDS,
    "resume": config.FIELDS,
}
SMALL_FILES = {
    "run": {"clients": 4, "cohort": 2, "rounds": 1, "model": "logreg", "batch": 4},
    "dp": {"workers": 2, "rounds": 1, "steps": 1, "model": "logreg"},
    "pipe": {"rounds": 1, "steps": 1, "blocks": 2, "model": "mlp", "batch": 4},
}
RECORD_NAMES = (
    "round",
    "accuracy",
    "loss",
    "val_accuracy",
    "bytes_up",
    "dropped",
    "clients",
    "sites",
    "own_dice",
    "gamma",
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["test", "global", "dice", "loss", "unseen"]), inner)
    ),
    max_leaves=6,
)
records = st.fixed_dictionaries(
    {"round": st.integers(1, 9) | json_values},
    optional={n: st.floats(0, 1) | json_values for n in RECORD_NAMES if n != "round"},
)


def toml_of(settings: dict[str, Any]) -> bytes:
    try:
        return tomli_w.dumps(settings).encode()
    except (ValueError, TypeError):  # such as a lone surrogate
        return b"\xff"


@st.composite
def toml_files(draw: st.DrawFn) -> Case:
    """A file of settings with strange values, sometimes damaged, given to a command."""
    name = draw(
        st.sampled_from(
            ["run"] * 6 + ["dp"] * 3 + ["sweep"] * 6 + ["tune"] * 3 + ["deploy"] * 4 + ["resume", "pipe", "report"]
        )
    )
    settings: dict[str, Any] = dict(SMALL_FILES.get(name, SMALL_FILES["run"]))
    for _ in range(draw(st.integers(0, 4))):
        field = draw(st.sampled_from(sorted(FIELDS[name])) | st.sampled_from(OTHER_NAMES))
        settings[field] = draw(toml_values)
    if name in ("sweep", "tune") and draw(st.booleans()):
        keys = st.sampled_from(undrift.jobs.sweep.KEYS)
        settings["sweep"] = draw(st.dictionaries(keys, toml_values, max_size=3)) | {"seeds": [0]}
    if name == "report":
        settings.setdefault("algorithm", "fedavg")
    content = damage(draw, toml_of(settings)) if draw(st.integers(0, 3)) == 0 else toml_of(settings)
    lines = [json.dumps(record) for record in draw(st.lists(records, max_size=4))] if name == "report" else []
    figures = json.dumps(draw(json_values)) if name == "report" and draw(st.integers(0, 3)) == 0 else ""

    def case(folder: Path) -> None:
        (folder / "f.toml").write_bytes(content)
        if name in ("report", "resume"):
            (folder / "r").mkdir()
            (folder / "r" / "run.toml").write_bytes(content)
            (folder / "r" / "rounds.jsonl").write_text("\n".join(lines))
            if figures:
                (folder / "r" / "figures.json").write_text(figures)
        if name == "report":
            command("report", "r", "--out", "r.html")
        else:
            command(*{"sweep": ["sweep", "f.toml", "--out", "s"], "tune": ["tune", "f.toml", "--out", "t"],
                      "deploy": ["deploy", "init", "d", "--config", "f.toml"],
                      "resume": ["run", "--resume", "--out", "r"]}.get(name, [name, "f.toml", "--out", "o"]))  # fmt: skip

    return case


# ---- data files ----


def damage(draw: st.DrawFn, content: bytes) -> bytes:
    """Truncated, with changed, added or removed bytes, or something else entirely."""
    how = draw(st.sampled_from(["cut", "flip", "flip", "write", "insert", "remove", "empty", "other", "whole"]))
    share, near = draw(st.floats(0, 1)), draw(st.integers(0, 128))  # headers are at the beginning
    at = min(near if draw(st.booleans()) else int(share * len(content)), max(len(content) - 1, 0))
    if how == "cut":
        return content[:at]
    if how == "flip" and content:
        return content[:at] + bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) + content[at + 1 :]
    if how in ("write", "insert", "remove"):
        new = b"" if how == "remove" else draw(st.binary(min_size=1, max_size=8))
        return content[:at] + new + content[at + (0 if how == "insert" else draw(st.integers(1, 8))) :]
    return {"empty": b"", "other": draw(st.binary(max_size=64)), "whole": content}.get(how, content)


SHAPES = [
    (),
    (0,),
    (4,),
    (1,),
    (4, 1),
    (4, 4),
    (4, 0),
    (4, 3, 3),
    (4, 0, 0),
    (4, 4, 4, 1),
    (4, 4, 4, 3),
    (4, 0, 0, 3),
    (8, 8, 8, 3),
]
TYPES = [
    "u1",
    "i1",
    "i8",
    "u8",
    ">i4",
    "f4",
    "f2",
    "f8",
    ">f8",
    "g",
    "c8",
    "?",
    "S3",
    "U3",
    "M8[s]",
    "m8[s]",
    "V4",
    "i4,f4",
]


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...] | None = None, type: str | None = None) -> np.ndarray:
    """An array, often of the wanted shape and type."""
    if shape is None or draw(st.integers(0, 4)) == 0:
        shape = draw(st.sampled_from(SHAPES))
    if type is None or draw(st.integers(0, 4)) == 0:
        type = draw(st.sampled_from(TYPES))
    value = draw(st.sampled_from([0, 1, 1, 2, 255, -1]))
    try:
        filled = np.full(shape, value).astype(type)
    except (TypeError, ValueError, OverflowError):
        filled = np.zeros(shape, type)
    if filled.dtype.kind == "f" and filled.size and draw(st.integers(0, 3)) == 0:
        filled.flat[0] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return filled


def npz(**given: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **given)
    return file.getvalue()


def repack(archive: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """An .npz whose first array is changed within a whole .zip: its checksum is right, its header is not."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(file, "w") as new:
        for place, name in enumerate(old.namelist()):
            new.writestr(name, change(old.read(name)) if place == 0 else old.read(name))
    return file.getvalue()


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def picture(size: tuple[int, int], mode: str, ending: str) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, 1).save(file, ending)
    return file.getvalue()


def look_at(name: str, partition: str = "iid", clients: int = 2) -> None:
    """Load a data set and take a sample, as a run does at its start."""
    os.environ["UNDRIFT_DATA"] = "."
    try:
        data = federate(load_dataset(name), partition, clients, 0, CPU)
        data.transform(data.train.take(torch.zeros(1, dtype=torch.int64)), torch.float32)
    finally:
        del os.environ["UNDRIFT_DATA"]


@st.composite
def archives(draw: st.DrawFn, **wanted: tuple[tuple[int, ...], str]) -> bytes:
    held = {n: draw(arrays(*about)) for n, about in wanted.items() if draw(st.integers(0, 14))}
    content = npz(**held)
    how = draw(st.integers(0, 3))
    if how == 0 and held:
        return repack(content, lambda array: damage(draw, array))
    return damage(draw, content) if how == 1 else content


HALVES = {"x_train": ((8, 4, 4), "u1"), "y_train": ((8,), "i8"), "x_test": ((4, 4, 4), "u1"), "y_test": ((4,), "i8")}
SITE = {"x": ((8, 4, 4, 3), "u1"), "y": ((8, 4, 4), "u1"), "groups": ((8,), "i8"), "split": ((8,), "U3")}
PLAIN = {"x": ((8, 5), "f4"), "y": ((8,), "i8")}


def written(folder: Path, **files: bytes) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@st.composite
def npz_files(draw: st.DrawFn) -> Case:
    content = draw(archives(**HALVES))

    def case(folder: Path) -> None:
        written(folder, **{"mnist.npz": content})
        look_at("mnist")

    return case


@st.composite
def user_files(draw: st.DrawFn) -> Case:
    """A client's own file, as a node of a federation reads it, or as `undrift.run(data=...)` gets its arrays."""
    masks = draw(st.booleans())
    content = draw(archives(**(SITE if masks else PLAIN if draw(st.booleans()) else HALVES)))
    plan = undrift.deploy.settings.Plan.of({
        "dataset": "own", "clients": 1, "cohort": 1, "names": "c", "shape": draw(st.sampled_from(["5", "3,4,4", "1,4,4"])),
        **({"structures": "disc,cup"} if masks else {"classes": 3}),
    })  # fmt: skip

    def case(folder: Path) -> None:
        written(folder, **{"c.npz": content})
        site_federation(plan, "c", folder / "c.npz", CPU)

    return case


@st.composite
def site_archives(draw: st.DrawFn) -> Case:
    kind, damaged = draw(st.sampled_from(["retina", "prostate"])), draw(archives(**SITE))
    whole = npz(x=np.ones((8, 4, 4, 3), np.uint8), y=np.ones((8, 4, 4), np.uint8))
    options = draw(
        st.sampled_from(["(size=4)", "(size=8)", "(size=0)", "(size=-1)", "(size=4,split=-1)", "(size=4,without=1)"])
    )

    def case(folder: Path) -> None:
        written(folder, **{f"{kind}__a.npz": whole, f"{kind}__b.npz": damaged, f"{kind}__c.npz": whole})
        look_at(f"{kind}{options}", "sites", 3)

    return case


@st.composite
def site_folders(draw: st.DrawFn) -> Case:
    table = "name,group,split\n" + "".join(f"p{k},g{k},{('train', 'val', 'test')[k % 3]}\n" for k in range(6))
    files = {}
    for site in "ab":
        for k in range(6):
            files[f"retina__{site}__images__p{k}.png"] = picture((4, 4), "RGB", "PNG")
            files[f"retina__{site}__masks__p{k}.png"] = picture((4, 4), "L", "PNG")
    if draw(st.booleans()):
        files["retina__a__samples.csv"] = table.encode()
    spoilt = draw(st.sampled_from(sorted(files)))
    other = picture(draw(st.sampled_from([(4, 4), (1, 9)])), draw(st.sampled_from(["RGB", "L", "P", "RGBA", "1", "I", "CMYK"])),
                    draw(st.sampled_from(["TIFF"])))  # fmt: skip
    files[spoilt] = draw(st.sampled_from([damage(draw, files[spoilt]), other]))

    def case(folder: Path) -> None:
        written(folder, **files)
        look_at("retina(size=4)", "sites")

    return case


@st.composite
def idx_files(draw: st.DrawFn) -> Case:
    images, labels = idx(np.ones((8, 4, 4), np.uint8)), idx(np.ones(8, np.uint8))
    files = {f"mnist__{half}-{kind}-ubyte": content for half in ("train", "t10k")
             for kind, content in (("images-idx3", images), ("labels-idx1", labels))}  # fmt: skip
    spoilt = draw(st.sampled_from(sorted(files)))
    files[spoilt] = damage(draw, files[spoilt])
    if draw(st.booleans()):
        files[f"{spoilt}.gz"] = damage(draw, gzip.compress(files[spoilt]))

    def case(folder: Path) -> None:
        written(folder, **files)
        look_at("mnist")

    return case


@st.composite
def pickles(draw: st.DrawFn) -> Case:
    protocol = draw(st.sampled_from([0, 2, 4]))
    content = {
        b"data": draw(arrays((4, 3072), "u1")),
        b"labels": draw(st.just([1, 2, 3, 0]) | st.lists(json_values, max_size=4)),
    }
    batch = damage(draw, pickle.dumps(content, protocol))
    files = {f"cifar-10-batches-py__{n}": batch for n in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")}

    def case(folder: Path) -> None:
        written(folder, **files)
        look_at("cifar10")

    return case


@st.composite
def image_folders(draw: st.DrawFn) -> Case:
    files = {
        f"pictures__{half}__{name}__p.png": picture((4, 4), "RGB", "PNG") for half in ("train", "val") for name in "ab"
    }
    spoilt = draw(st.sampled_from(sorted(files)))
    files[spoilt] = draw(st.sampled_from([damage(draw, files[spoilt]), picture((1, 900), "L", "PNG")]))

    def case(folder: Path) -> None:
        written(folder, **files)
        look_at("imagefolder:pictures")

    return case


@st.composite
def tiny_imagenets(draw: st.DrawFn) -> Case:
    files = {"tiny-imagenet-200__wnids.txt": b"n1\nn2\n", "tiny-imagenet-200__val__val_annotations.txt": b"v.JPEG\tn1\t0\n",
             "tiny-imagenet-200__val__images__v.JPEG": picture((4, 4), "RGB", "JPEG"),
             "tiny-imagenet-200__train__n1__images__a.JPEG": picture((4, 4), "RGB", "JPEG"),
             "tiny-imagenet-200__train__n2__images__b.JPEG": picture((4, 4), "RGB", "JPEG")}  # fmt: skip
    spoilt = draw(st.sampled_from(sorted(files)))
    files[spoilt] = damage(draw, files[spoilt])

    def case(folder: Path) -> None:
        written(folder, **files)
        look_at("tiny-imagenet")

    return case


@functools.cache
def super_model() -> dict[str, bytes]:
    """The files of a finished personal run."""
    with tempfile.TemporaryDirectory() as folder:
        run = undrift.rounds(
            algorithm="fedsm", dataset="synthetic-sites(sites=2, size=16, patients=4)", model="unet(depth=1, width=4)",
            partition="sites", clients=2, cohort=2, rounds=1, steps=1, batch=2, out=folder,
        )  # fmt: skip
        assert len(list(run)) == 1  # a loop, which is not kept short: it comes to its end, and leaves its super model
        return {name: (Path(folder) / name).read_bytes() for name in SUPER}


@st.composite
def super_models(draw: st.DrawFn) -> Case:
    files = {f"m__{name}": content for name, content in super_model().items()} | {
        "in__p.png": picture((16, 16), "RGB", "PNG")
    }
    spoilt = draw(st.sampled_from(sorted(files)))
    files[spoilt] = damage(draw, files[spoilt])
    if draw(st.booleans()):
        facts = json.loads(super_model()[SUPER[1]])
        facts[draw(st.sampled_from(sorted(facts)))] = draw(json_values)
        files["m__super.json"] = json.dumps(facts).encode()

    def case(folder: Path) -> None:
        written(folder, **files)
        command("predict", "--super", "m", "--in", "in", "--out", "masks")

    return case


KINDS_OF_DATA = (
    npz_files, user_files, site_archives, site_folders, idx_files, pickles, image_folders, tiny_imagenets, super_models,
)  # fmt: skip


@st.composite
def data_files(draw: st.DrawFn) -> Case:
    """A file that a data set, a client or a super model is read from."""
    case: Case = draw(draw(st.sampled_from(KINDS_OF_DATA))())
    return case
