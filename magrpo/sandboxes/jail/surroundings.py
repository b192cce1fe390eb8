"""Changes that a test makes around a call: of the seed, the environment, the recursion limit, or ``sys.argv``.

The test and the program run in different processes, so these changes travel with the next call. Replaced streams,
clocks and builtin functions cannot travel, because they are objects of the test.
"""

import builtins
import os
import sys
import time
from collections.abc import Iterable
from copy import copy
from types import ModuleType
from typing import Any

from .seeds import SHARED, seed_generators
from .stand_ins import Inexpressible

_REPLACED: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (builtins, ("input", "print", "open")),
    (sys, ("stderr", "stdin", "stdout")),
    (time, ("monotonic", "perf_counter", "sleep", "time")),
)
_ORIGINALS = [(module, name, getattr(module, name)) for module, names in _REPLACED for name in names]
_ENVIRONMENT: dict[bytes, bytes] = vars(os.environ)["_data"]  # many calls compare it, and the mapping itself is slow


class Surroundings:
    """Notices, in the tester, changes that the test makes."""

    def __init__(self) -> None:
        self.environment = _ENVIRONMENT.copy()
        self.recursion_limit = sys.getrecursionlimit()
        self.argv = copy(sys.argv)
        self.seeds: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.seeders: dict[str, Any] = {}
        for name in SHARED & sys.modules.keys():
            module: Any = sys.modules[name]
            self.seeders[name] = module.seed
            module.seed = self._note_seed(name, module.seed)

    def restore_seeds(self) -> None:
        """Let the next test draw the same random numbers as this one."""
        for name, seeder in self.seeders.items():
            vars(sys.modules[name])["seed"] = seeder
        seed_generators()

    def list_changes(self) -> tuple[tuple[str, Any], ...]:
        """List the name and the value of each change since the last call.

        Raises:
            Inexpressible: the test has replaced an object that the program may use.
        """
        for module, name, original in _ORIGINALS:
            if getattr(module, name) is not original:
                raise Inexpressible(f"the test replaces {module.__name__}.{name}")
        changes: list[tuple[str, Any]] = []
        if self.seeds:
            changes += self.seeds.items()
            self.seeds = {}
        if self.environment != _ENVIRONMENT:
            self.environment = _ENVIRONMENT.copy()
            changes.append(("environ", dict(os.environ)))
        if sys.getrecursionlimit() != self.recursion_limit:
            self.recursion_limit = sys.getrecursionlimit()
            changes.append(("recursionlimit", self.recursion_limit))
        if sys.argv != self.argv:
            self.argv = copy(sys.argv)
            changes.append(("argv", self.argv))
        return tuple(changes)

    def _note_seed(self, name: str, seed: Any) -> Any:
        def noting(*arguments: Any, **keywords: Any) -> None:
            self.seeds[name] = arguments, keywords
            seed(*arguments, **keywords)

        return noting


def make_changes(changes: Iterable[tuple[str, Any]]) -> None:
    """Make the changes in the candidate."""
    for name, value in changes:
        if name == "environ":
            os.environ.clear()
            os.environ.update(value)
        elif name == "recursionlimit":
            sys.setrecursionlimit(value)
        elif name == "argv":
            sys.argv = value
        else:
            arguments, keywords = value
            sys.modules[name].seed(*arguments, **keywords)
