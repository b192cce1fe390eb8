"""Imports ``random`` in such a way that a fork leaves its state alone.

Python reseeds ``random`` in every child, which would copy much of the zygote's memory; :mod:`.seeds` seeds programs and
tests instead.
"""

import os

_register = os.register_at_fork
os.register_at_fork = lambda **_: None
import random  # noqa: E402, F401 - for those who import it next

os.register_at_fork = _register
