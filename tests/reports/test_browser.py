"""Reports in a real Chromium: on a phone with a light page, on a desk with a dark one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from magrpo.config.run import RunConfig
from magrpo.reports.budget import Budget
from magrpo.types import EvalReport
from tests.browser import SCHEMES, WIDTHS, Scheme, check_page, needs_chromium, open_browser
from tests.reports.pages import BUDGETS, make_report

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, config: RunConfig, reports: list[EvalReport]) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, shown, budgets in (("trained", reports, BUDGETS), ("evaluated", reports[1:], [Budget()])):
        (folder / name).mkdir()
        make_report(config, shown, budgets).write_files(folder / name)
    return {name: folder / name / "report.html" for name in ("trained", "evaluated")}


@pytest.mark.parametrize(("width", "scheme"), [*zip(WIDTHS, SCHEMES, strict=True)])
@pytest.mark.parametrize(("name", "num_plots"), [("trained", 4), ("evaluated", 0)])
def test_a_report(
    browser: Browser, pages: Mapping[str, Path], name: str, num_plots: int, width: int, scheme: Scheme
) -> None:
    assert check_page(browser, pages[name], width, scheme) == num_plots


def test_faults_are_found(browser: Browser, pages: Mapping[str, Path], tmp_path: Path) -> None:
    """The check itself: a page that is too wide, one that says something, a plot without curves, pale text."""
    text = pages["evaluated"].read_text(encoding="utf-8")
    plot, *_ = re.findall(r"<svg.*?</svg>", pages["trained"].read_text(encoding="utf-8"), re.DOTALL)
    empty = re.sub(r"<path[^>]*/>|<use[^>]*/>", "", plot)
    broken = {
        "scrolls sideways": text.replace("<main>", '<main><div style="width: 900px">wide</div>'),
        "nothing is said": text.replace("<main>", "<main><script>console.log(1)</script>"),
        "color-contrast": text.replace("</style>", "p { color: #eee !important; background: #fff !important }</style>"),
        "Joint return": text.replace("<main>", f"<main>{empty}"),
    }
    for fault, page in broken.items():
        path = tmp_path / "broken.html"
        path.write_text(page, encoding="utf-8")
        with pytest.raises(AssertionError, match=fault):
            check_page(browser, path, 390, "light")
