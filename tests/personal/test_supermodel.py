"""A super model predicts what the run scored; its pictures and figures."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import undrift
from tests.data.test_sites import write_site
from undrift.cli import main
from undrift.core.errors import BadData, BadRunFolder
from undrift.core.seals import read_sealed, write_sealed
from undrift.data.load import load_dataset
from undrift.jobs.folder import SUPER
from undrift.oracle.segmentation import dice_loss, dice_scores
from undrift.personal.figures import look
from undrift.report.document import document
from undrift.report.load import load
from undrift.report.page import html


def test_a_formula_in_a_name_is_text_in_the_table(trained: Path, tmp_path: Path) -> None:
    names = ("=1+1.png", "+x.png", "-x.png", "@x.png", "p.png")
    for name in names:
        Image.new("RGB", (16, 16)).save(tmp_path / name)
    assert main(["predict", "--super", str(trained), "--in", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    rows = list(csv.DictReader((tmp_path / "out/predictions.csv").read_text().splitlines()))
    assert {row["name"] for row in rows} == {"'=1+1.png", "'+x.png", "'-x.png", "'@x.png", "p.png"}
    assert all(float(row["confidence"]) >= 0 for row in rows)


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": 3},
        {"shape": []},
        {"sites": {}},
        {"clients": 9},
        {"mean": [1.0, 2.0]},
        {"gamma": None},
        {"gamma": [0.5]},
        {"model": 5},
    ],
)
def test_a_super_model_with_damaged_facts_is_refused(trained: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    for name in SUPER:
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    facts = read_sealed(tmp_path / SUPER[1])
    write_sealed(tmp_path / SUPER[1], facts | changed)
    with pytest.raises(BadRunFolder, match="damaged"):
        undrift.SuperModel.load(tmp_path)
    write_sealed(tmp_path / SUPER[1], facts | {"outputs": 5})
    with pytest.raises(BadRunFolder, match="do not fit"):
        undrift.SuperModel.load(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("super") / "run"
    undrift.run(
        algorithm="fedsm", dataset="synthetic-sites(sites=3, patients=8, size=16)", model="unet(width=4, depth=1, norm=batch)",
        partition="sites", clients=3, cohort=3, epochs=2, batch=4, rounds=8, eval_every=8, device="cpu", execution="pool",
        set={"optimizer": "adam", "lr": 0.01, "selector_model": "small-cnn(width=8)", "selector_lr": 0.05, "lam": 1.0}, out=out,
    )  # fmt: skip
    return out


def test_a_super_model_predicts_what_the_run_scored(trained: Path) -> None:
    records = [json.loads(line) for line in (trained / "rounds.jsonl").read_text().splitlines()]
    model, data = undrift.SuperModel.load(trained), load_dataset("synthetic-sites(sites=3, patients=8, size=16)")
    pictures, masks = np.asarray(data.x_test), torch.from_numpy(data.y_test.astype(np.int64))
    found = model.predict(pictures)
    sites = records[-1]["sites"]
    counts = np.zeros((3, 4), int)
    assert data.test_sites is not None
    np.add.at(counts, (data.test_sites, found.model), 1)
    assert counts.tolist() == sites["chosen"]["test"] and model.gamma == records[-1]["gamma"]

    def dice(found_masks: np.ndarray) -> list[float]:
        planes = torch.from_numpy(found_masks).unsqueeze(1) > torch.arange(2).view(1, -1, 1, 1)
        scores = dice_scores(planes.float() - 0.5, masks)[:, 0].numpy()  # a disc without its cup stays a disc
        return [float(scores[data.test_sites == k].mean()) for k in range(3)]

    assert dice(found.masks) == pytest.approx(sites["test"]["super"]["dice_disc"], abs=1e-5)
    always, never = model.predict(pictures, gamma=0.0), model.predict(pictures, gamma=1.0)
    assert (always.model > 0).all() and (never.model == 0).all()
    assert dice(never.masks) == pytest.approx(sites["test"]["global"]["dice_disc"], abs=1e-5)
    own = [model.predict(pictures, site=k + 1) for k in range(3)]
    assert [dice(own[k].masks)[k] for k in range(3)] == pytest.approx(sites["test"]["personal"]["dice_disc"], abs=1e-5)
    assert model.predict(pictures[0]).masks.shape == (1, 16, 16)
    with pytest.raises(BadData, match="resize"):
        model.predict(pictures[:, :8])


def test_a_super_model_has_a_threshold_for_each_client(trained: Path, tmp_path: Path, capsys: Any) -> None:
    for name in SUPER:
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    facts, pictures = (
        read_sealed(tmp_path / SUPER[1]),
        load_dataset("synthetic-sites(sites=3, patients=8, size=16)").x_test,
    )
    write_sealed(tmp_path / SUPER[1], facts | {"gamma": [0.0, 1.0, 0.0]})
    always = undrift.SuperModel.load(trained).predict(pictures, gamma=0.0).model
    found = undrift.SuperModel.load(tmp_path).predict(pictures).model
    assert found.tolist() == [0 if model == 2 else model for model in always] and 2 in always
    assert main(["predict", "--super", str(tmp_path), "--tune-gamma"]) == 0
    assert "(was 0, 1, 0)" in capsys.readouterr().out and len(read_sealed(tmp_path / SUPER[1])["gamma"]) == 3


def test_predict_writes_masks_overlays_and_a_table(trained: Path, tmp_path: Path, capsys: Any) -> None:
    write_site(tmp_path, "new", 3)
    assert main(["predict", "--super", str(trained), "--tune-gamma"]) == 0
    assert "validation samples" in capsys.readouterr().out
    out = tmp_path / "out"
    assert main(["predict", "--super", str(trained), "--in", str(tmp_path / "new" / "images"), "--out", str(out)]) == 0
    rows = list(csv.DictReader((out / "predictions.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == ["p0.png", "p1.png", "p2.png"]
    for row in rows:
        number = int(row["model"])
        assert row["site"] == ("global" if number == 0 else f"site {number}") and 0 < float(row["confidence"]) <= 1
    with Image.open(out / "p1_mask.png") as mask, Image.open(out / "p1_overlay.png") as drawn:
        assert mask.size == drawn.size == (20, 20) and set(np.unique(np.asarray(mask))) <= {0, 127, 254}
    assert main(["predict", "--super", str(tmp_path), "--in", "x", "--out", "y"]) == 2
    assert "holds no super model" in capsys.readouterr().err


def test_predict_loses_no_picture_and_takes_the_site_that_is_named(trained: Path, tmp_path: Path, capsys: Any) -> None:
    write_site(tmp_path, "new", 2)
    images, out = tmp_path / "new" / "images", tmp_path / "out"
    with Image.open(images / "p1.png") as picture:
        picture.save(images / "p1.jpg")
    command = ["predict", "--super", str(trained), "--in", str(images), "--out", str(out)]
    assert main([*command, "--site", "site 2"]) == 0
    assert sorted(p.name for p in out.glob("*_mask.png")) == ["p0_mask.png", "p1.jpg_mask.png", "p1.png_mask.png"]
    rows = list(csv.DictReader((out / "predictions.csv").read_text().splitlines()))
    assert [(row["model"], row["site"]) for row in rows] == [("2", "site 2")] * 3
    assert main([*command, "--site", "0"]) == 0
    assert "global" in (out / "predictions.csv").read_text()
    capsys.readouterr()
    assert main([*command, "--site", "sit 2"]) == 2
    assert "did you mean 'site 2'" in capsys.readouterr().err
    with pytest.raises(BadData, match="no pictures"):
        undrift.SuperModel.load(trained).predict(np.zeros((0, 16, 16, 3), np.uint8))


def test_figures_show_the_models_and_the_report_draws_them(trained: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["figures", str(trained)]) == 0
    found = json.loads((trained / "figures.json").read_text())
    model, data = undrift.SuperModel.load(trained), load_dataset("synthetic-sites(sites=3, patients=8, size=16)")
    assert data.test_sites is not None
    assert sorted(point[2] for point in found["map"]) == sorted(data.test_sites.tolist())
    assert np.isfinite(np.array(found["map"])).all()
    # In the middle of the surface is the model itself, in every direction; near it the loss differs.
    near = found["surface"]
    mine = data.test_sites == near["site"]
    pictures, masks = np.asarray(data.x_test)[mine], torch.from_numpy(data.y_test.astype(np.int64))[mine]
    for kind, module in (("global", model.models[0]), ("personal", model.models[near["site"] + 1])):
        losses = np.array(near["losses"][kind])
        with torch.no_grad():
            expected = float(dice_loss(module(model.inputs(pictures)), masks).mean())
        assert losses.shape == (10, 13) and losses[:, 6] == pytest.approx(expected, abs=1e-5)
        assert near["distance"][6] == 0 and (losses[:, 0] != losses[:, 6]).all()
    # The gallery's scores are those of the pictures it shows.
    for entry in found["gallery"]:
        mine = data.test_sites == entry["site"]
        said = model.predict(np.asarray(data.x_test)[mine])
        planes = torch.from_numpy(said.masks).unsqueeze(1) > torch.arange(2).view(1, -1, 1, 1)
        every = dice_scores(planes.float() - 0.5, torch.from_numpy(data.y_test.astype(np.int64))[mine])
        assert entry["dice"] in [pytest.approx(row.tolist()) for row in every]
        assert sorted(every.mean(1).tolist())[len(every) // 2] == pytest.approx(np.mean(entry["dice"]))
    page = html(load([trained]), None)
    assert page.count("data:image/png;base64,") == 3
    (drawn,) = document(load([trained]), None)["sections"][0]["drawings"]
    assert len(drawn["map"]) == len(found["map"]) and len(drawn["surface"]["losses"]) == len(near["losses"])
    (trained / "figures.json").unlink()
    assert "data:image" not in html(load([trained]), None)
    with pytest.raises(BadRunFolder, match="holds no super model"):
        look(tmp_path)
