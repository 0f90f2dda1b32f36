"""The report in a real browser: on a telephone, with what is folded opened, and in the dark."""

import shutil
from pathlib import Path

import planted
import pytest

from report.hurt import hurt
from report.shown import page
from report.timed import everything, judged

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# of the page with every section there is, before what is looked up was folded: 14,710
TALL = 14_710


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_on_a_telephone_folded_and_in_the_dark(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    path, said = tmp_path / "report.html", []
    path.write_text(page(judged(), everything(), [planted.NOTE], harm=hurt()), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme="light")
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: request.url.startswith(("file:", "data:")) or said.append(request.url))
        shown.goto(path.as_uri())
        shown.locator(".plot svg").first.wait_for()

        def of(script: str) -> object:
            return shown.evaluate(script)

        height, width = of("[document.documentElement.scrollHeight, document.documentElement.scrollWidth]")
        assert height < TALL / 2
        assert width == 400, "nothing reaches beyond the screen"
        assert shown.locator(".copy").count() == 7
        # a colour is what the page makes of its name
        assert "rgb(10, 94, 168)" in str(of("document.querySelector('.plot').innerHTML"))
        # what is folded is drawn when it is opened
        folded = shown.locator(".foldable", has=shown.locator(".plot")).first
        assert folded.locator(".plot svg").count() == 0
        folded.locator("summary").click()
        folded.locator(".plot svg").first.wait_for()
        # the switch turns the page and its figures
        light = of("getComputedStyle(document.querySelector('.plot svg text')).fill")
        shown.locator(".theme").click()
        assert of("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 24)"
        shown.wait_for_function(f"getComputedStyle(document.querySelector('.plot svg text')).fill !== '{light}'")
        browser.close()
    assert said == []
