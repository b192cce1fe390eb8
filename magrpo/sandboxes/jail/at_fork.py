"""Imports ``random`` such that a fork leaves its state alone.

A seed from the system in each of the zygote's children would copy much memory. :mod:`.seeds` seeds programs and tests.
"""

import os

_register = os.register_at_fork
os.register_at_fork = lambda **_: None
import random  # noqa: E402, F401 - for those who import it next

os.register_at_fork = _register
