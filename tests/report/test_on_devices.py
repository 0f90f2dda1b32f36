"""The page of a bundle that was measured on this machine and on two devices: a tab and a verdict each, one picture."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from quantkit.bundle import Verdict
from quantkit.report.bundle.speed import HERE, DeviceRows, all_devices
from quantkit.report.bundle.speed import on_devices as parts
from quantkit.report.kit import html
from quantkit.report.kit.tree import Section
from report.reached import DEVICES, on_devices, there
from report.shown import page
from report.timed import BATCHES, judged

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_each_device_has_a_tab_and_a_verdict_of_its_own() -> None:
    manifest, rows, devices = on_devices()
    found = page(manifest, rows, [], devices=devices)
    assert re.findall(r"<summary>(pi5|box)</summary>", found) == ["pi5", "box"]
    assert found.count('name="tab"') == 2
    # this machine's at the top, the others' in their tabs
    answers = ["Ship it up to batch 8.", "Ship it up to batch 4.", "Ship it up to batch 16."]
    places = [found.index(answer, found.index("<body")) for answer in answers]
    assert places == sorted(places)
    for name, (processor, machine, isa, *_) in DEVICES.items():
        assert f"{processor}, {machine}, {isa}" in found, name


def test_a_tab_says_what_its_device_met() -> None:
    flagged = [row.model_copy(update={"flags": ["throttled"]}) for row in there("pi5")]
    emulated = [row.model_copy(update={"flags": ["emulated"]}) for row in there("box")]
    devices = [DeviceRows("pi5", flagged, Verdict(answer="ship")), DeviceRows("qemu", emulated, None)]
    hot, program = (html.fragment([tab]) for tab in parts(judged(), [], devices) if isinstance(tab, Section))
    assert "lowered its clock" in hot
    assert "No verdict." in program and "its times are an emulator&#39;s" in program
    assert "An emulator: what it computes counts" in program


def test_one_picture_shows_all_by_batch() -> None:
    manifest, rows, devices = on_devices()
    (section,) = all_devices(manifest, rows, devices)
    assert len(section.charts) == 2
    for panel, what in zip(section.charts, ("Speed-up", "Tax"), strict=True):
        assert panel.title.startswith(what)
        assert "against batch, of here, pi5 and box" in panel.alt
    assert section.table is not None
    names = [line[0] for line in section.table.rows]
    assert names == [name for name in (HERE, *DEVICES) for _ in BATCHES]
    speed = {(line[0], line[1]): line[2] for line in section.table.rows}
    assert (speed[HERE, "1"], speed["pi5", "1"], speed["box", "1"]) == ("2.40×", "2.00×", "3.00×")
    # of one alone there is nothing to compare
    assert all_devices(manifest, rows, []) == []
    assert all_devices(manifest, [], devices[:1]) == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_tabs_in_a_browser(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    manifest, rows, devices = on_devices()
    path, said = tmp_path / "report.html", []
    path.write_text(page(manifest, rows, [], devices=devices), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1200, "height": 900})
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.goto(path.as_uri())
        pi5, box = (shown.locator("#devices details", has_text=name).first for name in ("Cortex-A76", "EPYC"))
        # one at a time, side by side, and what was folded is drawn
        assert pi5.get_by_text("Ship it up to batch 4.").is_visible()
        assert not box.get_by_text("Ship it up to batch 16.").is_visible()
        box.locator("summary", has_text="box").first.click()
        assert box.get_by_text("Ship it up to batch 16.").is_visible()
        assert not pi5.get_by_text("Ship it up to batch 4.").is_visible()
        box.locator(".plot svg").first.wait_for()
        shown.set_viewport_size({"width": 400, "height": 800})
        assert shown.evaluate("document.documentElement.scrollWidth") == 400
        browser.close()
    assert said == []
