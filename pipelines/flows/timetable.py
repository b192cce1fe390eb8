"""The timetable of scheduled runs: the flags of ``magrpo schedule``, checked as far as this needs no Prefect."""

from dataclasses import dataclass
from datetime import timedelta
from zoneinfo import ZoneInfo

from magrpo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Timetable:
    """The times at which runs start: a cron expression or an interval.

    Raises ConfigError unless exactly one is given. The values of a cron expression are left to Prefect, which reads the
    address of its server when it is imported: :func:`pipelines.flows.schedule.build_schedule` checks them.
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
        try:
            ZoneInfo(self.timezone)
        except (KeyError, ValueError, OSError):
            message = f"--timezone {self.timezone!r}: no such time zone; use a name like Europe/Berlin"
            raise ConfigError(message) from None

    def __str__(self) -> str:
        return f"every {self.interval}" if self.cron is None else f'cron "{self.cron}" ({self.timezone})'
