"""Pages in a real Chromium, on a phone and a desk, light and dark: layout, console, accessibility, plots."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from magrpo.config import RunConfig
from magrpo.reports.budget import Budget
from magrpo.types import EvalReport
from tests.reports.pages import BUDGETS, make_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
WIDTHS = (390, 1280)
SCHEMES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
INK_SHARE = 0.01
"""The least share of a plot's pixels that differ from its background, axes and text included."""
COLOURED_SHARE = 0.0001
"""The least share of a plot's pixels that have a colour: those of curves and points."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, config: RunConfig, reports: list[EvalReport]) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, shown, budgets in (("trained", reports, BUDGETS), ("evaluated", reports[1:], [Budget()])):
        (folder / name).mkdir()
        make_report(config, shown, budgets).write_files(folder / name)
    return {name: folder / name / "report.html" for name in ("trained", "evaluated")}


def count_ink(picture: bytes) -> float:
    """The share of pixels whose colour is far from that of the corner."""
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)
    return float((np.abs(pixels - pixels[0, 0]).max(axis=2) > 60).mean())


def count_coloured(picture: bytes) -> float:
    """The share of pixels with a colour: curves and points, neither axes nor text."""
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)
    return float((np.ptp(pixels, axis=2) > 60).mean())


def find_faults(page: Page) -> list[str]:
    """What axe-core calls serious or critical."""
    violations = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in violations if one["impact"] in ("serious", "critical")]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["trained", "evaluated"])
def test_a_page_in_a_browser(
    browser: Browser, pages: Mapping[str, Path], name: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if not request.url.startswith("data:") else None)
    page.goto(pages[name].as_uri())
    assert find_faults(page) == []
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert find_faults(page) == [], "with every section open"
    assert page.evaluate("document.documentElement.scrollWidth") == width, "the page scrolls sideways"
    assert said == [pages[name].as_uri()], "nothing else is loaded, nothing is said"
    plots = page.query_selector_all("svg")
    assert len(plots) == (7 if name == "trained" else 0)
    for plot in plots:
        picture, title = plot.screenshot(), plot.get_attribute("aria-label") or ""
        assert count_ink(picture) > INK_SHARE, title
        if not title.startswith("Joint return:"):  # its curves are grey
            assert count_coloured(picture) > COLOURED_SHARE, title
    page.close()
