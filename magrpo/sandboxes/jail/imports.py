"""Imports the packages that programs may use, in the zygote."""

import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from socket import socket
from types import ModuleType
from typing import Any

READY = b"ready"
"""Message of the zygote after all imports; before each package's module it sends the module's name."""


class PackageFinder:
    """Finds the modules and the metadata of allowed packages, and of nothing that is installed beside them.

    ``folders``: for each top-level file or folder of a package, by name, the folder that holds it.
    """

    def __init__(self, folders: dict[str, str]) -> None:
        self.folders = folders
        self.roots = {name.partition(".")[0]: folder for name, folder in folders.items()}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`; a package's own modules are found by the package's path."""
        if path is not None or name not in self.roots:
            return None
        return PathFinder.find_spec(name, [self.roots[name]])

    def find_distributions(self, context: Any) -> Iterator[Any]:
        """See :class:`importlib.metadata.DistributionFinder`."""
        from importlib.metadata import PathDistribution  # heavy: email
        from pathlib import Path

        for name, folder in self.folders.items():
            if name.endswith((".dist-info", ".egg-info")):
                found = PathDistribution(Path(folder, name))
                if context.name is None or normalize_name(found.name) == normalize_name(context.name):
                    yield found


def normalize_name(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def import_packages(control: socket, folders: dict[str, str], modules: Iterable[str]) -> int:
    """Import ``modules``, naming each to the parent beforehand; return the bytes of address space that they take.

    An exception ends the zygote; the parent reads it from standard error.
    """
    before = measure_addresses()
    sys.meta_path.append(PackageFinder(folders))
    for name in modules:
        control.send(name.encode())
        importlib.import_module(name)
    return measure_addresses() - before


def measure_addresses() -> int:
    """Return the address space of this process in bytes."""
    with open("/proc/self/status", "rb") as file:  # noqa: PTH123 - pathlib is slow to import
        return int(file.read().partition(b"VmSize:")[2].split()[0]) * 1024
