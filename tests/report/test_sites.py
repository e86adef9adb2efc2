"""The report shows every site, and left-out sites side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import undrift
from tests.small import write_run
from undrift.core.run_files import read_settings
from undrift.report import sites
from undrift.report.load import by_task, group_runs, load
from undrift.report.page import html


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
    (table,) = (part for part in sites.tables(group_runs(load([tmp_path]))) if part.title == "Sites: dice")
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
    settings, _ = read_settings(tmp_path / "fedavg2")
    write_run(tmp_path / "fedavg3", settings | {"seed": 1}, [])  # a run that was ended before its first evaluation
    part = sites.unseen_sites(by_task(group_runs(load([tmp_path]))))
    assert part is not None and "Unseen sites" in html(load([tmp_path]), None)
    for name in ("fedavg", "fedsm"):
        values = found[name, 1], found[name, 2]
        assert [name, *(f"{v:.4f}" for v in (*values, sum(values) / 2))] in part.rows
