"""Take the README's picture of a report, in Debian's chromium: python docs/site/picture.py runs/demo/report.html."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

OUT = Path(__file__).parents[1] / "report.png"
COLOURS = 128  # of the palette: a quarter of the bytes
SIZE = {"width": 1440, "height": 1230}  # all columns of the table, and the first curves


def main(report: Path) -> None:
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(report.resolve().as_uri())
        page.wait_for_timeout(2000)  # until the charts are drawn
        picture = Image.open(io.BytesIO(page.screenshot()))
        browser.close()
    picture.convert("RGB").quantize(COLOURS).save(OUT, optimize=True)
    print(f"written to {OUT}, {OUT.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
