"""``magrpo serve``: start runs by a schedule until interrupted."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from magrpo.config import load_config
from pipelines.flows.local_server import LocalServer


def serve_schedule(
    config: Path, overrides: Sequence[str], when: tuple[str | None, str | None, str | None, str], name: str, limit: int
) -> int:
    """Start runs by a schedule until interrupted; ``when`` is cron, interval, rrule, time zone. Returns 0."""
    root = load_config(config, overrides).root
    with LocalServer(root / "prefect", schedules=True) as server:
        print("starting Prefect (the first time in a folder takes up to half a minute)", flush=True)
        from pipelines.flows.schedule import Timetable, serve  # prefect, loaded while the server starts

        timetable = Timetable(*when)
        timetable.schedule()  # rejects an unusable timetable before the server answers
        server.wait()
        with suppress(KeyboardInterrupt, CancelledError):
            serve(config, overrides, timetable, name, limit)
    print("ended; runs missed until this schedule is served again are made up for then, by one run")
    return 0
