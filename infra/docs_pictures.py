"""Pictures of the documents, taken by Chromium of the pages of real runs: ``make docs-pictures``.

The runs lie in build/pictures/runs; those that are missing are trained first, ten minutes in all on two cores. To take
them from another folder: ``make docs-pictures ARGS="--root runs"``. A run of published models takes an hour and needs
their weights, so its picture is taken only with ``--only tldr``, of the run ``tldr`` in that folder; those of studies
only with ``--only studies``, of the pages under ``studies`` there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BIN = Path(sys.executable).parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_MS = 120_000
SHORT = ("train.num_iterations=20", "eval.every=5", "eval.max_problems=24", "eval.num_samples=2")
RUNS: dict[str, tuple[str, ...]] = {
    "full": (),
    "as-it-ships": SHORT,
    "small-steps": (*SHORT, "optim.lr=5e-5"),
    "aligned": (*SHORT, "rollout.joint_mode=aligned"),
}
"""The runs in the pictures, by id: what each changes in the configuration ``embedded``."""
PICTURES = {
    "learning.png": "the learning curves of a run, for README.md",
    "report.png": "the first screen of its report, for docs/report.md",
    "tldr.png": "the learning curves of `tldr_cpu` with published models, for docs/results.md",
    "mlflow-charts.png": "MLflow's charts of three short runs, for docs/orchestration.md",
    "study-coopcode.png": "the learning curves of the arms of the study `coopcode`, for docs/studies.md",
    "study-posts.png": "the same of the study `posts`",
}
"""Every picture under docs/, and what it shows."""


def run_magrpo(*arguments: str | Path) -> None:
    code = "import sys; from pipelines.cli import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, check=True)


def train_missing_runs(root: Path) -> None:
    """Train, or resume, those of ``RUNS`` that have no report."""
    for run, overrides in RUNS.items():
        if any((root / run).glob("stages/*/report/_SUCCESS")):
            continue
        if (root / run / "config.json").exists():
            run_magrpo("resume", run, "--root", root)
        else:
            run_magrpo("train", "embedded", *overrides, "--name", run, "--root", root)


@contextmanager
def open_mlflow(root: Path) -> Iterator[str]:
    """The address of an MLflow server of the runs in ``root``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    store = f"sqlite:///{root.resolve()}/mlflow.db"
    command = [BIN / "mlflow", "server", "--backend-store-uri", store, "--workers", "1", "--port", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}
    server = subprocess.Popen(command, env=environment, **quiet)
    try:
        wait_until_healthy(f"{address}/health")
        yield address
    finally:
        server.terminate()
        server.wait()


def wait_until_healthy(url: str) -> None:
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def open_page(browser: Browser, url: str, height: int) -> Page:
    """A page of a desk's width, twice as sharp, which is light."""
    context = browser.new_context(
        viewport={"width": 1280, "height": height}, device_scale_factor=1.5, color_scheme="light"
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    return page


def picture_report(browser: Browser, root: Path) -> None:
    """The first screen of the report, and its learning curves."""
    page = open_report(browser, root / "full")
    page.screenshot(path=DOCS / "report.png", timeout=PATIENCE_MS)
    picture_curves(page, DOCS / "learning.png")


def open_report(browser: Browser, run: Path) -> Page:
    run_magrpo("show", run.name, "--root", run.parent, "--rebuild")
    return open_page(browser, (run / "report.html").resolve().as_uri(), height=1140)


def picture_curves(page: Page, path: Path) -> None:
    """The first two figures of a report: the joint return, and the parts of the reward."""
    first, second = (page.locator("figure").nth(i).bounding_box() for i in range(2))
    assert first is not None
    assert second is not None
    margin = 12.0
    curves = {
        "x": first["x"] - margin,
        "y": first["y"] - margin,
        "width": second["x"] + second["width"] - first["x"] + 2 * margin,
        "height": max(first["height"], second["height"]) + 2 * margin,
    }
    page.screenshot(path=path, full_page=True, clip=curves, timeout=PATIENCE_MS)


def picture_study(browser: Browser, root: Path, name: str) -> None:
    """The learning curves of the arms of a study: a figure for the first six, another for further ones."""
    page = open_page(browser, (root / "studies" / name / "study.html").resolve().as_uri(), height=1140)
    page.locator("figure").first.locator("xpath=..").screenshot(path=DOCS / f"study-{name}.png", timeout=PATIENCE_MS)


def picture_charts(browser: Browser, root: Path) -> None:
    """MLflow's charts of the three short runs."""
    with open_mlflow(root) as address:
        query = "workflowType=machine_learning&startTime=ALL&compareRunsMode=CHART"
        query += "&searchFilter=attributes.run_name != 'full'"
        page = open_page(browser, f"{address}/#/experiments/1/runs?{query}", height=820)
        page.get_by_placeholder("Search metric charts").fill("eval/")
        close = page.get_by_role("button", name="Close", exact=True)
        if close.count():
            close.click()  # an assistant that takes a third of the page
        page.locator(".main-svg").first.wait_for()
        page.wait_for_timeout(5000)  # the other charts
        page.screenshot(path=DOCS / "mlflow-charts.png", timeout=PATIENCE_MS, animations="disabled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT / "build" / "pictures" / "runs", help="folder of the runs")
    parser.add_argument("--only", choices=("report", "charts", "tldr", "studies"), help="take the pictures of one page")
    chosen = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("Chromium is not installed: apt-get install chromium")
    if chosen.only is None:
        train_missing_runs(chosen.root)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        if chosen.only in (None, "report"):
            picture_report(browser, chosen.root)
        if chosen.only in (None, "charts"):
            picture_charts(browser, chosen.root)
        if chosen.only == "tldr":
            picture_curves(open_report(browser, chosen.root / "tldr"), DOCS / "tldr.png")
        if chosen.only == "studies":
            for name in ("coopcode", "posts"):
                picture_study(browser, chosen.root, name)
        browser.close()


if __name__ == "__main__":
    main()
