"""The README's picture of a report: its top and its maps, of the run that `pouf demo` leaves.

    pouf demo
    python benchmarks/report_picture.py --run pouf-demo --out docs/images/report.png

Needs Chromium with its driver, as the tests of reports do, and selenium (`pip install '.[dev]'`).
"""

from __future__ import annotations

import argparse
import base64
import shutil
import tempfile
from pathlib import Path

from selenium import webdriver

WIDTH = 1040
# What stands between the cards at the top and the maps, and all that follows them, is left out.
SHORTEN = """
const parts = [...document.body.children], cards = parts.indexOf(document.querySelector(".cards"));
const maps = parts.findIndex(part => part.tagName === "H2" && part.textContent === "Where inputs and prototypes lie");
const end = parts.indexOf(document.querySelector(".maps"));
parts.forEach((part, i) => { if ((i > cards && i < maps) || i > end) part.style.display = "none"; });
const box = document.querySelector(".maps").getBoundingClientRect();
return Math.ceil(box.bottom + scrollY + 16);
"""


def picture(report: Path) -> bytes:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
            screen = {"width": WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", light)
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
            browser.get(report.resolve().as_uri())
            height = browser.execute_script(SHORTEN)
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
            shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        finally:
            browser.quit()
    return base64.b64decode(shot["data"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("pouf-demo"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/report.png"))
    given = parser.parse_args()
    given.out.write_bytes(picture(given.run / "report.html"))


if __name__ == "__main__":
    main()
