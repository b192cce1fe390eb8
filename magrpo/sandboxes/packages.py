"""The packages that programs may import: modules and files of installed distributions and their dependencies."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from magrpo.errors import ConfigError, first_line

ALONG = {"numpy": "numpy.random", "matplotlib": "matplotlib.pyplot"}
"""Modules to import along with a distribution that would import them late: the sandbox seeds ``numpy.random``, and
``matplotlib.pyplot`` lists all fonts, which takes longer than a test may."""
METADATA = (".dist-info", ".egg-info")


@dataclass(frozen=True, slots=True)
class Packages:
    """The files and modules that ``sandbox.packages`` makes importable."""

    folders: Mapping[str, str] = field(default_factory=dict)
    """Path of each top-level file and folder, metadata included, by name."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Modules that a jail imports when it starts, each with the name in ``sandbox.packages`` that asks for it."""
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Dependencies that are not installed, by the name in ``sandbox.packages`` that needs them."""


NO_PACKAGES = Packages()


def find_packages(names: Iterable[str]) -> Packages:
    """Find distributions, named as on PyPI or by one of their modules, with all their dependencies.

    Raises:
        ConfigError: one is not installed, or has no modules of its own.
    """
    folders: dict[str, str] = {}
    modules: dict[str, str] = {}
    missing: dict[str, tuple[str, ...]] = {}
    for name in names:
        found, wanted = _find_distributions(name)
        needed, missing[name] = _add_dependencies(found)
        for each in needed:
            folders |= dict(_list_files(each))
        names_needed = {each.name for each in needed}
        late = [module for owner, module in sorted(ALONG.items()) if owner in names_needed]
        for module in [*wanted, *late]:
            modules.setdefault(module, name)
    return Packages(folders, modules, missing)


def _find_distributions(name: str) -> tuple[list[Distribution], list[str]]:
    """Return the distributions that a name in ``sandbox.packages`` means, and the modules to import for it."""
    try:
        found = distribution(name)
    except (PackageNotFoundError, ValueError):  # an empty name raises ValueError
        owners = packages_distributions().get(name.partition(".")[0], [])
        if not owners:
            raise ConfigError(
                f"sandbox.packages: {name!r} is not installed, neither as a distribution nor as a module; "
                f"pip install it or remove it from the list"
            ) from None
        return [distribution(owner) for owner in dict.fromkeys(owners)], [name]
    modules = _list_modules(found)
    if not modules:
        raise ConfigError(
            f"sandbox.packages: {name!r} lists no modules of its own; editable installations and packages that only "
            f"collect dependencies do not. Install it without -e, or name the modules or distributions you need"
        )
    return [found], modules


def _add_dependencies(found: Iterable[Distribution]) -> tuple[list[Distribution], tuple[str, ...]]:
    """Return ``found`` with all direct and indirect dependencies, and the names of those that are not installed."""
    needed: list[Distribution] = []
    missing: list[str] = []
    seen: set[tuple[str, str]] = set()
    waiting = [(each, "") for each in found]
    while waiting:
        owner, extra = waiting.pop()
        if (owner.name, extra) in seen:
            continue
        seen.add((owner.name, extra))
        needed.append(owner)
        for requirement in _list_requirements(owner, extra):
            try:
                dependency = distribution(requirement.name)
            except PackageNotFoundError:
                missing.append(requirement.name)
            else:
                waiting += [(dependency, wanted) for wanted in ("", *sorted(requirement.extras))]
    return needed, tuple(dict.fromkeys(missing))


def _list_requirements(owner: Distribution, extra: str) -> Iterator[Requirement]:
    """Yield the requirements of a distribution on this machine, or those of its extra if ``extra`` names one."""
    for line in owner.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            raise ConfigError(
                f"sandbox.packages: {owner.name} has a dependency that cannot be parsed, {line!r}: "
                f"{first_line(error)}; fix its metadata"
            ) from None
        if not requirement.marker or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _list_files(found: Distribution) -> Iterator[tuple[str, str]]:
    """Yield the name and path of each top-level file and folder of a distribution."""
    for entry in found.files or ():
        top = entry.parts[0]
        if top != ".." and top != "__pycache__":
            path = Path(str(found.locate_file(top)))
            if path.exists():
                yield top, str(path)


def _list_modules(found: Distribution) -> list[str]:
    """List the module that is named like the distribution, else all its public top-level modules."""
    names = {_name_module(Path(path)) for _, path in _list_files(found)}
    public = sorted(name for name in names if name and not name.startswith("_"))
    like_it = [name for name in public if canonicalize_name(name) == canonicalize_name(found.name)]
    return like_it or public


def _name_module(path: Path) -> str | None:
    """Return the name of the module in a top-level file or folder; None if it holds none."""
    name = path.name if path.is_dir() else inspect.getmodulename(path)
    return name if name and name.isidentifier() and not path.name.endswith(METADATA) else None


def explain_failure(packages: Packages, module: str, reason: str) -> str:
    """Explain in a message why a module cannot be imported."""
    name = packages.modules[module]
    missing = packages.missing[name]
    unknown = re.search(r"No module named '(\w+)", reason)
    if missing:
        remedy = f"pip install {' '.join(missing)}, which it needs"
    elif unknown:
        remedy = f"pip install {unknown[1]} and add it to sandbox.packages: an undeclared dependency"
    else:
        remedy = "reinstall it"
    subject = repr(name) if module == name else f"{module!r} of {name!r}"
    return f"sandbox.packages: {subject} cannot be imported in the sandbox ({reason}); {remedy}, or remove {name!r}"
