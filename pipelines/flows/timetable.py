"""The timetable of scheduled runs: the flags of ``magrpo schedule``, checked before a server of Prefect is started."""

import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from tempfile import TemporaryDirectory
from zoneinfo import ZoneInfo

from magrpo.errors import ConfigError

_CHECK = """
import sys
from prefect.schedules import Schedule
try:
    Schedule(cron=sys.argv[1])
except ValueError as error:
    print(error)
"""


@dataclass(frozen=True, slots=True)
class Timetable:
    """The times at which runs start: a cron expression or an interval.

    Raises ConfigError unless exactly one is given, and Prefect can use it.
    """

    cron: str | None = None
    interval: timedelta | None = None
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.interval is None):
            raise ConfigError('schedule needs either --cron or --interval, such as --cron "0 2 * * *"')
        if self.interval is not None and self.interval <= timedelta(0):
            raise ConfigError("--interval must be longer than 0, such as 90s, 30m, 6h or 1d")
        if self.cron is not None and len(self.cron.split()) != 5 and not self.cron.startswith("@"):
            message = 'needs five fields: minute, hour, day, month, day of the week, such as "0 2 * * *"'
            raise ConfigError(f"--cron {self.cron!r}: {message}")
        if self.cron is not None:
            _check_cron(self.cron)
        try:
            ZoneInfo(self.timezone)
        except (KeyError, ValueError, OSError):
            message = f"--timezone {self.timezone!r}: no such time zone; use a name like Europe/Berlin"
            raise ConfigError(message) from None

    def __str__(self) -> str:
        when = f'cron "{self.cron}"' if self.cron is not None else f"every {self.interval}"
        return f"{when} ({self.timezone})"


def _check_cron(cron: str) -> None:
    """Raise ConfigError unless Prefect can use ``cron``.

    Another process asks Prefect, which reads the address of its server when it is imported: there is none yet.
    """
    with TemporaryDirectory() as home:
        command = [sys.executable, "-P", "-c", _CHECK, cron]
        settings = os.environ | {"PREFECT_HOME": home}
        asked = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    if asked.stdout:
        raise ConfigError(f"--cron {cron!r}: {asked.stdout.strip()}")
