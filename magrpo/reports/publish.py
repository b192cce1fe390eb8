"""The report at the top of a run directory: the page the run committed, with wall time and MLflow link filled in."""

import re
from html import escape, unescape
from pathlib import Path
from tempfile import TemporaryDirectory

from magrpo.errors import ConfigError
from magrpo.files.writing import atomic_write
from magrpo.reports.figures import format_wall_time
from magrpo.run.files import is_finished
from magrpo.run.steps import makes_tables, steps
from magrpo.run.store import RunStore
from magrpo.tracking.wall_time import read_wall_time

REPORT = "report.html"
"""Name of the report at the top of a run directory."""
WALL_TIME = '<p id="wall-time"></p>'
"""Placeholder in a page for the wall time and the link to MLflow, which are known only once the run has ended."""
MLFLOW_LINK = re.compile('<a id="mlflow-page" href="([^"]+)">')
"""The link to the run's page in MLflow."""


def publish_report(store: RunStore, mlflow_page: str = "") -> Path:
    """Copy the committed page of a finished run to the top of its directory, filling in wall time and MLflow link.

    ``mlflow_page``: address of the run in MLflow, if reached; by default the address in the report that is replaced.
    """
    step = steps(store.config())[-1]
    return _publish_page(store, store.stage_folder(step.output) / _page_name(store), mlflow_page)


def rebuild_report(store: RunStore) -> Path:
    """Write the page of a run again from its evaluations so far; ConfigError if it has none."""
    with TemporaryDirectory() as folder:
        _write_report(store, Path(folder))
        return _publish_page(store, Path(folder) / _page_name(store))


def find_report(store: RunStore) -> Path:
    """Return the report at the top of a run directory, publishing or building it first if it is missing.

    Raises ConfigError if the run has no evaluation.
    """
    if not is_finished(store):
        return rebuild_report(store)
    path = store.path / REPORT
    return path if path.exists() else publish_report(store)


def _page_name(store: RunStore) -> str:
    return "baselines.html" if makes_tables(store.config()) else REPORT


def _write_report(store: RunStore, folder: Path) -> None:
    from magrpo.reports.baselines import BaselineTable, read_baselines  # matplotlib
    from magrpo.reports.run import RunReport  # matplotlib

    config = store.config()
    if makes_tables(config):
        if not is_finished(store):
            raise ConfigError(f"run {store.run_id} has no table yet; resume it: {store.format_command('resume')}")
        BaselineTable(config, read_baselines(store, config)).write_files(folder)
    else:
        RunReport.read(store).write_files(folder)


def _publish_page(store: RunStore, page: Path, mlflow_page: str = "") -> Path:
    path = store.path / REPORT
    wall_time = read_wall_time(store.path)
    if not mlflow_page and path.exists():
        link = MLFLOW_LINK.search(path.read_text(encoding="utf-8"))
        if link:
            mlflow_page = unescape(link[1])
    sentences = [] if wall_time is None else [f"Took {format_wall_time(wall_time)}."]
    if mlflow_page:
        sentences.append(f'<a id="mlflow-page" href="{escape(mlflow_page)}">Its page in MLflow</a>')
    text = page.read_text(encoding="utf-8")
    text = text.replace(WALL_TIME, WALL_TIME.replace("><", f">{' '.join(sentences)}<"), 1)
    atomic_write(path, text.encode())
    return path
