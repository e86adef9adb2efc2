"""The report in Debian's chromium: what is shown, what can be clicked, what is saved; nothing that a run says becomes markup."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from scipy import stats

from tests.report.test_report import COMMON, MADE, make_run
from tests.small import write_run
from undrift.core.run_files import DEPLOYED
from undrift.report.page import write
from undrift.report.significance import holm

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; apt install chromium")

EVIL = "</script><img src=x onerror=alert(1)>\u2028<!--"
SCORES = {"fedavg": [0.50, 0.52, 0.57], "scaffold": [0.61, 0.60, 0.69], "=cmd|' /C x'!A1": [0.3, 0.35, 0.42]}


def ends(score: float, rounds: int = 40) -> list[float | None]:
    """A curve that is evaluated every second round and ends with its best value."""
    return [round(score * t / rounds, 6) if t % 2 == 0 else None for t in range(1, rounds + 1)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report on runs of all four kinds."""
    root = tmp_path_factory.mktemp("runs")
    classes = {"class_accuracies": [0.5, None, 0.25], "client_accuracies": [0.0, 0.5, 1.0], "network_seconds": 0.5}
    held = {"clients": 4, "holdings": ["1 2 3", "0 0 9", "4 0 0", "0 1 0"], "sites": ["a", EVIL, "c", "d"]}
    for name, scores in SCORES.items():
        for seed, score in enumerate(scores):
            folder = make_run(
                root / f"r{list(SCORES).index(name)}{seed}", name, seed, ends(score), more=classes, rounds=40, note=EVIL
            )
            settings = {"algorithm": name, **COMMON, "seed": seed, "rounds": 40, "note": EVIL, "made": MADE | held}
            lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
            write_run(folder, settings, [{k: v for k, v in line.items() if k != "check"} for line in lines])
    deployed = make_run(root / "real", "fedavg", 0, [0.1, 0.2])
    (deployed / DEPLOYED).write_text("{}")
    few = [{"round": t, "loss": 1 / t, "accuracy": t / 9, "seconds": 0.1} for t in (1, 2, 3)]
    write_run(root / "dp", {"method": "sgd", "dataset": "digits", "model": "mlp", "workers": 4, "seed": 0}, few)
    write_run(
        root / "pipe", {"command": "pipe", "algorithm": "dsp", "dataset": "digits", "model": "mlp", "seed": 0}, few
    )
    write([root], root / "report.html", 0.25)
    return (root / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, report: str) -> Iterator[Any]:
    """The report at 1280 pixels; a message on the console or a dialogue fails the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    page.set_default_timeout(15_000)
    said = watch(page)
    page.goto(report)
    yield page
    page.close()
    assert said == []


def watch(page: Any) -> list[str]:
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(f"dialogue: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
    return said


def federated(page: Any) -> Any:
    """The section of simulated runs."""
    return page.locator("section", has=page.locator("h2", has_text="Simulated federation"))


def names(page: Any) -> list[str]:
    """The methods in the order of the table."""
    return [name.strip() for name in federated(page).locator("table").first.locator("tbody th").all_inner_texts()]


def chooser(section: Any, label: str) -> Any:
    return section.locator(".controls label", has_text=label).locator("select")


def hover(page: Any, share: float, chart: int = 0) -> str:
    """The note at a share of the width of a chart's plot."""
    box = federated(page).locator(".u-over").nth(chart)
    box.scroll_into_view_if_needed()
    place = box.bounding_box()
    page.mouse.move(place["x"] + share * place["width"], place["y"] + 60)
    return str(page.locator(".tip:visible").inner_text())


@pytest.mark.parametrize(
    ("width", "theme"), [(390, "dark"), (768, "light"), (1280, "light"), (1280, "dark")]
)  # the rest is tested for its width only: these checks take seconds
def test_it_fits_and_everybody_can_use_it(browser: Any, report: str, width: int, theme: str) -> None:
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    # The page's policy would refuse a script of others.
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, bypass_csp=True)
    page = context.new_page()
    said = watch(page)
    page.goto(report)
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.evaluate(axe + ";0")
    found = page.evaluate("axe.run().then((r) => r.violations.map((v) => [v.id, v.nodes.map((n) => n.html)]))")
    assert found == [] and said == []
    page.emulate_media(media="print")
    assert not page.locator(".controls").first.is_visible() and page.locator("table").first.is_visible()
    context.close()


@pytest.mark.parametrize(("width", "theme"), [(390, "light"), (768, "dark"), (320, "light")])
def test_nothing_scrolls_sideways(browser: Any, report: str, width: int, theme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    said = watch(page)
    page.goto(report)
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == width and said == []
    page.close()


def test_each_kind_has_its_section_and_results_come_first(page: Any) -> None:
    headings = page.locator("section h2").all_inner_texts()
    assert sorted(heading.split(":")[0] for heading in headings) == [
        "Data-parallel training", "One network in blocks", "Real federation", "Simulated federation",
    ]  # fmt: skip
    parts = federated(page).locator("h2, table, canvas, details.fold").evaluate_all("all => all.map((e) => e.tagName)")
    assert parts[:2] == ["H2", "TABLE"] and parts.index("CANVAS") < parts.index("DETAILS")
    assert not federated(page).get_by_text("undrift run").first.is_visible(), "settings and commands are folded"
    page.get_by_role("navigation").get_by_text("One network in blocks").click()
    assert "at=" in page.url


def test_the_best_method_and_its_lead_are_said_first(page: Any) -> None:
    tiles = federated(page).locator(".tile").all_inner_texts()
    assert [tile.split("\n")[0] for tile in tiles] == ["0.6333 ± 0.0493", "0.1033", "3 methods"]
    p = holm([stats.ttest_rel(SCORES[name], SCORES["scaffold"]).pvalue for name in ("fedavg", "=cmd|' /C x'!A1")])[0]
    assert tiles[0].endswith("scaffold") and tiles[1].endswith(f"ahead of fedavg\np = {float(f'{p:.2g}'):g}, 3 seeds")


@pytest.mark.parametrize(
    ("second", "says"),
    [([0.5, 0.6], ["level", "with scaffold"]), ([0.45, 0.62, 0.2], ["0.0150", "behind fedavg"])],  # in seeds 0, 1
)
def test_a_lead_that_is_none_is_not_called_one(
    browser: Any, tmp_path: Path, second: list[float], says: list[str]
) -> None:
    first = [0.5, 0.6] if len(second) == 2 else [0.45, 0.59]
    for name, scores in (("fedavg", second), ("scaffold", first)):
        for seed, score in enumerate(scores):
            make_run(tmp_path / f"{name}{seed}", name, seed, [score])
    write([tmp_path], tmp_path / "report.html")
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator(".tile").nth(1).inner_text().split("\n")[:2] == says
    page.close()


def test_settings_of_one_method_are_not_called_methods(browser: Any, tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        make_run(tmp_path / str(rate), "fedavg", 0, [rate], {"lr": rate})
    write([tmp_path], tmp_path / "report.html")
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator(".tile").last.inner_text() == "2 settings\n2 runs"
    page.close()


def test_without_scripts_there_are_tables(browser: Any, report: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 900}, java_script_enabled=False)
    page = context.new_page()
    page.goto(report)
    row = page.locator("tbody tr", has_text="scaffold").first
    assert row.is_visible() and "0.6333 ± 0.0493" in row.inner_text() and page.locator("canvas, img").count() == 0
    assert page.get_by_text("there are curves, too").is_visible()
    context.close()


def test_what_a_run_says_stays_text(page: Any) -> None:
    assert page.locator("img").count() == 0
    assert EVIL in federated(page).locator("dl").first.text_content()
    chart = federated(page).locator("figure", has_text="Samples of each class").locator(".chart")
    chart.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    assert (
        "onerror" in page.locator(".tip:visible").inner_text()
        and "class 1" in page.locator(".tip:visible").inner_text()
    )


def test_no_other_script_runs_and_nothing_is_loaded(browser: Any, report: str) -> None:
    page = browser.new_page()
    said = watch(page)
    page.goto(report)
    add = "(tag, text) => { const e = document.createElement(tag); e.textContent = text; document.body.append(e); }"
    page.evaluate(f"({add})('script', 'window.ran = 1')")
    page.evaluate("fetch('https://example.org/').catch(() => 0)")
    page.evaluate("document.body.append(Object.assign(new Image(), {src: 'https://example.org/x.png'}))")
    assert page.evaluate("window.ran") is None
    refused = [text for text in said if "Content Security Policy" in text or "Content-Security-Policy" in text]
    assert len(refused) >= 3, said
    page.close()


def test_the_table_is_sorted_by_clicks_and_keys(page: Any) -> None:
    assert names(page) == ["scaffold", "fedavg", "=cmd|' /C x'!A1"]
    column = federated(page).locator("table").first.locator("thead th", has_text="last accuracy")
    column.locator("button").click()
    assert column.get_attribute("aria-sort") == "descending" and names(page)[0] == "scaffold"
    page.keyboard.press("Enter")  # the focus stays on the heading
    assert column.get_attribute("aria-sort") == "ascending" and names(page) == ["=cmd|' /C x'!A1", "fedavg", "scaffold"]


def test_methods_are_compared_seed_by_seed(page: Any) -> None:
    def row(name: str) -> list[str]:
        cells = federated(page).locator("table").first.locator("tbody tr", has_text=name).locator("td")
        return [text.strip() for text in cells.all_inner_texts()]

    ps = holm([stats.ttest_rel(SCORES[name], SCORES["scaffold"]).pvalue for name in ("fedavg", "=cmd|' /C x'!A1")])
    assert row("fedavg")[2:4] == ["−0.1033", f"{float(f'{ps[0]:.2g}'):g} (3 seeds)"]
    federated(page).get_by_label("Compare with").select_option(label="fedavg")
    p = holm([stats.ttest_rel(SCORES[name], SCORES["fedavg"]).pvalue for name in ("scaffold", "=cmd|' /C x'!A1")])[0]
    assert row("scaffold")[2:4] == ["+0.1033", f"{float(f'{p:.2g}'):g} (3 seeds)"] and row("fedavg")[2:4] == ["", ""]
    assert ".vs=1" in page.url


def test_values_under_the_pointer_and_the_arrow_keys(page: Any) -> None:
    note = hover(page, 0.5)  # of rounds 2 to 40
    place = int(re.search(r"round (\d+)", note)[1])  # type: ignore[index]
    assert place in (20, 22)
    for name, scores in SCORES.items():
        mean, low, high = (float(f"{f * place / 40:.4g}") for f in (sum(scores) / 3, min(scores), max(scores)))
        shown = re.search(re.escape(name) + r"\s+([\d.]+)\s+([\d.]+) to ([\d.]+)", note)
        assert shown and [float(v) for v in shown.groups()] == pytest.approx([mean, low, high], abs=2e-4)
    page.mouse.move(0, 0)
    federated(page).locator(".chart").first.focus()
    page.keyboard.press("End")
    assert page.locator(".tip:visible").inner_text().startswith("round 40")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".tip:visible").inner_text().startswith("round 2\n")


def test_lines_axes_seeds_and_smoothing(page: Any) -> None:
    section = federated(page)
    section.locator(".key", has_text="fedavg").locator("input").uncheck()
    assert "fedavg" not in hover(page, 0.9) and "scaffold" in hover(page, 0.9)
    section.get_by_role("button", name="none", exact=True).click()
    section.locator(".key", has_text="scaffold").locator("input").check()
    chooser(section, "Over").select_option("bytes")
    assert hover(page, 0.999).startswith("bytes 40 kB")  # 40 rounds of 600 + 400 bytes
    chooser(section, "Over").select_option("network")
    assert hover(page, 0.999).startswith("network 20")
    chooser(section, "Over").select_option("gradients")
    assert hover(page, 0.999).startswith("gradients 400")
    chooser(section, "Over").select_option("round")
    chooser(section, "Seeds").select_option("single")
    assert {"scaffold, seed 0", "scaffold, seed 1", "scaffold, seed 2"} <= set(hover(page, 0.999).split("\n"))
    chooser(section, "Seeds").select_option("mean")
    section.get_by_label("Smoothing").fill("0.5")
    total = weight = 0.0
    for t in range(2, 41, 2):
        mean = sum(float(f"{score * t / 40:.4g}") for score in SCORES["scaffold"]) / 3
        total, weight = 0.5 * total + 0.5 * mean, 0.5 * weight + 0.5
    note = hover(page, 0.999)
    assert "smoothed" in note and float(note.split("\n")[2]) == pytest.approx(total / weight, abs=1e-4)
    section.get_by_label("log x").check()
    section.locator("figure").first.get_by_label("log").check()
    assert "scaffold" in hover(page, 0.999)


def test_charts_can_be_chosen(page: Any) -> None:
    section = federated(page)

    def titles() -> list[str]:
        return [str(text) for text in section.locator(".charts").first.locator("figure h3").all_inner_texts()]

    before = titles()
    section.locator("summary", has_text="Charts").click()
    section.locator(".choices").get_by_label("test loss").uncheck()
    assert titles() == [title for title in before if title != "Test loss over rounds"] != before
    section.locator(".choices").get_by_label("test loss").check()
    assert titles() == before


def test_zoom_and_links_that_keep_the_view(page: Any, browser: Any) -> None:
    section = federated(page)
    box = section.locator(".u-over").first
    box.scroll_into_view_if_needed()
    place = box.bounding_box()
    page.mouse.move(place["x"] + 0.5 * place["width"], place["y"] + 50)
    page.mouse.down()
    page.mouse.move(place["x"] + 0.75 * place["width"], place["y"] + 60, steps=4)
    page.mouse.up()
    assert hover(page, 0.01).startswith(("round 20", "round 22")) and hover(page, 0.99).startswith("round 30")
    assert hover(page, 0.99, chart=1).startswith("round 30"), "all charts of a section zoom together"
    section.locator(".key", has_text="fedavg").locator("input").uncheck()
    section.locator("thead th", has_text="seeds").first.locator("button").click()
    other = browser.new_page(viewport={"width": 1280, "height": 900})
    other.goto(page.url)
    assert hover(other, 0.99).startswith("round 30") and "fedavg" not in hover(other, 0.99)
    assert not federated(other).locator(".key", has_text="fedavg").locator("input").is_checked()
    assert federated(other).locator("thead th[aria-sort]").inner_text().startswith("seeds")
    federated(other).get_by_role("button", name="Show all").click()
    assert hover(other, 0.999).startswith("round 40")
    federated(other).get_by_role("button", name="Zoom in").click()
    assert hover(other, 0.999).startswith(("round 30", "round 32"))
    other.goto(page.url.split("#")[0] + "#9.x=bytes&0.z=5:1&0.on=77&0.sort=x&0.x=miles&at=50")
    assert other.locator("canvas").count() > 4, "an address that makes no sense shows the page as at first"
    other.close()


def saved(page: Any, button: Any) -> bytes:
    with page.expect_download() as download:
        button.click()
    return Path(download.value.path()).read_bytes()


def test_tables_and_charts_are_saved(page: Any) -> None:
    section = federated(page)
    table = section.locator(".card").first.locator(".savers")
    rows = list(csv.reader(io.StringIO(saved(page, table.get_by_text("CSV")).decode())))
    assert rows[0][:3] == ["method", "seeds", "best accuracy (chosen on test)"]
    assert [row[0] for row in rows[1:]] == ["scaffold", "fedavg", "'=cmd|' /C x'!A1"], "no cell is a formula"
    assert rows[2][3] == "-0.1033"
    latex = saved(page, table.get_by_text("LaTeX")).decode()
    assert "\\toprule" in latex and "\\textbf{0.6333 $\\pm$ 0.0493}" in latex and "$-$0.1033" in latex
    assert "| scaffold | 3 | 0.6333 ± 0.0493 |" in saved(page, table.get_by_text("Markdown")).decode()
    figure = section.locator("figure").first
    assert saved(page, figure.get_by_text("PNG")).startswith(b"\x89PNG\r\n\x1a\n")
    drawing = ElementTree.fromstring(saved(page, figure.get_by_text("SVG")))
    texts = ["".join(element.itertext()) for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert "Test accuracy over rounds" in texts and "=cmd|' /C x'!A1" in texts and "40" in texts
    curves = [e for e in drawing.iter("{http://www.w3.org/2000/svg}path") if e.get("fill") == "none"]
    assert len(curves) == 3 and all(curve.get("d", "").count("L") == 19 for curve in curves)
    points = list(csv.DictReader(io.StringIO(saved(page, figure.get_by_text("CSV")).decode())))
    assert {"line": "scaffold", "round": "40", "lowest seed": "0.6", "highest seed": "0.69"}.items() <= points[
        19
    ].items()
    grid = section.locator("figure", has_text="Samples of each class")
    cells = [
        e
        for e in ElementTree.fromstring(saved(page, grid.get_by_text("SVG"))).iter()
        if e.get("fill", "").startswith("rgb")
    ]
    assert len(cells) == 6  # clients' classes that have samples
    page.locator("summary", has_text="BibTeX").click()
    assert "mcmahan2017fedavg" in saved(page, page.get_by_role("button", name="as BibTeX")).decode()


def test_forgetting_of_classes_is_shown_for_each_method(page: Any) -> None:
    figure = federated(page).locator("figure", has_text="of each class:")
    assert "Forgetting of each class: scaffold" in figure.inner_text()
    figure.get_by_label("Show").select_option("accuracy")
    figure.get_by_label("Method").select_option(label="fedavg")
    assert "Accuracy of each class: fedavg" in figure.inner_text()
    figure.locator(".chart").focus()
    page.keyboard.press("ArrowRight")
    assert "accuracy 0.5" in page.locator(".tip:visible").inner_text()


def test_the_axis_of_a_run_that_diverged_has_numbers(browser: Any, tmp_path: Path) -> None:
    lines = [{"round": t + 1, "loss": loss, "accuracy": 0.1, "seconds": 0.1} for t, loss in enumerate((2.3, 1e9, 8e35))]
    write_run(tmp_path / "wild", {"method": "ef", "dataset": "digits", "model": "mlp", "seed": 0}, lines)
    write([tmp_path / "wild"], tmp_path / "report.html", None)
    page = browser.new_page(accept_downloads=True)
    page.goto((tmp_path / "report.html").as_uri())
    figure = page.locator("figure", has_text="Test loss over rounds")
    assert figure.get_by_label("log").is_checked()
    drawing = ElementTree.fromstring(saved(page, figure.get_by_text("SVG")))
    texts = ["".join(element.itertext()) for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    powers = [float(text) for text in texts if re.fullmatch(r"1e\+\d+", text)]
    assert max(powers) >= 1e30 and len(powers) >= 5, texts
    page.close()
