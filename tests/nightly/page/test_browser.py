"""The site in a real browser: from a file and from a web server, by keyboard, on a phone, in the dark.

Debian's or any other Chromium, driven by Playwright, which brings no browser of its own.
"""

import functools
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from thorough import beside

from quantkit.nightly.page import Written, index

from .conftest import BROKEN, SLOW

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def served(site: Written) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site.path.parent)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()
        thread.join()


@pytest.fixture
def opened(browser: Any, site: Written) -> Iterator[Any]:
    """Opens pages, and fails if one says anything on the console or asks for what is not the site's."""
    said: list[str] = []
    contexts: list[Any] = []

    def open_page(href: str = "", *, width: int = 1280, scheme: str = "light", base: str = "") -> Any:
        base = base or site.path.as_uri()
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        root = base.rpartition("/")[0]
        page.on("request", lambda request: request.url.startswith((root, "data:")) or said.append(request.url))
        page.goto(f"{root}/{href}" if href else base)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def background(page: Any) -> str:
    # a locator waits for the page that a click leads to, which has no body at first
    return str(page.locator("body").evaluate("node => getComputedStyle(node).backgroundColor"))


def has_count(found: Any, count: int) -> None:
    """Waits, as `count()` does not: after a click, a moment passes before the other page stands."""
    from playwright.sync_api import expect

    expect(found).to_have_count(count)


@pytest.mark.parametrize("server", [False, True])
def test_it_opens_from_a_file_and_from_a_server(server: bool, opened: Any, request: pytest.FixtureRequest) -> None:
    page = opened(base=request.getfixturevalue("served") if server else "")
    assert page.locator(".verdict strong").inner_text() == "1 worse, 1 failed of 5 cells"
    assert page.locator(".filters").is_visible()  # the script ran
    assert page.locator(".tile").first.evaluate("node => getComputedStyle(node).display") == "block"  # and the style
    page.locator(".alarms a").first.click()
    assert page.locator(".verdict strong").inner_text() == "Worse: Latency +10.0\u00a0%"
    page.get_by_role("link", name="All cells").click()
    has_count(page.locator(".tile"), 5)


def test_the_theme_follows_the_system_and_is_kept_when_chosen(opened: Any) -> None:
    page = opened(scheme="dark")
    dark = background(page)
    toggle = page.locator(".theme")
    assert toggle.get_attribute("aria-pressed") == "true"
    toggle.click()
    light = background(page)
    assert (light, toggle.get_attribute("aria-pressed")) == ("rgb(255, 255, 255)", "false")
    assert dark != light
    page.reload()
    assert background(page) == light
    page.locator(".alarms a").first.click()
    page.locator("h1.cell").wait_for()
    assert background(page) == light


def test_the_grid_is_one_stop_of_the_tab_key_and_arrows_move_in_it(opened: Any) -> None:
    page = opened()
    focused = "document.activeElement.dataset.key"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(40):
        page.keyboard.press("Tab")
        if first := page.evaluate(focused):
            break
    assert first == page.locator(".tile").first.get_attribute("data-key")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == SLOW.key
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) not in (first, SLOW.key)
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.row')") is None
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(re.escape(index.href(SLOW.key))))


def test_filters_leave_what_was_asked_for_and_can_be_linked_to(opened: Any) -> None:
    page = opened()
    shown = page.locator(".tile:visible")
    page.locator("[data-answer=failed]").click()
    assert [each.get_attribute("data-key") for each in shown.all()] == [BROKEN.key]
    assert page.locator(".shown").inner_text() == "1 of 5 cells"
    address = page.url
    page.get_by_role("button", name="Clear").click()
    page.wait_for_function("document.querySelector('.shown').textContent === ''")
    has_count(shown, 5)
    page.keyboard.press("/")
    page.keyboard.type("tiny b")
    has_count(shown, 2)
    again = opened("index.html#" + address.partition("#")[2])
    has_count(again.locator(".tile:visible"), 1)


def test_a_chart_is_read_night_by_night(opened: Any) -> None:
    page = opened(index.href(SLOW.key))
    chart = page.get_by_role("slider").first
    chart.focus()
    assert chart.get_attribute("aria-valuetext") == "2026-01-03 03:00: worse, +10.0\u00a0% (+9.0 to +11.0\u00a0%)"
    page.keyboard.press("ArrowLeft")
    assert "2026-01-02 03:00: worse, +8.0\u00a0%" in page.locator(".readout").first.inner_text()
    page.keyboard.press("Home")
    assert chart.get_attribute("aria-valuenow") == "1"


@pytest.mark.parametrize("scheme", beside(["light"], ["light", "dark"]))
def test_a_phone_shows_it_without_scrolling_sideways(scheme: str, opened: Any) -> None:
    for href in ("", index.href(SLOW.key), index.href(BROKEN.key)):
        page = opened(href, width=360, scheme=scheme)
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == 360, href
