"""The report at the top of a run directory: a copy of the page the run committed."""

from pathlib import Path
from tempfile import TemporaryDirectory

from magrpo.errors import ConfigError
from magrpo.files.writing import atomic_write
from magrpo.run.files import is_finished
from magrpo.run.steps import makes_tables, steps
from magrpo.run.store import RunStore

REPORT = "report.html"
"""Name of the report at the top of a run directory."""


def publish_report(store: RunStore) -> Path:
    """Copy the committed page of a finished run to the top of its directory."""
    step = steps(store.config())[-1]
    return _publish_page(store, store.stage_folder(step.output) / _page_name(store))


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


def _publish_page(store: RunStore, page: Path) -> Path:
    path = store.path / REPORT
    atomic_write(path, page.read_bytes())
    return path
