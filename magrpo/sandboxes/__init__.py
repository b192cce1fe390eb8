"""Sandboxes that run untrusted programs: isolation levels and errors."""

STRENGTH = {"namespaces": 3, "namespaces-flat": 2, "landlock": 1, "none": 0}
"""The isolation levels, strongest first, with the number that represents each in metrics."""


class SandboxError(RuntimeError):
    """The sandbox cannot be opened, or failed repeatedly. A bad program never raises it."""


class SandboxDied(SandboxError):
    """Several executions in a row found no working jail. A retry may succeed: it starts new jails."""
