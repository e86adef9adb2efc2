"""Heart disease and breast cancer: tables in the published form are read exactly, and others are refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from undrift.core.errors import BadData, BadSetting, MissingData
from undrift.data import brca, heart, synthetic_patients

SIZES = {"cleveland": (199, 104), "hungarian": (172, 89), "switzerland": (30, 16), "va": (85, 45)}  # FLamby's


def write_heart(root: Path, header: bool = False) -> dict[str, np.ndarray]:
    """Drawn tables in the form of the UCI's; the columns that are not used have holes, and so have rows that do not count."""
    random, tables = np.random.default_rng(0), {}
    (root / "heart").mkdir()
    for name, n in heart.COMPLETE.items():
        rows = random.integers(0, 9, (n, 14)).astype(float)
        rows[:, 2], rows[:, 6] = random.integers(1, 5, n), random.integers(0, 3, n)
        lines = [",".join([*map(str, row[:10]), "?", "", "3", str(int(row[13]))]) for row in rows]
        lines.insert(3, ",".join(["?"] * 13) + ",0")
        lines.insert(5, "1,1," + " , " * 11 + "0")
        top = ["age," + ",".join(f"c{k}" for k in range(13))] if header else []
        (root / "heart" / f"processed.{name}.data").write_text("\n".join(top + lines) + "\n")
        tables[name] = rows
    return tables


@pytest.mark.parametrize("header", [False, True])
def test_heart_is_prepared_as_flamby_does(header: bool, tmp_path: Path) -> None:
    tables, data = write_heart(tmp_path, header), heart.load(tmp_path)
    assert data.sites is not None and data.test_sites is not None and data.unseen is not None
    sizes = [(int((data.sites == k).sum()), int((data.test_sites == k).sum())) for k in range(4)]
    assert dict(zip(heart.HOSPITALS, sizes, strict=True)) == SIZES
    pooled = heart.load(tmp_path, train="pooled")
    for k, (name, rows) in enumerate(tables.items()):
        tested = np.isin(np.arange(len(rows)), [int(n) for n in heart.TESTED[name].split()])
        assert (np.asarray(data.y_train)[data.sites == k] == (rows[~tested, 13] > 0)).all()
        x = np.asarray(data.x_train)[data.sites == k]
        columns = [*(rows[:, c] for c in (0, 1, 3, 4, 5, 7, 8, 9)), *(rows[:, 2] == v for v in (2, 3, 4))]
        plain = np.stack([*columns, *(rows[:, 6] == v for v in (1, 2))], 1).astype(float)
        mean, std = plain[~tested].mean(0), plain[~tested].std(0, ddof=1)
        np.testing.assert_allclose(x, (plain[~tested] - mean) / std, rtol=1e-5, atol=1e-5)
        x_test = np.asarray(data.x_test)[data.test_sites == k]
        np.testing.assert_allclose(x_test, (plain[tested] - mean) / std, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(pooled.x_train).mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(np.asarray(pooled.x_train).std(0, ddof=1), 1, atol=1e-5)
    assert (np.asarray(pooled.x_test) == np.asarray(data.x_test)).all()
    assert (np.asarray(pooled.unseen[0]) == np.asarray(data.unseen[0])).all()  # type: ignore[index]


def test_bad_tables_of_hearts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"heart was not found.*UNDRIFT_DATA.*processed\.va\.data"):
        heart.load(None)
    write_heart(tmp_path)
    with pytest.raises(BadSetting, match="train must be site or pooled, not 'all'"):
        heart.load(tmp_path, train="all")
    file = tmp_path / "heart" / "processed.va.data"
    lines = file.read_text().splitlines()
    for changed, said in (
        (lines[1:], "has 129 complete rows instead of 130"),
        (["a" + lines[0], *lines[1:]], "expected numbers"),
        (["inf" + lines[0][3:], *lines[1:]], "not finite"),
        ([lines[0] + ",1", *lines[1:]], "row 1 has 15 columns instead of 14"),
    ):
        file.write_text("\n".join(changed))
        with pytest.raises(BadData, match=said):
            heart.load(tmp_path)


def write_brca(root: Path) -> None:
    random = np.random.default_rng(0)
    (root / "brca").mkdir()
    lines = ["pid," + ",".join(f"c{k}" for k in range(41))]
    folds = ["pid,fold,fold2"]
    for n in range(24):
        target = [str(float(n % 2)), str(100.0 + n)]
        lines.append(",".join([f"P{n}", *map(str, random.integers(0, 2, 39)), *target]))
        half = "test" if n % 4 == 3 else "train"
        folds += [f"P{n},{half},{half}_{n // 4}"] if n != 5 else []  # one patient is in no fold
    (root / "brca" / "brca.csv").write_text("\n".join(lines))
    (root / "brca" / "train_test_split.csv").write_text("\n".join(folds))


def test_brca_is_split_as_its_file_says(tmp_path: Path) -> None:
    write_brca(tmp_path)
    data = brca.load(tmp_path)
    assert data.sites is not None and data.test_sites is not None
    assert data.sites.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert data.test_sites.tolist() == [0, 1, 2, 3, 4, 5]
    assert np.asarray(data.x_train).shape == (17, 39) and data.task == "survival"
    assert np.asarray(data.y_test)[:, 1].tolist() == [103, 107, 111, 115, 119, 123]
    with pytest.raises(MissingData, match=r"brca was not found.*brca\.csv"):
        brca.load(tmp_path / "brca")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("P3,test,test_0", "P3,test,test_9", "'test_9'"), ("P3,test,test_0", "Q3,test,test_0", "of whom 22 are in brca")],
)
def test_bad_folds_are_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    write_brca(tmp_path)
    file = tmp_path / "brca" / "train_test_split.csv"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(BadData, match=said):
        brca.load(tmp_path)


def test_drawn_patients_are_seeded_and_hospitals_differ() -> None:
    one, again, other = (synthetic_patients.load(None, seed=s) for s in (0, 0, 1))
    assert (np.asarray(one.x_train) == np.asarray(again.x_train)).all()
    assert np.asarray(other.x_train).shape != np.asarray(one.x_train).shape or other.x_train is not one.x_train
    more = synthetic_patients.load(None, sites=6, task="survival")
    assert more.sites is not None and len(set(more.sites.tolist())) == 6 and np.asarray(more.y_train).shape[1] == 2
    assert set(np.asarray(more.y_train)[:, 0].tolist()) == {0.0, 1.0}
    for wrong in ({"sites": 1}, {"task": "cox"}, {"patients": 2}):
        with pytest.raises(BadSetting, match="synthetic-patients needs"):
            synthetic_patients.load(None, **wrong)  # type: ignore[arg-type]
