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
    """Start runs by a schedule until interrupted, then return 0; ``when``: cron, interval, rrule, time zone."""
    root = load_config(config, overrides).root
    with LocalServer(root / "prefect", schedules=True) as server:
        print("starting Prefect (the first time in a folder takes up to half a minute)", flush=True)
        from pipelines.flows.schedule import Timetable, serve_flow  # prefect, loaded while the server starts

        timetable = Timetable(*when)
        timetable.build_schedule()  # rejects an unusable timetable before the server answers
        server.wait_until_ready()
        with suppress(KeyboardInterrupt, CancelledError):
            serve_flow(config, overrides, timetable, name, limit)
    print("stopped; when this schedule is served again, one run makes up for all runs missed until then")
    return 0
