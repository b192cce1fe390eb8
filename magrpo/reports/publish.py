"""The report at the top of a run directory: the page that the run committed, with the wall time of the run."""

from pathlib import Path
from tempfile import TemporaryDirectory

from magrpo.layout import find_evaluations, is_finished, makes_tables, read_evaluation, steps
from magrpo.plugins import ConfigError
from magrpo.reports.figures import format_wall_time
from magrpo.store import RunStore, atomic_write
from magrpo.tracking.wall_time import read_wall_time

REPORT = "report.html"
"""The file at the top of a run directory."""
WALL_TIME = '<p id="wall-time"></p>'
"""The place in a page for the wall time, which is known once the run has ended."""


def publish_report(store: RunStore) -> Path:
    """Copy the committed page of a finished run to the top of its directory and fill in the wall time."""
    step = steps(store.config())[-1]
    return _publish_page(store, store.stage_folder(step.folder) / _page_name(store))


def rebuild_report(store: RunStore) -> Path:
    """Write the page of a run again, from its evaluations so far; ConfigError if it has none."""
    with TemporaryDirectory() as folder:
        _write_report(store, Path(folder))
        return _publish_page(store, Path(folder) / _page_name(store))


def find_report(store: RunStore) -> Path:
    """The report at the top of a run directory, published or built first if it is not there yet.

    Raises ConfigError if the run has no evaluation.
    """
    path = store.path / REPORT
    if path.exists() and is_finished(store):
        return path
    return publish_report(store) if is_finished(store) else rebuild_report(store)


def _page_name(store: RunStore) -> str:
    return "baselines.html" if makes_tables(store.config()) else REPORT


def _write_report(store: RunStore, folder: Path) -> None:
    from magrpo.reports.baselines import BaselineTable, read_baselines  # matplotlib
    from magrpo.reports.run import RunReport  # matplotlib

    config = store.config()
    if makes_tables(config):
        if not is_finished(store):
            raise ConfigError(f"run {store.run_id} has no table yet; resume it: magrpo train --resume {store.run_id}")
        BaselineTable(config, read_baselines(store, config)).write_files(folder)
        return
    reports = [read_evaluation(store.folder(pointer)) for pointer in find_evaluations(store).values()]
    if not reports:
        raise ConfigError(f"run {store.run_id} has no evaluation yet; resume it: magrpo train --resume {store.run_id}")
    RunReport(store.run_id, store, config, reports).write_files(folder)


def _publish_page(store: RunStore, page: Path) -> Path:
    wall_time = read_wall_time(store.path)
    text = page.read_text(encoding="utf-8")
    if wall_time is not None:
        text = text.replace(WALL_TIME, WALL_TIME.replace("><", f">Took {format_wall_time(wall_time)}.<"), 1)
    path = store.path / REPORT
    atomic_write(path, text.encode())
    return path
