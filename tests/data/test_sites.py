"""Sites: splits that keep groups together, and the readers."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from undrift.core.errors import BadData, BadSetting, MissingData, UnknownName
from undrift.data import imagefolder, prostate, retina, synthetic_sites
from undrift.data._site_files import read_folder_site
from undrift.data._sites import Site, check, dataset_of_sites, draw_split
from undrift.data._user_file import read_user_file
from undrift.data.federation import federate, hold_out
from undrift.data.load import load_dataset
from undrift.data.partition import Holdings
from undrift.models import picture_statistics, small_cnn, unet

CPU = torch.device("cpu")


def test_groups_never_cross_a_split() -> None:
    groups = np.repeat(np.arange(40), 3)
    for seed in range(5):
        split = draw_split(groups, seed)
        assert all(len(set(split[groups == g])) == 1 for g in range(40))
        assert [int((split == s).sum()) for s in ("train", "val", "test")] == [60, 30, 30]
    assert not np.array_equal(draw_split(groups, 0), draw_split(groups, 1))


def test_a_site_may_say_its_split_and_must_keep_groups_together() -> None:
    images = np.zeros((4, 8, 8, 3), np.uint8)
    split = np.array(["train", "train", "val", "test"])
    sites = [Site(name, images, images[..., 0], np.arange(4), split) for name in "ab"]
    data = dataset_of_sites("x", sites, ("disc",), 0)
    assert (len(data.y_train), len(data.y_test)) == (6, 2) and data.validation is not None
    assert data.validation.tolist() == [2, 5] and data.test_sites is not None and data.test_sites.tolist() == [0, 1]
    with pytest.raises(BadData, match="both"):
        dataset_of_sites("x", [Site("a", images, images[..., 0], np.zeros(4), split), sites[1]], ("disc",), 0)
    with pytest.raises(BadData, match="go from 2 to 2"):
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
    for name, own in fed.held_out.items():
        assert [int((own.owners == k).sum()) for k in range(3)] == [4, 4, 4], name
    train = set(fed.members.tolist())
    assert not train & set(fed.held_out["val"].rows.tolist())
    with pytest.raises(BadSetting, match="validation split of its own"):
        federate(data, "sites", 3, 0, CPU, val_fraction=0.1)


def test_own_test_holds_out_a_share_of_every_client() -> None:
    kept, held = hold_out(Holdings(np.arange(30), np.array([2, 8, 20])), 0.25)
    assert held.sizes.tolist() == [1, 2, 5] and kept.sizes.tolist() == [1, 6, 15]
    assert sorted([*kept.members, *held.members]) == list(range(30))
    with pytest.raises(BadSetting, match="two samples"):
        hold_out(Holdings(np.arange(3), np.array([1, 2])), 0.5)
    fed = federate(load_dataset("digits"), "dirichlet:0.1", 10, 0, CPU, own_test=0.2)
    assert not set(fed.members.tolist()) & set(fed.held_out["test"].rows.tolist())


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


def test_no_sample_of_a_site_is_lost_or_put_elsewhere_in_silence(tmp_path: Path) -> None:
    """A split with another word, two pictures of one name, two rows of one picture."""
    x, y = np.zeros((8, 16, 16, 3), np.uint8), np.zeros((8, 16, 16), np.uint8)
    split = np.array(["train"] * 4 + ["val", "val", "test", "Test"])
    site = Site("a", x, y, None, split)
    with pytest.raises(BadData, match="site a: the split of 1 samples is 'Test'; give train, val or test"):
        check(site, 2)
    check(replace(site, split=np.char.lower(split)), 2)
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(8) % 3, split=split)
    with pytest.raises(BadData, match="the split of 1 samples is 'Test'"):
        read_user_file(tmp_path / "own.npz", False)
    write_site(tmp_path, "b", 3, ["p", "q", "r"])
    with (tmp_path / "b/samples.csv").open("a") as file:
        file.write("p1,other\n")
    with pytest.raises(BadData, match="several rows for 'p1'"):
        read_folder_site(tmp_path / "b", 16, 2)
    (tmp_path / "b/samples.csv").unlink()
    Image.fromarray(x[0]).save(tmp_path / "b/images/p1.bmp")
    with pytest.raises(BadData, match="both p1.bmp and p1.png"):
        read_folder_site(tmp_path / "b", 16, 2)


def test_a_class_whose_pictures_are_not_read_is_refused(tmp_path: Path) -> None:
    for name, file in (("cats", "a.png"), ("dogs", "b.heic")):
        for half in ("train", "val"):
            (tmp_path / half / name).mkdir(parents=True)
            Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / half / name / file, format="PNG")
    with pytest.raises(BadData, match="dogs: no pictures"):
        imagefolder.load(None, str(tmp_path))


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


def test_statistics_of_pictures_tell_colours_and_edges_and_no_places() -> None:
    model = picture_statistics.build((2, 12, 10), 3)
    x = torch.rand(4, 2, 12, 10, dtype=torch.float32)
    found = model.statistics(x)
    values = x[0].flatten(1)
    assert found.shape == (4, 18) and model(x).shape == (4, 3)
    torch.testing.assert_close(found[0, :2], values.mean(1))
    torch.testing.assert_close(found[0, 2:4], (values.std(1, correction=0) + 1e-3).log())
    torch.testing.assert_close(found[0, 4:6], (x[0].diff(dim=2).abs().mean((1, 2)) + 1e-3).log())
    torch.testing.assert_close(found[0, 6:8], (x[0].diff(dim=1).abs().mean((1, 2)) + 1e-3).log())
    ordered = values.sort().values
    torch.testing.assert_close(found[0, 8:13], ordered[0, [0, 12, 60, 107, 119]])
    torch.testing.assert_close(found, model.statistics(x.flip(2).flip(3)))  # places do not count
    assert torch.isfinite(model.statistics(torch.zeros(1, 2, 12, 10))).all()
