"""Segmentation: Dice against counting by hand, masks that move with pictures, sites and their splits, readers, the U-Net."""

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
from undrift.cli import main
from undrift.core.errors import BadData, BadRunFolder, BadSetting, MissingData, UnknownName
from undrift.data import prostate, retina, synthetic_sites
from undrift.data._sites import Site, dataset_of_sites, split_of
from undrift.data.augment import Transform
from undrift.data.federation import federate, hold_out_own
from undrift.data.load import load_dataset
from undrift.data.partition import Dealt
from undrift.models import small_cnn, unet
from undrift.oracle.segmentation import dice_loss, dice_scores, metrics
from undrift.personal.figures import look
from undrift.report import sites
from undrift.report.load import by_task, grouped, load
from undrift.report.page import html

CPU = torch.device("cpu")


def test_dice_is_what_counting_gives() -> None:
    random = np.random.default_rng(0)
    outputs, masks = random.normal(size=(5, 2, 6, 7)), random.integers(0, 3, (5, 6, 7))
    masks[3] = 0
    outputs[3] = -1  # nothing there, nothing found
    masks[4] = 0
    expected, losses = np.zeros((5, 2)), np.zeros((5, 2))
    for n in range(5):
        for c in range(2):
            found = {(i, j) for i in range(6) for j in range(7) if outputs[n, c, i, j] > 0}
            true = {(i, j) for i in range(6) for j in range(7) if masks[n, i, j] > c}
            expected[n, c] = 1.0 if not found | true else 2 * len(found & true) / (len(found) + len(true))
            p = 1 / (1 + np.exp(-outputs[n, c]))
            losses[n, c] = 1 - (2 * p[masks[n] > c].sum() + 1e-5) / (p.sum() + (masks[n] > c).sum() + 1e-5)
    given = torch.from_numpy(outputs), torch.from_numpy(masks)
    torch.testing.assert_close(dice_scores(*given).double(), torch.from_numpy(expected), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dice_loss(*given), torch.from_numpy(losses.mean(1)), rtol=1e-12, atol=1e-12)
    named = metrics(("disc", "cup"))
    torch.testing.assert_close(named["dice_cup"](*given), dice_scores(*given)[:, 1])
    torch.testing.assert_close(named["dice"](*given), dice_scores(*given).mean(1))
    assert float(dice_scores(*given)[3].sum()) == 2.0 and float(dice_scores(*given)[4].sum()) == 0.0


def test_masks_move_with_their_pictures() -> None:
    random = np.random.default_rng(0)
    masks = torch.from_numpy(random.integers(0, 3, (20, 8, 8)))
    pictures = (masks * 80).to(torch.uint8).unsqueeze(1)
    keys = torch.arange(20)
    transform = Transform(crop=2, flip=True)
    moved = transform(pictures, torch.float32, keys) * 255 / 80
    assert torch.equal(moved.squeeze(1).round().long(), transform.masks(masks, keys))
    assert not torch.equal(transform.masks(masks, keys), masks)


def test_groups_never_cross_a_split() -> None:
    groups = np.repeat(np.arange(40), 3)
    for seed in range(5):
        split = split_of(groups, seed)
        assert all(len(set(split[groups == g])) == 1 for g in range(40))
        assert [int((split == s).sum()) for s in ("train", "val", "test")] == [60, 30, 30]
    assert not np.array_equal(split_of(groups, 0), split_of(groups, 1))


def test_a_site_may_say_its_split_and_must_keep_groups_together() -> None:
    images = np.zeros((4, 8, 8, 3), np.uint8)
    split = np.array(["train", "train", "val", "test"])
    sites = [Site(name, images, images[..., 0], np.arange(4), split) for name in "ab"]
    data = dataset_of_sites("x", sites, ("disc",), 0)
    assert (len(data.y_train), len(data.y_test)) == (6, 2) and data.validation is not None
    assert data.validation.tolist() == [2, 5] and data.test_sites is not None and data.test_sites.tolist() == [0, 1]
    with pytest.raises(BadData, match="both"):
        dataset_of_sites("x", [Site("a", images, images[..., 0], np.zeros(4), split), sites[1]], ("disc",), 0)
    with pytest.raises(BadData, match="go up to"):
        dataset_of_sites("x", [Site("a", images, images[..., 0] + 2), sites[1]], ("disc",), 0)


def test_synthetic_sites_are_seeded_and_can_be_made_alike() -> None:
    a, b = (synthetic_sites.load(None, sites=3, patients=8, size=16) for _ in range(2))
    assert np.array_equal(a.x_train[np.arange(10)], b.x_train[np.arange(10)]) and a.structures == ("disc", "cup")
    assert set(np.unique(a.y_train)) == {0, 1, 2} and a.sites is not None

    def colours(shift: float) -> np.ndarray:
        data = synthetic_sites.load(None, sites=3, patients=20, size=16, shift=shift)
        assert data.sites is not None and isinstance(data.x_train, np.ndarray)
        return np.stack([data.x_train[data.sites == k].mean((0, 1, 2)) for k in range(3)])

    assert np.ptp(colours(0.0), 0).max() < 5 < np.ptp(colours(1.0), 0).max()
    with pytest.raises(BadSetting):
        synthetic_sites.load(None, sites=1)


def test_sites_become_clients_with_their_own_held_out_samples() -> None:
    data = load_dataset("synthetic-sites(sites=3, patients=8, size=16)")
    fed = federate(data, "sites", 3, 0, CPU)
    assert fed.sizes.tolist() == [8, 8, 8] and fed.masks
    for name, own in fed.own.items():
        assert [int((own.owners == k).sum()) for k in range(3)] == [4, 4, 4], name
    train = set(fed.members.tolist())
    assert not train & set(fed.own["val"].rows.tolist())
    with pytest.raises(BadSetting, match="validation split of its own"):
        federate(data, "sites", 3, 0, CPU, val_fraction=0.1)


def test_own_test_holds_out_a_share_of_every_client() -> None:
    kept, held = hold_out_own(Dealt(np.arange(30), np.array([2, 8, 20])), 0.25)
    assert held.sizes.tolist() == [1, 2, 5] and kept.sizes.tolist() == [1, 6, 15]
    assert sorted([*kept.members, *held.members]) == list(range(30))
    with pytest.raises(BadSetting, match="two samples"):
        hold_out_own(Dealt(np.arange(3), np.array([1, 2])), 0.5)
    fed = federate(load_dataset("digits"), "dirichlet:0.1", 10, 0, CPU, own_test=0.2)
    assert not set(fed.members.tolist()) & set(fed.own["test"].rows.tolist())


def write_site(folder: Path, name: str, samples: int, groups: list[str] | None = None) -> None:
    (folder / name / "images").mkdir(parents=True)
    (folder / name / "masks").mkdir()
    for n in range(samples):
        mask = np.zeros((20, 20), np.uint8)
        mask[5:15, 5:15], mask[8:12, 8:12] = 128, 255
        Image.fromarray(np.full((20, 20, 3), 10 * n, np.uint8)).save(folder / name / "images" / f"p{n}.png")
        Image.fromarray(mask).save(folder / name / "masks" / f"p{n}.png")
    if groups:
        with (folder / name / "samples.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["name", "group"], *([f"p{n}", g] for n, g in enumerate(groups))])


def test_retina_reads_archives_and_folders(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="synthetic-sites"):
        retina.load(tmp_path)
    write_site(tmp_path / "retina", "b", 8, [f"p{n // 2}" for n in range(8)])
    x = np.random.default_rng(0).integers(0, 255, (8, 16, 16, 3)).astype(np.uint8)
    y = np.zeros((8, 16, 16), np.uint8)
    y[:, 4:12, 4:12] = 1
    np.savez(tmp_path / "retina" / "a.npz", x=x, y=y, groups=np.array([f"R{n // 2}O{'DS'[n % 2]}" for n in range(8)]))
    data = retina.load(tmp_path, size=16)
    assert data.site_names == ("a", "b") and data.x_train.shape == (12, 16, 16, 3) and data.crop == 1
    assert data.sites is not None and data.validation is not None and set(np.unique(data.y_train)) == {0, 1, 2}
    assert [int((data.sites == k).sum()) for k in range(2)] == [6, 6] and len(data.validation) == 4
    again = retina.load(tmp_path, size=16, split=0)
    assert np.array_equal(data.y_test, again.y_test)
    (tmp_path / "retina" / "b" / "masks" / "p3.png").unlink()
    with pytest.raises(BadData, match="p3 has no picture or no mask"):
        retina.load(tmp_path, size=16)


def test_archives_are_brought_to_the_size_that_is_asked_for(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x, y = random.integers(0, 255, (8, 32, 32, 3)).astype(np.uint8), random.integers(0, 3, (8, 32, 32))
    (tmp_path / "retina").mkdir()
    for name in "ab":
        np.savez(
            tmp_path / "retina" / f"{name}.npz",
            x=x,
            y=y,
            split=np.array(["train"] * 4 + ["val", "val", "test", "test"]),
        )
    data = retina.load(tmp_path, size=16)
    assert data.x_train.shape == (12, 16, 16, 3) and data.y_train.shape == (12, 16, 16)
    means = x[6:].reshape(2, 16, 2, 16, 2, 3).mean((2, 4))
    assert np.abs(np.asarray(data.x_test[np.arange(2)]) - means).max() <= 1, "pixels are mixed"
    assert set(np.unique(data.y_test)) == {0, 1, 2}, "but not the numbers of masks"
    assert np.array_equal(data.y_test[0], y[6, 1::2, 1::2])


def test_given_splits_are_whole_and_grey_masks_serve(tmp_path: Path) -> None:
    write_site(tmp_path / "retina", "a", 8)
    write_site(tmp_path / "retina", "b", 8)
    table = tmp_path / "retina" / "a" / "samples.csv"
    parts = ["train", "train", "val", "val", "test", "test", "test", "test"]
    table.write_text("name,split\n" + "".join(f"p{n},{part}\n" for n, part in enumerate(parts)))
    data = retina.load(tmp_path, size=16)
    assert data.test_sites is not None and (data.test_sites == 0).sum() == 4
    table.write_text(table.read_text().replace("p3,val", "p3,"))
    with pytest.raises(BadData, match="no split for p3"):
        retina.load(tmp_path, size=16)
    table.unlink()
    grey = np.zeros((8, 16, 16), np.uint8)
    grey[:, 4:12, 4:12], grey[:, 6:10, 6:10] = 128, 255
    np.savez(tmp_path / "retina" / "c.npz", x=np.zeros((8, 16, 16, 3), np.uint8), y=grey)
    assert set(np.unique(retina.load(tmp_path, size=16).y_test)) == {0, 1, 2}


def test_retina_in_parts_and_prostate(tmp_path: Path) -> None:
    write_site(tmp_path / "retina", "a", 16)
    write_site(tmp_path / "retina", "b", 16)
    data = retina.load(tmp_path, size=16, parts=2)
    assert data.site_names == ("a 1", "a 2", "b 1", "b 2")
    write_site(tmp_path / "prostate", "a", 8)
    write_site(tmp_path / "prostate", "b", 8)
    data = prostate.load(tmp_path, size=16)
    assert data.structures == ("prostate",) and set(np.unique(data.y_train)) == {0, 1}


@pytest.mark.parametrize("norm", ["group", "batch", "instance", "none"])
def test_unet(norm: str) -> None:
    torch.manual_seed(0)
    net = unet.build((3, 16, 24), 2, width=4, depth=2, norm=norm)
    assert net(torch.rand(2, 3, 16, 24)).shape == (2, 2, 16, 24)
    deeper = unet.build((3, 16, 24), 2, width=4, depth=3, norm=norm)
    count = [sum(p.numel() for p in m.parameters()) for m in (net, deeper)]
    assert count[1] > 2 * count[0]
    x = torch.rand(1, 3, 16, 24, requires_grad=True)
    net(x)[0, :, 6:10, 10:14].sum().backward()
    assert (
        x.grad is not None and (x.grad[0, :, 6:10, 10:14].abs() > 1e-6).any()
    )  # the way across reaches the pixel itself


def test_bad_options_are_refused() -> None:
    with pytest.raises(BadSetting, match="multiples of 8"):
        unet.build((3, 20, 20), 2, depth=3)
    with pytest.raises(UnknownName, match="batch"):
        unet.build((3, 16, 16), 2, norm="bach")
    with pytest.raises(UnknownName, match="patients"):
        load_dataset("synthetic-sites(patient=8)")
    with pytest.raises(BadSetting, match="bracket"):
        load_dataset("synthetic-sites(patients=8")
    with pytest.raises(BadSetting, match="no options"):
        load_dataset("digits(size=8)")
    assert small_cnn.build((3, 20, 20), 6)(torch.rand(2, 3, 20, 20)).shape == (2, 6)


@pytest.mark.parametrize("name", ["fedsm", "fedsm-extra", "ensemble"])
def test_a_run_scores_every_site(name: str) -> None:
    result = undrift.run(
        algorithm=name, dataset="synthetic-sites(sites=3, patients=8, size=16)", model="unet(width=4, depth=1)",
        partition="sites", clients=3, cohort=3, epochs=1, batch=8, rounds=3, eval_every=3, device="cpu", execution="pool",
        set={"optimizer": "adam", "lr": 0.01, "selector_model": "small-cnn(width=4)", "begin": 1},
    )  # fmt: skip
    last = result.records[-1]
    sites = last["sites"]
    for split in ("test", "val"):
        assert set(sites[split]) == {"global", "personal", "super"}
        assert all(len(scores["dice"]) == 3 for scores in sites[split].values())
        assert np.array(sites["chosen"][split]).sum(1).tolist() == [4, 4, 4]
    assert last["own_dice"] == pytest.approx(np.mean(sites["test"]["super"]["dice"]))
    assert last["dice"] == pytest.approx(np.mean(sites["test"]["global"]["dice"]))  # sites of one size
    assert np.array(sites["crossed"]["dice"]).shape == (3, 3)
    assert [sites["crossed"]["dice"][k][k] for k in range(3)] == pytest.approx(sites["test"]["personal"]["dice"])


@pytest.mark.parametrize("name", ["fedsm-extra", "ensemble"])
def test_before_the_selector_learns_the_servers_model_serves(name: str) -> None:
    result = undrift.run(
        algorithm=name, dataset="synthetic-sites(sites=3, patients=8, size=16)", model="unet(width=4, depth=1)",
        partition="sites", clients=3, cohort=3, epochs=1, batch=8, rounds=3, eval_every=1, device="cpu", execution="pool",
        set={"optimizer": "adam", "lr": 0.01, "selector_model": "small-cnn(width=4)", "selector_lr": 0.0, "begin": 2},
    )  # fmt: skip
    for record in result.records[:2]:
        sites = record["sites"]
        assert sites["test"]["super"] == sites["test"]["global"] != sites["test"]["personal"]
        assert sites["chosen"]["test"] == [[4, 0, 0, 0]] * 3
    sites = result.records[2]["sites"]
    assert sites["test"]["super"] != sites["test"]["global"], "an untrained selector is used from then on"
    assert all("gamma" not in record for record in result.records), "they have no threshold"


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


def test_what_was_perhaps_not_meant_is_said(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "c.toml").write_text(
        'clients = 10\ncohort = 10\nrounds = 1\nsteps = 1\npartition = "iid"\nmodel = "logreg"\n'
    )
    common = [str(tmp_path / "c.toml"), "--algorithm"]
    assert main(["run", *common, "ft", "--out", str(tmp_path / "a")]) == 0
    assert "after round 90, which was not reached" in capsys.readouterr().out
    assert main(["run", *common, "softpull", "--set", "lam=0.05", "--out", str(tmp_path / "b")]) == 0
    assert "lam 0.05 is below 1/S = 0.1" in capsys.readouterr().out
    fedsm = [*common, "fedsm", "--set", "selector_model=logreg", "--own-test", "0.2"]
    assert main(["run", *fedsm, "--set", "lam=0.05", "--out", str(tmp_path / "d")]) == 0
    assert "lam 0.05 is below" in capsys.readouterr().out
    assert main(["run", *fedsm, "--set", "personal=ft", "--out", str(tmp_path / "e")]) == 0
    assert capsys.readouterr().out.count("note") == 1
    assert main(["run", *common, "softpull", "--out", str(tmp_path / "c")]) == 0
    assert "note" not in capsys.readouterr().out


def test_a_site_can_be_left_out_and_tested_as_unseen() -> None:
    spec = "synthetic-sites(sites=3, patients=8, without=2, size=16)"
    whole, data = load_dataset("synthetic-sites(sites=3, patients=8, size=16)"), load_dataset(spec)
    assert data.site_names == ("site 1", "site 3") and data.unseen is not None and whole.test_sites is not None
    assert np.array_equal(data.unseen[1], whole.y_test[whole.test_sites == 1])
    result = undrift.run(
        algorithm="fedsm", dataset=spec, model="unet(width=4, depth=1)", partition="sites", clients=2, cohort=2, epochs=1,
        batch=8, rounds=2, eval_every=2, device="cpu", execution="pool",
        set={"optimizer": "adam", "lr": 0.01, "selector_model": "small-cnn(width=4)", "gamma": 0.0},
    )  # fmt: skip
    last = result.records[-1]
    assert set(last["sites"]["unseen"]) == {"global", "super"} and "unseen_own_dice" in last
    assert sum(last["sites"]["chosen"]["unseen"][0]) == 4 and last["sites"]["chosen"]["unseen"][0][0] == 0
    with pytest.raises(BadSetting, match="from 1 to 3"):
        load_dataset("synthetic-sites(sites=3, patients=8, without=4)")
    with pytest.raises(BadSetting, match="no sites"):
        load_dataset("digits(without=1)")
    free, best = (last["sites"]["unseen_thresholds"][which] for which in ("none", "best"))
    assert free["gamma"] == 0 and free["chosen"] == last["sites"]["chosen"]["unseen"][0]
    assert free["scores"]["dice"] == pytest.approx(last["sites"]["unseen"]["super"]["dice"][0])
    assert best["scores"]["dice"] >= max(free["scores"]["dice"], last["sites"]["unseen"]["global"]["dice"][0]) - 1e-6


def test_the_report_shows_every_site(tmp_path: Path) -> None:
    common: dict[str, Any] = dict(
        dataset="synthetic-sites(sites=3, patients=8, size=16, without=1)", model="unet(width=4, depth=1)", partition="sites",
        clients=2, cohort=2, epochs=1, batch=8, rounds=1, device="cpu", execution="pool",
    )  # fmt: skip
    undrift.run(algorithm="local", out=tmp_path / "local", **common)
    undrift.run(algorithm="fedsm", out=tmp_path / "fedsm", set={"selector_model": "small-cnn(width=4)"}, **common)
    page = html(load([tmp_path]), None)
    for words in ("Sites: dice", "Sites: dice_cup", "Every model on every site", "Chosen models", "The unseen site"):
        assert words in page
    assert "client average" in page and "The threshold on the unseen site: fedsm" in page and "Unseen sites" not in page
    (table,) = (part for part in sites.tables(grouped(load([tmp_path]))) if part.title == "Sites: dice")
    assert table.rows[0][3:5] == ["site 2", "site 3"] and table.rows[1][0].startswith("local")
    record = json.loads((tmp_path / "fedsm" / "rounds.jsonl").read_text())
    (row,) = (row for row in table.rows if row[0].startswith("fedsm") and row[1:3] == ["super", "last"])
    assert row[3:6] == [f"{v:.4f}" for v in (*record["sites"]["test"]["super"]["dice"], record["own_dice"])]


def test_the_report_puts_left_out_sites_side_by_side(tmp_path: Path) -> None:
    found = {}
    for site in (1, 2):
        for name in ("fedavg", "fedsm"):
            result = undrift.run(
                algorithm=name, dataset=f"synthetic-sites(sites=3, patients=8, size=16, without={site})",
                model="unet(width=4, depth=1)",
                partition="sites", clients=2, cohort=2, epochs=1, batch=8, rounds=1, device="cpu", execution="pool",
                out=tmp_path / f"{name}{site}",
            )  # fmt: skip
            unseen = result.records[-1]["sites"]["unseen"]
            found[name, site] = unseen["super" if name == "fedsm" else "global"]["dice"][0]
    (tmp_path / "fedavg3").mkdir()  # a run that was ended before its first evaluation
    settings = (tmp_path / "fedavg2" / "run.toml").read_text().replace("seed = 0", "seed = 1")
    (tmp_path / "fedavg3" / "run.toml").write_text(settings)
    (tmp_path / "fedavg3" / "rounds.jsonl").write_text("")
    part = sites.everywhere_unseen(by_task(grouped(load([tmp_path]))))
    assert part is not None and "Unseen sites" in html(load([tmp_path]), None)
    for name in ("fedavg", "fedsm"):
        values = found[name, 1], found[name, 2]
        assert [name, *(f"{v:.4f}" for v in (*values, sum(values) / 2))] in part.rows


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
    assert page.count("data:image/png;base64,") == 3 and "t-SNE" in page and "Loss near the models" in page
    (trained / "figures.json").unlink()
    assert "data:image" not in html(load([trained]), None)
    with pytest.raises(BadRunFolder, match="holds no super model"):
        look(tmp_path)
