"""Sandboxes, which run untrusted programs and report on the cases of their tests.

Begin with ``pool.py``: it chooses an isolation level (``levels.py``), starts workers (``worker.py``), and turns each
``Execution`` into an ``ExecutionReport``. ``instrument.py`` makes every assert of a test a case of its own. ``jail/``
is the code that runs inside a worker's processes. This module holds the isolation levels and the errors.
"""

STRENGTH = {"namespaces": 3, "namespaces-flat": 2, "landlock": 1, "none": 0}
"""Isolation levels, strongest first, with the number that stands for each in metrics."""
LEVEL_TITLES = {
    "namespaces": "Linux namespaces (strongest available level)",
    "namespaces-flat": "shared Linux namespaces (level namespaces-flat, second strongest)",
    "landlock": "Landlock without namespaces (level landlock, weaker)",
    "none": "none, programs run unprotected (level none)",
}
"""The isolation levels in words, for the console."""


class SandboxError(RuntimeError):
    """The sandbox cannot be opened, or failed repeatedly. A bad program never raises it."""


class SandboxDied(SandboxError):
    """Several executions in a row found no working sandbox process. A retry may succeed: it starts new ones."""
