"""Sandboxes that run untrusted programs."""

from __future__ import annotations

STRENGTH = {"namespaces": 3, "namespaces-flat": 2, "landlock": 1, "none": 0}
"""The isolation levels, strongest first, and the number that stands for each among metrics."""


class SandboxError(RuntimeError):
    """The sandbox cannot be opened, or failed repeatedly. A bad program never raises it."""


class SandboxDied(SandboxError):
    """Several executions in a row found no working jail. Trying again may help: jails are started anew."""
