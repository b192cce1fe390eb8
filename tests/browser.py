"""Looks at a page in a real Chromium: layout, console, accessibility by axe-core, plots by their pixels."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
WIDTHS = (390, 1280)
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
INK_SHARE = 0.007
"""The least share of a plot's pixels that differ from its background, axes included."""
COLOURED_SHARE = 0.0001
"""The least share of a plot's pixels that have a colour: those of curves and points."""

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@contextmanager
def open_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


def check_page(browser: Browser, path: Path, width: int, scheme: Scheme) -> int:
    """Assert that a page is as a page should be; returns the number of its plots."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(300_000)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith("data:") else said.append(request.url))
    page.goto(path.as_uri())
    for change in ("", "document.querySelectorAll('details').forEach(one => { one.open = true })"):
        page.evaluate(change)
        assert page.evaluate("document.documentElement.scrollWidth") == width, "the page scrolls sideways"
        assert said == [path.as_uri()], "nothing else is loaded, nothing is said"
        faults = find_faults(page)
        assert not faults, faults
    page.add_style_tag(content="svg text { visibility: hidden }")  # labels have the colours of curves
    plots = page.query_selector_all("svg")
    for plot in plots:
        picture, title = plot.screenshot(), plot.get_attribute("aria-label") or ""
        assert count_ink(picture) > INK_SHARE, title
        if title != "Joint return":  # its curves are grey
            assert count_coloured(picture) > COLOURED_SHARE, title
    page.close()
    return len(plots)


def find_faults(page: Page) -> list[str]:
    """What axe-core calls serious or critical."""
    violations = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in violations if one["impact"] in ("serious", "critical")]


def count_ink(picture: bytes) -> float:
    """The share of pixels whose colour is far from that of the corner."""
    pixels = _read_pixels(picture)
    return float((np.abs(pixels - pixels[0, 0]).max(axis=2) > 60).mean())


def count_coloured(picture: bytes) -> float:
    """The share of pixels with a colour."""
    return float((np.ptp(_read_pixels(picture), axis=2) > 60).mean())


def _read_pixels(picture: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)
