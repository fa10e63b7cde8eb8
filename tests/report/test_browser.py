"""The page in a real browser: opened from a file, wide and narrow, by keyboard, light and dark, on paper."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvbench.show.report import report
from tests.report.browser import REQUIRED, Browser, installed
from tests.report.made import HOSTILE, make_rows, make_run, row

WIDTHS = (1280, 400)
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
OUTSIDE = """[...document.querySelectorAll("body *")]
    .filter(one => !one.closest(".box, .hidden") && one.getBoundingClientRect().right > innerWidth + 0.5)
    .map(one => one.tagName + "." + one.className + ": " + one.textContent.slice(0, 60))"""
LOUD = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder / "mine", samples=4)
    hostile = [
        row(spec, 64, f"s{index}", task_spec=HOSTILE) for spec in (HOSTILE, "tova") for index in range(2)
    ]
    return report([run, make_rows(folder / "hostile", hostile)], folder / "page.html").as_uri()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = installed()
    if program is None:
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(f"{REQUIRED}=required, and no chromium here: apt-get install chromium")
        pytest.skip("no chromium here: apt-get install chromium")
    with Browser(program, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser, page: str) -> Browser:
    """The page, just opened at 1280 pixels."""
    chromium.size(1280)
    chromium.media()
    chromium.open(page)
    return chromium


def focused(browser: Browser) -> str:
    return str(browser.value("document.activeElement.id || document.activeElement.className"))


def test_no_error_and_no_request(browser: Browser, page: str) -> None:
    said = [event for event in browser.events if event["method"] in LOUD]
    assert said == []
    asked = [
        e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"
    ]
    assert set(asked) <= {page}
    assert browser.value("performance.getEntriesByType('resource').length") == 0
    assert browser.value("document.scripts.length") == 2  # hostile names added none


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shown", ["closed", "open"])
def test_nothing_sticks_out(browser: Browser, width: int, shown: str) -> None:
    """Tables scroll inside their own boxes; labels in charts stay readable."""
    browser.size(width)
    if shown == "open":
        browser.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.value(OUTSIDE) == []
    assert browser.value("innerWidth") == width
    assert browser.value(OVERFLOW) <= 0
    wide = (
        "[...document.querySelectorAll('.box')].filter(one => one.scrollWidth > one.clientWidth + 1).length"
    )
    assert browser.value(wide) > 0 or width == 1280 or shown == "closed"
    heights = "[...document.querySelectorAll('.chart text')].map(one => one.getBoundingClientRect().height)"
    assert browser.value(f"Math.min(...{heights})") >= 12


def test_policies_are_toggled_by_keyboard(browser: Browser) -> None:
    first = "document.querySelector('#p1-k0')"
    curve = "getComputedStyle(document.querySelector('#p1 .chart g.k0')).display"
    other = "getComputedStyle(document.querySelector('#p2 .chart g.k0')).display"
    for _ in range(80):
        browser.press("Tab")
        if focused(browser) == "p1-k0":
            break
    assert focused(browser) == "p1-k0"
    assert browser.value(f"getComputedStyle({first}).outlineStyle") != "none"  # the focus can be seen
    browser.press(" ")
    assert browser.value(f"{first}.checked") is False
    assert browser.value(curve) == "none"
    assert browser.value(other) != "none"
    browser.press(" ")
    assert browser.value(curve) != "none"


def test_all_none_and_bands(browser: Browser) -> None:
    gone = "one => getComputedStyle(one).display == 'none'"
    hidden = f"[...document.querySelectorAll('#p1 .chart g.c')].filter({gone}).length"
    curves = browser.value("document.querySelectorAll('#p1 .chart g.c').length")
    browser.value("document.querySelector('#p1 [data-all=no]').focus()")
    browser.press("Enter")
    assert browser.value(hidden) == curves > 0
    assert browser.value("document.querySelector('#p1-bands').checked") is True
    browser.value("document.querySelector('#p1 [data-all=yes]').focus()")
    browser.press("Enter")
    assert browser.value(hidden) == 0
    band = "getComputedStyle(document.querySelector('#p1 .band')).display"
    browser.value("document.querySelector('#p1-bands').click()")
    assert browser.value(band) == "none"


def test_light_and_dark(browser: Browser) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    assert browser.value(back) == "rgb(255, 255, 255)"
    browser.media(scheme="dark")
    assert browser.value(back) == "rgb(20, 22, 26)"
    browser.value("document.querySelector('#theme-auto').focus()")
    browser.press("ArrowRight")
    assert browser.value("document.querySelector('#theme-light').checked") is True
    assert browser.value(back) == "rgb(255, 255, 255)"
    browser.press("ArrowRight")
    browser.media(scheme="light")
    assert browser.value(back) == "rgb(20, 22, 26)"
    browser.media("print")
    assert browser.value(back) == "rgb(255, 255, 255)"
    assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_what_a_screen_reader_hears(browser: Browser) -> None:
    nodes = browser.ask("Accessibility.getFullAXTree")["nodes"]
    heard = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"]
    ]
    roles = [role for role, _ in heard]
    assert {"banner", "main", "navigation", "contentinfo"} <= set(roles)
    images = [name for role, name in heard if role in ("image", "img", "graphics-document")]
    assert len(images) > 10
    assert all(images)
    assert any("accuracy" in name and "The numbers are in the table" in name for name in images)
    for role in ("checkbox", "radio", "button", "link", "heading", "table", "region"):
        names = [name for kind, name in heard if kind == role]
        assert names, role
        assert all(name.strip() for name in names), role
