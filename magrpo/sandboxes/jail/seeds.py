"""Seeds of the shared random number generators, so that equal programs draw equal numbers."""

import os
import random
import sys
from typing import Any

SHARED = frozenset({"random", "numpy.random"})
"""Modules whose functions draw from one process-wide generator; numpy counts only where it is allowed."""
_own_seeds = random.Random(0)
"""Draws the seeds of numpy's other generators, which would otherwise take them from the system."""
os.register_at_fork(after_in_child=_own_seeds.seed)  # as Python does with ``random``: children draw other numbers


def seed_generators() -> None:
    """Seed the shared generators, and numpy's unseeded ones, as they are at the start of every program and test."""
    for name in SHARED & sys.modules.keys():
        module: Any = sys.modules[name]
        module.seed(0)
    _own_seeds.seed(0)
    if "numpy.random" in sys.modules:
        bit_generator: Any = sys.modules["numpy.random.bit_generator"]
        bit_generator.randbits = _own_seeds.getrandbits
