"""The scores of every site, of the clients' own models and of a site that was left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import undrift
from undrift.cli import main
from undrift.core.errors import BadSetting
from undrift.data.load import load_dataset


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


def test_each_clients_model_may_have_a_threshold_of_its_own() -> None:
    common: dict[str, Any] = dict(
        algorithm="fedsm", dataset="synthetic-sites(sites=3, patients=8, size=16)", model="unet(width=4, depth=1)",
        partition="sites", clients=3, cohort=3, epochs=2, batch=4, rounds=4, eval_every=4, device="cpu", execution="pool",
    )  # fmt: skip
    given = {"optimizer": "adam", "lr": 0.01, "selector_model": "picture-statistics", "selector_lr": 0.1}
    one, each = (undrift.run(set=given | {"thresholds": kind}, **common).records[-1] for kind in ("one", "each"))
    assert isinstance(one["gamma"], float) and len(each["gamma"]) == 3
    assert one["sites"]["test"]["global"] == each["sites"]["test"]["global"], "nothing else changes"
    assert each["val_own_dice"] >= one["val_own_dice"] - 1e-9, "what can be tuned apart is no worse where it is tuned"
    with pytest.raises(BadSetting, match="below 0 .tuned. with thresholds=each, not 0.5"):
        undrift.run(set=given | {"thresholds": "each", "gamma": 0.5}, **common)
