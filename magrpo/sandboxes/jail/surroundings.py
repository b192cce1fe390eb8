"""What a test changes around a call: streams, ``input``, the clock, the seed, the environment, the recursion limit.

The test runs in another process than the program, so such changes travel with the next question.
"""

import builtins
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from .seeds import SHARED, seed_generators

_REPLACED: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (builtins, ("input", "print", "open")),
    (sys, ("argv", "stderr", "stdin", "stdout")),
    (time, ("monotonic", "perf_counter", "sleep", "time")),
)
_MODULES = {module.__name__: module for module, _ in _REPLACED}
_ORIGINALS = [(module, name, getattr(module, name)) for module, names in _REPLACED for name in names]
_ENVIRONMENT: dict[bytes, bytes] = vars(os.environ)["_data"]  # compared by many calls: the mapping itself is slow


class Surroundings:
    """Notices, in the tester, what the test has changed."""

    def __init__(self) -> None:
        self.environment, self.recursion_limit = _ENVIRONMENT.copy(), sys.getrecursionlimit()
        self.seeds: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.seeders: dict[str, Any] = {}
        for name in SHARED & sys.modules.keys():
            module: Any = sys.modules[name]
            self.seeders[name] = module.seed
            module.seed = self._note_seed(name, module.seed)

    def restore_seeds(self) -> None:
        """Let the next test draw the random numbers that this one drew."""
        for name, seeder in self.seeders.items():
            vars(sys.modules[name])["seed"] = seeder
        seed_generators()

    def list_changes(self) -> tuple[tuple[str, str, Any], ...]:
        """Module, name and value of each change that the next call must see."""
        changes = [
            (module.__name__, name, value)
            for module, name, original in _ORIGINALS
            if (value := getattr(module, name)) is not original
        ]
        if self.seeds:
            changes += [(name, "seed", arguments) for name, arguments in self.seeds.items()]
            self.seeds = {}
        if self.environment != _ENVIRONMENT:
            self.environment = _ENVIRONMENT.copy()
            changes.append(("os", "environ", dict(os.environ)))
        if sys.getrecursionlimit() != self.recursion_limit:
            self.recursion_limit = sys.getrecursionlimit()
            changes.append(("sys", "recursionlimit", self.recursion_limit))
        return tuple(changes)

    def _note_seed(self, name: str, seed: Any) -> Any:
        def noting(*arguments: Any, **keywords: Any) -> None:
            self.seeds[name] = arguments, keywords
            seed(*arguments, **keywords)

        return noting


@contextmanager
def make_changes(changes: Iterable[tuple[str, str, Any]]) -> Iterator[None]:
    """Make such changes in the candidate; those of names last until the end of the call."""
    replaced = []
    for module_name, name, value in changes:
        if name == "seed":
            arguments, keywords = value
            sys.modules[module_name].seed(*arguments, **keywords)
        elif name == "recursionlimit":
            sys.setrecursionlimit(value)
        elif name == "environ":
            os.environ.clear()
            os.environ.update(value)
        else:
            module = _MODULES[module_name]
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)
