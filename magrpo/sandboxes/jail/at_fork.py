"""Imports ``random`` such that a fork leaves its state alone.

A seed from the system in each of the zygote's children would copy much memory. Programs are seeded with 0, and tests
that draw random numbers draw the same ones each time.
"""

import os

_register = os.register_at_fork
os.register_at_fork = lambda **_: None
import random  # noqa: E402

os.register_at_fork = _register


def seed_children() -> None:
    """Let this process's own children begin with another state each, as those of every Python program do."""
    os.register_at_fork(after_in_child=random.seed)
