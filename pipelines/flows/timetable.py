"""When scheduled runs start: the flags of ``magrpo schedule``, checked without Prefect."""

import re
from dataclasses import dataclass
from datetime import timedelta
from zoneinfo import ZoneInfo

from magrpo.plugins import ConfigError

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True, slots=True)
class Timetable:
    """When runs start. Raises ConfigError unless it is exactly one schedule, in a time zone that exists.

    Prefect checks ``cron`` and ``rrule`` when it makes a schedule of them.
    """

    cron: str | None = None
    interval: str | None = None
    """A number and a unit: 90s, 30m, 6h, 1d."""
    rrule: str | None = None
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        given = self.cron, self.interval, self.rrule
        if sum(value is not None for value in given) != 1:
            raise ConfigError('schedule needs one of --cron, --interval and --rrule, such as --cron "0 2 * * *"')
        try:
            ZoneInfo(self.timezone)
        except (KeyError, ValueError, OSError):
            message = f"--timezone {self.timezone!r}: no such time zone; use a name like Europe/Berlin"
            raise ConfigError(message) from None
        if self.cron is not None and len(self.cron.split()) != 5 and not self.cron.startswith("@"):
            message = 'needs five fields: minute, hour, day, month, day of the week, such as "0 2 * * *"'
            raise ConfigError(f"--cron {self.cron!r}: {message}")
        if self.interval is not None:
            parse_interval(self.interval)


def parse_interval(text: str) -> timedelta:
    """The time in ``text``; ConfigError if it is none."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if parts is None or float(parts[1]) == 0:
        raise ConfigError(f"--interval {text!r}: an interval is a positive number and a unit: 90s, 30m, 6h or 1d")
    return timedelta(**{_UNITS[parts[2]]: float(parts[1])})
